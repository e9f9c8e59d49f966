package sim

import (
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
)

// disturb has bad luck strike, again and again.
func (w *world) disturb() {
	if w.plan.faults == 0 {
		return
	}
	w.after(w.about(w.plan.faults), func() {
		if w.quiet {
			return
		}
		w.strike()
		w.disturb()
	})
}

// strike is one piece of bad luck.
func (w *world) strike() {
	m := w.members[w.rng.IntN(len(w.members))]
	if leader := w.member(m.leader); leader != nil && w.chance(0.3) {
		m = leader
	}
	if !m.up {
		return
	}
	life := m.life
	fault := func(name string) {
		w.cover["fault: "+name]++
		w.note("%d suffers: %s", m.id, name)
	}
	switch n := w.rng.IntN(21); {
	case n == 20:
		fault("restart")
		m.stop()
	case n < 2:
		fault("power cut")
		m.crash()
	case n < 6:
		fault("power cut during a file operation")
		m.disk.arm(1 + w.rng.IntN(40))
	case n < 7:
		fault("pause")
		m.paused = w.now.Add(w.about(2 * time.Second))
	case n < 9:
		fault("slow disk")
		m.diskFree = w.now.Add(w.about(time.Second))
	case n < 10:
		fault("full disk")
		m.full = true
		w.after(w.about(time.Second), func() { m.full = m.full && m.life != life })
	case n < 11:
		fault("whole cluster without power")
		for _, m := range w.members {
			if m.up {
				m.crash()
			}
		}
	case n < 13:
		fault("partition")
		w.net.heal()
		side := map[uint64]bool{}
		for _, m := range w.members {
			side[m.id] = w.chance(0.4)
		}
		for _, a := range w.members {
			for _, b := range w.members {
				if side[a.id] != side[b.id] {
					w.net.cut(a, b)
				}
			}
		}
	case n < 15:
		fault("cut off one way")
		in := w.chance(0.5)
		for _, o := range w.members {
			if in {
				w.net.cut(o, m)
			} else {
				w.net.cut(m, o)
			}
		}
	case n < 16:
		fault("slow link")
		for _, o := range w.members {
			if w.chance(0.5) {
				w.net.slow[link{m.id, o.id}] = w.upTo(10*time.Millisecond, 500*time.Millisecond)
			}
		}
	case n < 18:
		fault("network healed")
		w.net.heal()
	case n < 19:
		fault("leadership moved")
		m.in.TransferTo = w.members[w.rng.IntN(len(w.members))].id
		m.wake()
	default:
		fault("leadership handed over")
		m.in.HandOver = true
		m.wake()
	}
}

const (
	// keeperPass and stalledAfter are as in internal/leader.
	keeperPass   = 500 * time.Millisecond
	stalledAfter = time.Second
	leaseRetry   = 2 * time.Second
)

// lead begins with what only a leader does.
func (m *member) lead(term uint64) {
	m.leads, m.lastPass = term, m.now()
	m.w.check.term = max(m.w.check.term, term)
	extend := electionTimeout
	if m.w.mutant == leasesCut {
		extend = -2 * time.Second
	}
	m.lessor.Promote(m.now(), extend)
}

func (m *member) follow() {
	if m.leads != 0 {
		m.lessor.Demote()
	}
	m.leads = 0
}

// keep is one pass of what internal/leader does with leases.
func (m *member) keep() {
	m.after(keeperPass, m.keep)
	now := m.now()
	late := now.Sub(m.lastPass) - keeperPass
	m.lastPass = now
	if m.leads == 0 {
		return
	}
	if late > stalledAfter {
		m.w.cover["leases extended after a standstill"]++
		m.lessor.Stalled(late)
	}
	for _, id := range m.lessor.Expired(now) {
		m.revoke(id)
	}
}

func (m *member) revoke(id int64) {
	h := command.Header{ID: m.ids.Next()}
	data, err := command.AppendMessage(nil, command.KindLeaseRevoke, h, &pb.LeaseRevokeRequest{ID: id})
	if err != nil {
		m.w.fail("encoding a revocation: %w", err)
		return
	}
	m.w.note("%d revokes lease %d", m.id, id)
	m.in.Proposals = append(m.in.Proposals, consensus.Proposal{ID: h.ID, Data: data, Done: func(r consensus.Result, err error) {
		discard(r)
	}})
	m.wake()
}
