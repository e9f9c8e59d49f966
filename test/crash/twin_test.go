package crash

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/test/internal/broken"
)

// twin is a machine that never crashes. It applies the entries that must have
// survived, so it is what a core has to equal after each start.
type twin struct {
	store   *storage.Store
	machine *state.Machine
	events  map[mvcc.Revision]string
}

func newTwin() *twin {
	t := &twin{events: map[mvcc.Revision]string{}}
	var err error
	if t.store, err = storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "store"}); err != nil {
		panic(err)
	}
	if t.machine, err = state.Open(state.Options{Storage: t.store, MinLeaseTTL: 2, Publisher: t}); err != nil {
		panic(err)
	}
	return t
}

func (t *twin) close() error { return errors.Join(t.machine.Close(), t.store.Abandon()) }

// Publish implements state.Publisher.
func (t *twin) Publish(_ mvcc.Root, events []mvcc.Event) {
	for i := range events {
		t.events[events[i].Rev] = fmt.Sprintf("%x %t", events[i].KV, events[i].Delete)
	}
}

// advance applies the history up to an index, and compares the revisions that
// clients were told.
func (t *twin) advance(h *history, to uint64) error {
	for {
		at, _ := t.machine.Applied()
		if at >= to {
			return nil
		}
		if to > uint64(len(h.entries)) {
			return fmt.Errorf("index %d is applied, the history ends at %d", to, len(h.entries))
		}
		results, err := t.machine.Apply(h.entries[at:to])
		if err != nil {
			return err
		}
		for _, r := range results {
			var revision int64
			if r.Reply != nil {
				revision = r.Reply.Revision
				r.Reply.Release()
			}
			if told, ok := h.revisions[r.Index]; ok && told != revision {
				return broken.Errorf("entry %d was answered with revision %d, it should be %d", r.Index, told, revision)
			}
		}
	}
}

// audit compares a core that has just applied all that its log holds with the
// history: nothing that was told is missing, and all is as if no crash had been.
func (c *core) audit() error {
	w := c.w
	if w.crashed() {
		return nil
	}
	applied, _ := c.machine.Applied()
	w.mu.Lock()
	told := w.history.told
	w.mu.Unlock()
	if applied < told {
		return broken.Errorf("entries up to %d were acknowledged, those after %d are lost", told, applied)
	}
	if err := w.twin.advance(&w.history, applied); err != nil {
		return err
	}
	for i := range c.events {
		e := &c.events[i]
		if got, want := fmt.Sprintf("%x %t", e.KV, e.Delete), w.twin.events[e.Rev]; got != want {
			return broken.Errorf("event at revision %d: %s, it should be %s", e.Rev, got, want)
		}
	}
	got, want := dump(c.store, c.machine), dump(w.twin.store, w.twin.machine)
	if got != want {
		return broken.Errorf("at index %d the member has\n%s\nit should have\n%s", applied, got, want)
	}
	// What a reader can see now may not be lost either.
	w.mu.Lock()
	if w.clone == nil {
		w.history.told = max(w.history.told, applied)
	}
	w.mu.Unlock()
	w.seen["audit"]++
	return nil
}

// dump prints what a machine holds, as far as it does not depend on how much of
// a compaction is done.
func dump(store *storage.Store, m *state.Machine) string {
	var b strings.Builder
	ctx := context.Background()
	v := m.View()
	defer v.Release()
	index, term := m.Applied()
	fmt.Fprintf(&b, "applied %d term %d revision %d compacted %d keys %d usage %d\n", index, term, v.Revision(), v.CompactRevision(),
		v.View.Root().Keys(), v.View.Root().UsageBytes())
	oldest := max(1, v.CompactRevision())
	rnd := rand.New(rand.NewPCG(uint64(index), 1))
	for i := range 6 {
		at := v.Revision()
		if i > 0 {
			at = oldest + rnd.Int64N(v.Revision()-oldest+1)
		}
		got, err := v.Range(ctx, []byte{0}, []byte{0}, mvcc.RangeOptions{Revision: at})
		fmt.Fprintf(&b, "@%d %d %v:\n", at, got.Count, err)
		for _, kv := range got.KVs {
			fmt.Fprintf(&b, "  %.120x\n", kv)
		}
	}
	for _, t := range []storage.Table{storage.TableAlarm, storage.TableCluster, storage.TableLease, storage.TableMember} {
		if err := storage.Rows(store, t, func(name, value []byte) error {
			fmt.Fprintf(&b, "%c %x=%x\n", t, name, value)
			return nil
		}); err != nil {
			fmt.Fprintln(&b, err)
		}
	}
	leases := m.Leases().All()
	slices.SortFunc(leases, func(a, b lease.Lease) int { return cmp.Compare(a.ID, b.ID) })
	for _, l := range leases {
		fmt.Fprintf(&b, "lease %d ttl %d remaining %d keys %q\n", l.ID, l.TTL, l.Remaining, bytes.Join(m.Leases().Keys(l.ID), []byte(",")))
	}
	if v.View.Root().Keys() > 0 {
		h, err := m.Keys().HashKV(ctx, m.Root(), 0)
		fmt.Fprintf(&b, "hashkv %+v %v\n", h, err)
	}
	return b.String()
}

// command makes a random command.
func (c *core) command() (command.Kind, proto.Message) {
	rnd := c.w.rnd
	key := func() []byte { return fmt.Appendf(nil, "k%02d", rnd.IntN(30)) }
	put := func() *pb.PutRequest {
		n := rnd.IntN(300)
		if rnd.IntN(12) == 0 {
			n = rnd.IntN(12 << 10)
		}
		r := &pb.PutRequest{Key: key(), Value: bytes.Repeat([]byte{byte('a' + rnd.IntN(26))}, n)}
		if rnd.IntN(8) == 0 {
			r.Lease = c.lease
		}
		return r
	}
	switch n := rnd.IntN(100); {
	case n < 55:
		return command.KindPut, put()
	case n < 70:
		r := &pb.DeleteRangeRequest{Key: key()}
		if rnd.IntN(3) == 0 {
			r.RangeEnd = key()
		}
		return command.KindDeleteRange, r
	case n < 84:
		// Two puts, a delete, and a comparison that may fail.
		k := key()
		txn := &pb.TxnRequest{
			Compare: []*pb.Compare{{Key: k, Target: pb.Compare_VERSION, Result: pb.Compare_GREATER, TargetUnion: &pb.Compare_Version{Version: 0}}},
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: k}}}},
		}
		if a, b := put(), put(); !bytes.Equal(a.Key, b.Key) && !bytes.Equal(a.Key, k) && !bytes.Equal(b.Key, k) {
			for _, p := range []*pb.PutRequest{a, b} {
				p.Lease = 0
				txn.Success = append(txn.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: p}})
			}
		}
		return command.KindTxn, txn
	case n < 92:
		c.lease++
		return command.KindLeaseGrant, &pb.LeaseGrantRequest{ID: c.lease, TTL: 100}
	case n < 96:
		return command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: c.lease - rnd.Int64N(3)}
	default:
		return command.KindCompaction, &pb.CompactionRequest{Revision: max(1, c.machine.Root().Revision()-rnd.Int64N(30))}
	}
}
