package state

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
)

// rig is a machine on a memory file system, and the log that feeds it.
type rig struct {
	t       testing.TB
	fs      *vfs.MemFS
	o       Options
	store   *storage.Store
	m       *Machine
	entries []*raftpb.Entry // the log, from index 1
	events  []mvcc.Event
}

func newRig(t testing.TB, o Options) *rig {
	r := &rig{t: t, fs: vfs.NewCrashableMem(), o: o}
	r.open()
	return r
}

func (r *rig) open() {
	r.t.Helper()
	var err error
	r.store, err = storage.Open(storage.Options{FS: r.fs, Dir: "store", MemTableBytes: 256 << 10})
	if err != nil {
		r.t.Fatal(err)
	}
	o := r.o
	o.Storage = r.store
	o.MVCC.FS, o.MVCC.Dir = r.fs, "index"
	o.MinLeaseTTL = 2
	o.Publisher = r
	if r.m, err = Open(o); err != nil {
		r.t.Fatal(err)
	}
}

// Publish implements Publisher.
func (r *rig) Publish(_ mvcc.Root, events []mvcc.Event) { r.events = append(r.events, events...) }

// close stops gracefully.
func (r *rig) close() {
	r.t.Helper()
	if err := r.m.Close(); err != nil {
		r.t.Fatal(err)
	}
	if err := r.store.Close(); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) reopen() {
	r.t.Helper()
	r.close()
	r.open()
}

