package state

import (
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/storage"
)

// batch applies entries to one storage.Batch.
type batch struct {
	m      *Machine
	store  *storage.Batch
	kv     *mvcc.Writer
	index  uint64 // of the entry at hand
	wanted bool   // somebody here waits for it

	left    int     // entries from the one at hand on
	replies []Reply // to be given out
	spare   *Reply  // given out, and nobody wanted it
}

// repliesAtOnce is how many replies are made in one piece of memory, which is
// not freed before the last of them.
const repliesAtOnce = 32

func (b *batch) newReply() *Reply {
	if r := b.spare; r != nil {
		b.spare = nil
		return r
	}
	if len(b.replies) == 0 {
		b.replies = make([]Reply, min(b.left, repliesAtOnce))
	}
	r := &b.replies[0]
	b.replies = b.replies[1:]
	return r
}

// errDisk marks an error that is not the caller's: it stops the member.
type errDisk struct{ error }

// apply runs one entry. The error is the disk's, or says that the entry cannot
// be understood, where real members stop too.
func (b *batch) apply(e *raftpb.Entry) (Result, error) {
	r := Result{Index: e.GetIndex(), Term: e.GetTerm()}
	b.index = e.GetIndex()
	switch e.GetType() {
	case raftpb.EntryNormal:
	case raftpb.EntryConfChange:
		err := b.confChange(e, &r)
		return r, err
	default:
		return r, fmt.Errorf("entry type %v is never proposed", e.GetType())
	}
	if len(e.GetData()) == 0 {
		r.Empty = true
		return r, nil
	}
	c := &b.m.cmd
	if err := command.Decode(e.GetData(), c); err != nil {
		return r, err
	}
	r.ID = c.ID
	b.wanted = b.m.o.Wanted == nil || b.m.o.Wanted(c.ID)
	reply := b.newReply()
	err := b.run(c, reply, &r)
	if err == nil {
		if !b.wanted && !reply.Pins() && reply.CompactionDone == nil {
			*reply = Reply{}
			b.spare = reply
			return r, nil
		}
		r.Reply = reply
		return r, nil
	}
	var disk errDisk
	if errors.As(err, &disk) {
		reply.Release()
		return r, disk.error
	}
	r.Err = err
	if !r.OverQuota {
		reply.Release()
		return r, nil
	}
	r.Reply = reply
	return r, nil
}

// run is the order of etcd's wrappers: corrupt, no space, auth, quota, and then
// the request itself (state-machine.md, section 2.1).
func (b *batch) run(c *command.Command, reply *Reply, r *Result) error {
	alarms := b.m.alarms.Root()
	if alarms.Has(pb.AlarmType_CORRUPT) && corruptStops(c.Kind) {
		return fmt.Errorf("%v: %w", c.Kind, ErrCorrupt)
	}
	cost := Cost(c)
	if cost > 0 && alarms.Has(pb.AlarmType_NOSPACE) && !b.fitsReserve(c, cost) {
		return fmt.Errorf("%v: alarm NOSPACE is on: %w", c.Kind, ErrNoSpace)
	}
	if err := b.authorize(c); err != nil {
		return err
	}
	over := b.overQuota(c, cost)
	if err := b.dispatch(c, reply); err != nil {
		return err
	}
	if over {
		r.OverQuota = true
		return fmt.Errorf("%v: usage passed the quota of %d bytes: %w", c.Kind, b.m.o.QuotaBytes, ErrNoSpace)
	}
	return nil
}

// corruptStops lists what a CORRUPT alarm refuses.
func corruptStops(k command.Kind) bool {
	switch k {
	case command.KindPut, command.KindRange, command.KindDeleteRange, command.KindTxn,
		command.KindCompaction, command.KindLeaseGrant, command.KindLeaseRevoke:
		return true
	}
	return false
}

// dispatch runs a request that nothing forbids.
func (b *batch) dispatch(c *command.Command, reply *Reply) error {
	switch c.Kind {
	case command.KindPut:
		return b.put(&c.Put, reply)
	case command.KindDeleteRange:
		b.deleteRange(&c.DeleteRange, reply)
		return nil
	case command.KindTxn:
		return b.txn(&c.Txn, reply)
	case command.KindRange:
		b.readRange(&c.Range, reply)
		return nil
	case command.KindCompaction:
		return b.compact(c.Compaction, reply)
	}
	switch msg := c.Msg.(type) {
	case *pb.LeaseGrantRequest:
		return b.leaseGrant(msg, reply)
	case *pb.LeaseRevokeRequest:
		return b.leaseRevoke(msg, reply)
	case *pb.LeaseCheckpointRequest:
		for _, cp := range msg.GetCheckpoints() {
			b.m.leases.Checkpoint(b.store, cp.GetID(), cp.GetRemaining_TTL())
		}
		return nil
	case *pb.AlarmRequest:
		if c.FeatureLevel != nil {
			if err := b.featureLevel(c.FeatureLevel); err != nil {
				return err
			}
		}
		err := b.alarm(msg, reply)
		b.noteFull()
		return err
	}
	if handled, err := b.authRequest(c, reply); handled {
		return err
	}
	return b.clusterRequest(c, reply)
}

func (b *batch) compact(r command.CompactionRequest, reply *Reply) error {
	if err := b.kv.Compact(r.Revision); err != nil {
		// A caller that wants the physical work done waits for it also when the
		// revision was compacted before.
		return err
	}
	reply.Revision = b.kv.Revision()
	reply.CompactionDone = b.m.kv.CompactionDone(r.Revision)
	return nil
}

func (b *batch) leaseGrant(r *pb.LeaseGrantRequest, reply *Reply) error {
	ttl, err := b.m.leases.Grant(b.store, r.GetID(), r.GetTTL())
	if err != nil {
		return err
	}
	reply.Revision, reply.LeaseID, reply.LeaseTTL = b.kv.Revision(), r.GetID(), ttl
	return nil
}

// leaseRevoke deletes the attached keys one by one, in key order, in one
// transaction with the lease itself.
func (b *batch) leaseRevoke(r *pb.LeaseRevokeRequest, reply *Reply) error {
	id := r.GetID()
	if !b.m.leases.Exists(id) {
		return fmt.Errorf("revoke lease %x: %w", id, lease.ErrNotFound)
	}
	b.kv.Begin()
	for _, key := range b.m.leases.Keys(id) {
		b.kv.DeleteRange(key, nil, nil)
	}
	reply.Revision = b.kv.End()
	return b.m.leases.Revoke(b.store, id)
}

func (b *batch) alarm(r *pb.AlarmRequest, reply *Reply) error {
	resp := &pb.AlarmResponse{}
	for _, a := range b.m.alarms.Apply(b.store, r) {
		resp.Alarms = append(resp.Alarms, &pb.AlarmMember{MemberID: a.Member, Alarm: a.Type})
	}
	reply.Message = resp
	return nil
}
