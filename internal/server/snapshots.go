package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

// snapshots is peer.Snapshots: this member's state on its way to another, and
// another's on its way here.
type snapshots struct{ m *Member }

// Open implements peer.Snapshots. What is sent is newer than what raft asked
// for, as in etcd: the state of the moment.
func (s snapshots) Open(ctx context.Context, msg *raftpb.Message, native bool) (_ peer.Outgoing, err error) {
	g := s.m.hold()
	pinned := g.machine.Snapshot()
	out := &outgoing{ctx: ctx, g: g, pinned: pinned, source: snapfile.Source{
		Reader: pinned.Store, Applied: pinned.Applied, Term: pinned.Term, Members: pinned.Members,
	}}
	defer func() {
		if err != nil {
			err = errors.Join(err, out.Close())
		}
	}()
	if !native {
		// The level is not in etcd's form, and who has another level runs entries in
		// another way.
		if level := pinned.Members.FeatureLevel(); level > 0 {
			return nil, fmt.Errorf("feature level %d: member %x has not told this one yet that it is an Engram, so it gets no snapshot in etcd's form: it is tried again",
				level, msg.GetTo())
		}
		if out.plan, err = snapfile.PlanEtcd(ctx, out.source); err != nil {
			return nil, err
		}
	}
	out.msg = proto.CloneOf(msg)
	out.msg.Snapshot = &raftpb.Snapshot{
		Data: snapfile.StoreV2(pinned.Members, pinned.Applied),
		Metadata: &raftpb.SnapshotMetadata{
			Index: &pinned.Applied, Term: &pinned.Term, ConfState: state.ConfStateOf(pinned.Members),
		},
	}
	return out, nil
}

// outgoing is one snapshot being sent.
type outgoing struct {
	ctx    context.Context
	g      *generation
	pinned state.Snapshot
	source snapfile.Source
	plan   *snapfile.Plan // nil for the native form
	msg    *raftpb.Message
}

// Message implements peer.Outgoing.
func (o *outgoing) Message() *raftpb.Message { return o.msg }

// WriteTo implements peer.Outgoing.
func (o *outgoing) WriteTo(w io.Writer) (int64, error) {
	if o.plan != nil {
		return o.plan.WriteTo(w)
	}
	c := counter{w: w}
	err := snapfile.WriteNative(o.ctx, &c, o.source)
	return c.n, err
}

// Close implements peer.Outgoing.
func (o *outgoing) Close() error {
	err := o.pinned.Store.Close()
	o.g.release()
	return err
}

// counter counts what is written through it.
type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// receiving is the end of the name of a directory that a snapshot is being
// received into.
const receiving = ".receiving"

// Receive implements peer.Snapshots. The state has its final name only once all
// of it is synced: what has that name can be installed.
func (s snapshots) Receive(ctx context.Context, msg *raftpb.Message, native bool, body io.Reader) (err error) {
	m, meta := s.m, msg.GetSnapshot().GetMetadata()
	if !m.receiving.TryLock() {
		return errors.New("another snapshot is being received")
	}
	defer m.receiving.Unlock()
	if err := m.guard.Gate(); err != nil {
		return err
	}
	name := snapshotDirName(meta.GetIndex(), meta.GetTerm())
	if _, ok := (machine{m}).Received(meta.GetIndex(), meta.GetTerm()); ok {
		_, err := io.Copy(io.Discard, body)
		return err
	}
	if err := m.removeStale(); err != nil {
		return err
	}
	temp := name + receiving
	if err := m.removeGeneration(temp); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.removeGeneration(temp))
		}
	}()
	if err := m.readInto(ctx, temp, native, meta, body); err != nil {
		return fmt.Errorf("snapshot of index %d: %w", meta.GetIndex(), err)
	}
	if err := m.seams.FS.Rename(m.dir.join(temp), m.dir.join(name)); err != nil {
		return err
	}
	return m.syncDir(m.dir.path)
}

// readInto makes a store of a snapshot's bytes, all of it durable.
func (m *Member) readInto(ctx context.Context, dir string, native bool, meta *raftpb.SnapshotMetadata, body io.Reader) (err error) {
	if err := makeDir(m.seams.FS, m.join(dir, storeDir)); err != nil {
		return err
	}
	store, err := storage.Open(through(m.seams.Storage, m.storageOptions(m.join(dir, storeDir))))
	if err != nil {
		return err
	}
	var got snapfile.Meta
	if native {
		got, err = snapfile.ReadNative(ctx, body, store)
	} else {
		got, err = m.readEtcd(ctx, m.join(dir, "received.db"), body, store)
	}
	if err == nil && (got.Applied != meta.GetIndex() || got.Term != meta.GetTerm()) {
		err = fmt.Errorf("its store holds index %d of term %d, the message says index %d of term %d", got.Applied, got.Term, meta.GetIndex(), meta.GetTerm())
	}
	if err != nil {
		return errors.Join(err, store.Abandon())
	}
	if err := store.Close(); err != nil {
		return err
	}
	return errors.Join(m.syncDir(m.join(dir, storeDir)), m.syncDir(m.dir.join(dir)))
}

// readEtcd keeps the file of etcd's form only until it is read: bbolt wants one.
func (m *Member) readEtcd(ctx context.Context, path string, body io.Reader, store *storage.Store) (snapfile.Meta, error) {
	f, err := m.seams.FS.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return snapfile.Meta{}, err
	}
	_, err = io.Copy(f, body)
	if err = errors.Join(err, f.Close()); err != nil {
		return snapfile.Meta{}, err
	}
	got, err := snapfile.ReadEtcd(ctx, path, store)
	return got, errors.Join(err, m.seams.FS.Remove(path))
}

// removeStale deletes received snapshots that this member has gone beyond.
func (m *Member) removeStale() error {
	g := m.gen.Load()
	applied, _ := g.machine.Applied()
	names, err := m.seams.FS.List(m.dir.path)
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, held := m.held.Load(name); held || !strings.HasPrefix(name, snapshotPrefix) || name == g.dir {
			continue
		}
		var index, term uint64
		_, err := fmt.Sscanf(name, snapshotPrefix+"%016x-%016x", &index, &term)
		if !strings.HasSuffix(name, receiving) && (err != nil || index >= applied) {
			continue // it may be on its way to become the present one
		}
		if err := m.removeGeneration(name); err != nil {
			return err
		}
	}
	return nil
}

func (m *Member) syncDir(path string) error {
	d, err := m.seams.FS.OpenDir(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