// propose appends a command to the log without applying it.
func (r *rig) propose(h command.Header, kind command.Kind, msg proto.Message) {
	r.t.Helper()
	index := uint64(len(r.entries) + 1)
	h.ID = index<<8 | 1
	data, err := command.AppendMessage(nil, kind, h, msg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.entries = append(r.entries, &raftpb.Entry{Index: proto.Uint64(index), Term: proto.Uint64(2), Data: data})
}

func (r *rig) level() uint64 { return r.m.now.Load().members.FeatureLevel() }

// proposeLevel appends a feature level.
func (r *rig) proposeLevel(level, fingerprint uint64) {
	r.t.Helper()
	index := uint64(len(r.entries) + 1)
	data, err := command.AppendFeatureLevel(nil, command.Header{ID: index<<8 | 1}, command.FeatureLevel{Level: level, Fingerprint: fingerprint})
	if err != nil {
		r.t.Fatal(err)
	}
	r.entries = append(r.entries, &raftpb.Entry{Index: proto.Uint64(index), Term: proto.Uint64(2), Data: data})
}

// move goes on in another store, filled by a snapshot in Engram's own form.
func (r *rig) move() {
	r.t.Helper()
	if err := r.m.Checkpoint("sending/"+snapfile.StoreDir, "sending/"+snapfile.IndexDir); err != nil {
		r.t.Fatal(err)
	}
	files, err := snapfile.OpenFiles(r.fs, "sending")
	if err != nil {
		r.t.Fatal(err)
	}
	var stream bytes.Buffer
	ctx := context.Background()
	if err := files.WriteNative(ctx, &stream, nil); err != nil {
		r.t.Fatal(err)
	}
	r.m.Abandon()
	if err := r.store.Abandon(); err != nil {
		r.t.Fatal(err)
	}
	r.fs = vfs.NewCrashableMem()
	for _, dir := range []string{snapfile.StoreDir, snapfile.IndexDir} {
		if err := r.fs.MkdirAll(dir, 0o700); err != nil {
			r.t.Fatal(err)
		}
	}
	if _, err := snapfile.ReadNative(ctx, &stream, r.fs, ""); err != nil {
		r.t.Fatal(err)
	}
	r.open()
}

// proposeConf appends a membership change.
func (r *rig) proposeConf(cc *raftpb.ConfChange) {
	r.t.Helper()
	data, err := proto.Marshal(cc)
	if err != nil {
		r.t.Fatal(err)
	}
	r.entries = append(r.entries, &raftpb.Entry{
		Index: proto.Uint64(uint64(len(r.entries) + 1)), Term: proto.Uint64(2), Type: raftpb.EntryConfChange.Enum(), Data: data,
	})
}

// apply applies the log up to an index, at most batch entries at a time, and
// returns a line per result.
func (r *rig) apply(to, batch int) []string {
	r.t.Helper()
	var out []string
	for {
		applied, _ := r.m.Applied()
		from := int(applied)
		if from >= to {
			return out
		}
		results, err := r.m.Apply(r.entries[from:min(to, from+batch)])
		if err != nil {
			r.t.Fatal(err)
		}
		for i := range results {
			out = append(out, r.render(&results[i]))
			results[i].Reply.Release()
		}
	}
}

// run proposes and applies one command.
func (r *rig) run(h command.Header, kind command.Kind, msg proto.Message) string {
	r.t.Helper()
	r.propose(h, kind, msg)
	return r.apply(len(r.entries), 1)[0]
}

// render prints what a client would learn of a result.
func (r *rig) render(res *Result) string {
	var b strings.Builder
	if res.Err != nil {
		fmt.Fprintf(&b, "error %v", res.Err)
	}
	if res.ConfChange != nil {
		fmt.Fprintf(&b, " conf change of %x", res.ConfChange.GetNodeId())
	}
	if res.Reply == nil {
		return strings.TrimSpace(b.String())
	}
	rep := res.Reply
	if rep.Revision != 0 {
		fmt.Fprintf(&b, " revision %d", rep.Revision)
	}
	if rep.LeaseID != 0 {
		fmt.Fprintf(&b, " lease %d for %ds", rep.LeaseID, rep.LeaseTTL)
	}
	if rep.Message != nil {
		fmt.Fprintf(&b, " {%s}", strings.ReplaceAll(prototext.MarshalOptions{}.Format(rep.Message), "  ", " "))
	}
	r.renderOp(&b, &rep.Op)
	return strings.TrimSpace(b.String())
}

func (r *rig) renderOp(b *strings.Builder, o *OpReply) {
	switch o.Kind {
	case OpNone:
		return
	case OpDeleteRange:
		fmt.Fprintf(b, " deleted %d", o.Deleted)
	case OpTxn:
		fmt.Fprintf(b, " %t", o.Succeeded)
		for i := range o.Ops {
			fmt.Fprintf(b, " [")
			if o.Ops[i].Kind != OpTxn {
				fmt.Fprintf(b, "at %d", o.Ops[i].Revision)
			}
			r.renderOp(b, &o.Ops[i])
			fmt.Fprintf(b, "]")
		}
	}
	if o.View == nil {
		return
	}
	got, err := o.View.Range(context.Background(), o.Key, o.End, o.Range)
	if err != nil {
		fmt.Fprintf(b, " range error %v", err)
		return
	}
	if o.Kind == OpRange {
		fmt.Fprintf(b, " count %d", got.Count)
	} else if len(got.KVs) > 0 {
		fmt.Fprintf(b, " previous")
	}
	for _, kv := range got.KVs {
		fmt.Fprintf(b, " %s", renderKV(kv))
	}
}

func renderKV(encoded []byte) string {
	kv := new(mvccpb.KeyValue)
	if err := proto.Unmarshal(encoded, kv); err != nil {
		return err.Error()
	}
	s := fmt.Sprintf("%q=%q(create %d mod %d version %d", kv.Key, kv.Value, kv.CreateRevision, kv.ModRevision, kv.Version)
	if kv.Lease != 0 {
		s += fmt.Sprintf(" lease %d", kv.Lease)
	}
	return s + ")"
}

// settle does all physical compaction that is left.
func (r *rig) settle() {
	r.t.Helper()
	for {
		more, _, err := r.m.CompactStep()
		if err != nil {
			r.t.Fatal(err)
		}
		if !more {
			return
		}
	}
}

// dump prints all that the machine holds: every reachable revision of every
// key, every row of every table, and the hashes.
func (r *rig) dump() string {
	r.t.Helper()
	var b strings.Builder
	ctx := context.Background()
	v := r.m.View()
	defer v.Release()
	index, term := r.m.Applied()
	fmt.Fprintf(&b, "applied %d term %d revision %d compacted %d keys %d usage %d\n", index, term, v.Revision(), v.CompactRevision(),
		v.View.Root().Keys(), v.View.Root().UsageBytes())
	for rev := max(1, v.CompactRevision()); rev <= v.Revision(); rev++ {
		got, err := v.Range(ctx, []byte{0}, []byte{0}, mvcc.RangeOptions{Revision: rev})
		if err != nil {
			r.t.Fatalf("range at %d: %v", rev, err)
		}
		fmt.Fprintf(&b, "@%d %d:", rev, got.Count)
		for _, kv := range got.KVs {
			fmt.Fprintf(&b, " %s", renderKV(kv))
		}
		b.WriteByte('\n')
	}
	for _, t := range []storage.Table{
		storage.TableAlarm, storage.TableAuth, storage.TableAuthRole, storage.TableAuthUser, storage.TableCluster,
		storage.TableLease, storage.TableMember, storage.TableMemberRemoved,
	} {
		if err := storage.Rows(r.store, t, func(name, value []byte) error {
			fmt.Fprintf(&b, "%c %x=%x\n", t, name, value)
			return nil
		}); err != nil {
			r.t.Fatal(err)
		}
	}
	if level := v.Members().FeatureLevel(); level > 0 {
		fmt.Fprintf(&b, "feature level %d\n", level)
	}
	if usage, known := v.Alarms().FullAt(); known {
		fmt.Fprintf(&b, "full at %d\n", usage)
	}
	leases := r.m.Leases().All()
	slices.SortFunc(leases, func(a, b lease.Lease) int { return cmp.Compare(a.ID, b.ID) })
	for _, l := range leases {
		fmt.Fprintf(&b, "lease %d ttl %d remaining %d keys %q\n", l.ID, l.TTL, l.Remaining, bytes.Join(r.m.Leases().Keys(l.ID), []byte(",")))
	}
	h, err := r.m.Keys().HashKV(ctx, r.m.Root(), 0)
	if err != nil {
		r.t.Fatal(err)
	}
	fmt.Fprintf(&b, "hashkv %d\n", h.Hash)
	return b.String()
}
