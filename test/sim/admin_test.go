package sim

import (
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	membership "github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/state"
)

// admin changes who belongs to the cluster, and compacts.
type admin struct {
	w    *world
	busy int // changes of members under way
}

// begin lets the admin work until all comes to rest.
func (a *admin) begin() {
	if p := a.w.plan; p.changes > 0 {
		a.w.after(a.w.about(p.changes), a.change)
	}
	a.w.after(a.w.about(a.w.plan.compact), a.compact)
}

// pick returns a member that is up and can be asked, or nil.
func (a *admin) pick() *member {
	w := a.w
	m := w.members[w.rng.IntN(len(w.members))]
	if !m.up || w.now.Before(m.paused) {
		return nil
	}
	return m
}

// change asks for a change of members, mostly when the one before is through.
func (a *admin) change() {
	w := a.w
	if w.quiet {
		return
	}
	w.after(w.about(w.plan.changes), a.change)
	m := a.pick()
	if m == nil || a.busy > 1 || a.busy > 0 && w.chance(0.8) {
		return
	}
	cc, then := a.choose(m)
	if cc == nil {
		return
	}
	a.busy++
	w.note("admin asks %d: %v of %d", m.id, cc.GetType(), cc.GetNodeId())
	end := func(index uint64, err error) {
		a.busy--
		w.note("admin: %v of %d: %v", cc.GetType(), cc.GetNodeId(), err)
		if err == nil {
			w.cover["change "+cc.GetType().String()]++
			then(index)
		}
	}
	o := &op{gone: func() { end(0, errors.New("connection lost")) }}
	m.open = append(m.open, o)
	m.in.ConfChanges = append(m.in.ConfChanges, consensus.ConfProposal{Change: cc, Done: func(r consensus.Result, err error) {
		m.ended(o)
		end(r.Index, errors.Join(err, r.Err))
	}})
	m.wake()
}

// choose finds a change that leaves a cluster that can work, as a server lets
// its clients make one, and what follows once it is made.
func (a *admin) choose(m *member) (cc *raftpb.ConfChange, then func(index uint64)) {
	w := a.w
	_, members, _ := m.machine().Tables()
	voters, learners := members.Count()
	list := members.List()
	if len(list) == 0 {
		return nil, nil
	}
	var learner *membership.Member
	for _, mem := range list {
		if mem.IsLearner {
			learner = mem
		}
	}
	id := m.ids.Next()
	nothing := func(uint64) {}
	switch n := w.rng.IntN(10); {
	case learner != nil && n < 6:
		// The server asks that it has caught up.
		l := w.member(learner.ID)
		if l.up && l.appliedIndex()+5 > m.appliedIndex() {
			return membership.PromoteChange(id, l.id), nothing
		}
		return nil, nil
	case learner != nil && n < 7:
		return membership.RemoveChange(id, learner.ID), func(index uint64) { a.removed(learner.ID, index) }
	case learners == 0 && voters <= w.plan.founders && n < 5:
		added := w.addMember(false)
		mem := added.table()
		mem.IsLearner, mem.Name = true, ""
		w.after(w.upTo(0, time.Second), func() { // it is started, whether or not it is a member
			if !added.up && added.life == 0 {
				added.start()
			}
		})
		return membership.AddChange(id, mem), nothing
	case voters > w.plan.founders || voters >= 3 && n < 2:
		out := list[w.rng.IntN(len(list))]
		for _, mem := range list { // a quorum of those that stay has to be there
			if l := w.member(mem.ID); mem.ID != out.ID && !mem.IsLearner && !l.up {
				return nil, nil
			}
		}
		if out.IsLearner {
			return nil, nil
		}
		return membership.RemoveChange(id, out.ID), func(index uint64) { a.removed(out.ID, index) }
	}
	return nil, nil
}

func (m *member) appliedIndex() uint64 {
	applied, _ := m.machine().Applied()
	return applied
}

// removed stops a member that by entry index does not belong to the cluster any
// more, some time after a quorum of the others knows for good. Before, those that
// lose power may go back to the members that they knew, and need it.
func (a *admin) removed(id, index uint64) {
	w := a.w
	m := w.member(id)
	w.after(w.upTo(0, time.Second), func() {
		know, voters := 0, 0
		for _, o := range w.present() {
			if !o.up {
				voters++
				continue
			}
			_, members, _ := o.machine().Tables()
			if self := members.Member(o.id); self == nil || !self.IsLearner {
				voters++
				if members.Removed(id) && o.sure >= index {
					know++
				}
			}
		}
		if know > voters/2 {
			m.leave()
		} else {
			a.removed(id, index)
		}
	})
}

// compact has history before some recent revision forgotten.
func (a *admin) compact() {
	w := a.w
	if w.quiet {
		return
	}
	w.after(w.about(w.plan.compact), a.compact)
	m := a.pick()
	if m == nil {
		return
	}
	now := m.machine().Root().Revision()
	revision := max(1, now-int64(w.rng.IntN([]int{1, 5, 20}[w.rng.IntN(3)])))
	h := command.Header{ID: m.ids.Next()}
	data, err := command.AppendMessage(nil, command.KindCompaction, h, &pb.CompactionRequest{Revision: revision})
	if err != nil {
		w.fail("encoding a compaction: %w", err)
		return
	}
	m.in.Proposals = append(m.in.Proposals, consensus.Proposal{ID: h.ID, Data: data, Done: func(r consensus.Result, err error) {
		if reply, ok := r.Reply.(*state.Reply); ok {
			reply.Release()
		}
		w.note("compaction at %d: %v %v", revision, r.Err, err)
		if err == nil && r.Err == nil {
			w.cover["compaction"]++
		}
	}})
	m.wake()
}
