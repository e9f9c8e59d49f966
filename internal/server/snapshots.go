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

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/pace"
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
func (s snapshots) Open(ctx context.Context, msg *raftpb.Message, native bool) (peer.Outgoing, error) {
	g := s.m.hold()
	defer g.release()
	if native {
		return s.openNative(ctx, msg, g)
	}
	return s.openEtcd(ctx, msg, g)
}

// sendingPrefix begins the names of directories that hold files on their way to
// another member.
const sendingPrefix = datadir.SendingPrefix

func (s snapshots) openNative(ctx context.Context, msg *raftpb.Message, g *generation) (_ peer.Outgoing, err error) {
	m := s.m
	out := &outgoingFiles{ctx: ctx, m: m, dir: fmt.Sprintf("%s%d", sendingPrefix, m.sendings.Add(1))}
	defer func() {
		if err != nil {
			err = errors.Join(err, out.Close())
		}
	}()
	if err := g.machine.Checkpoint(m.join(out.dir, storeDir), m.join(out.dir, indexDir)); err != nil {
		return nil, err
	}
	if out.files, err = snapfile.OpenFiles(m.seams.FS, m.dir.join(out.dir)); err != nil {
		return nil, err
	}
	out.msg = withSnapshot(msg, out.files.Applied, out.files.Term, out.files.Members)
	return out, nil
}

func (s snapshots) openEtcd(ctx context.Context, msg *raftpb.Message, g *generation) (_ peer.Outgoing, err error) {
	pinned := g.machine.Snapshot()
	g.keep() // until Close
	out := &outgoingEtcd{ctx: ctx, pace: s.m.pace, g: g, pinned: pinned, msg: withSnapshot(msg, pinned.Applied, pinned.Term, pinned.Members)}
	defer func() {
		if err != nil {
			err = errors.Join(err, out.Close())
		}
	}()
	// The level is not in etcd's form, and who has another level runs entries in
	// another way.
	if level := pinned.Members.FeatureLevel(); level > 0 {
		return nil, fmt.Errorf("feature level %d: member %x has not told this one that it reads version %d of Engram's own form, and etcd's does not carry the level: it is tried again (does it run another version of Engram?)",
			level, msg.GetTo(), snapfile.NativeVersion)
	}
	out.plan, err = planEtcd(ctx, s.m.pace, pinned)
	return out, err
}

// withSnapshot returns msg with the snapshot that goes out in place of the one
// that raft asked for.
func withSnapshot(msg *raftpb.Message, applied, term uint64, members *member.Root) *raftpb.Message {
	msg = proto.CloneOf(msg)
	msg.Snapshot = &raftpb.Snapshot{
		Data:     snapfile.StoreV2(members, applied),
		Metadata: &raftpb.SnapshotMetadata{Index: &applied, Term: &term, ConfState: state.ConfStateOf(members)},
	}
	return msg
}

// outgoingFiles is a snapshot being sent in Engram's own form. Its files are
// links, so what the store does meanwhile does not touch them.
type outgoingFiles struct {
	ctx   context.Context
	m     *Member
	dir   string // below the data directory
	files *snapfile.Files
	msg   *raftpb.Message
}

// Message implements peer.Outgoing.
func (o *outgoingFiles) Message() *raftpb.Message { return o.msg }

// WriteTo implements peer.Outgoing.
func (o *outgoingFiles) WriteTo(w io.Writer) (int64, error) {
	return writePaced(o.ctx, o.m.pace, w, func(w io.Writer) error { return o.files.WriteNative(o.ctx, w, nil) })
}

// Close implements peer.Outgoing.
func (o *outgoingFiles) Close() error { return o.m.seams.FS.RemoveAll(o.m.dir.join(o.dir)) }

// outgoingEtcd is a snapshot being sent in etcd's form.
type outgoingEtcd struct {
	ctx    context.Context
	pace   *pace.Pace
	g      *generation
	pinned state.Snapshot
	plan   *snapfile.Plan
	msg    *raftpb.Message
}

// Message implements peer.Outgoing.
func (o *outgoingEtcd) Message() *raftpb.Message { return o.msg }

// WriteTo implements peer.Outgoing.
func (o *outgoingEtcd) WriteTo(w io.Writer) (int64, error) {
	return writeEtcd(o.ctx, o.pace, o.plan, w)
}

// Close implements peer.Outgoing.
func (o *outgoingEtcd) Close() error {
	err := o.pinned.Store.Close()
	o.g.release()
	return err
}

// receiving is the end of the name of a directory that a snapshot is being
// received into.
const receiving = datadir.ReceivingSuffix

// Receive implements peer.Snapshots. The state has its final name only once all
// of it is synced: what has that name can be installed. One that is there
// already is not dropped: raft may have taken the message that it came with.
func (s snapshots) Receive(ctx context.Context, msg *raftpb.Message, native bool, body io.Reader) (drop func() error, err error) {
	m, meta := s.m, msg.GetSnapshot().GetMetadata()
	m.receiving.Lock() // the transport lets in one at a time: at most dropStale is there
	defer m.receiving.Unlock()
	if err := m.guard.Gate(); err != nil {
		return nil, err
	}
	name := snapshotDirName(meta.GetIndex(), meta.GetTerm())
	if _, ok := (machine{m}).Received(meta.GetIndex(), meta.GetTerm()); ok {
		_, err := io.Copy(io.Discard, body)
		return func() error { return nil }, err
	}
	if err := m.removeStale(); err != nil {
		return nil, err
	}
	temp := name + receiving
	if err := m.removeGeneration(temp); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.removeGeneration(temp))
		}
	}()
	if err := m.readInto(ctx, temp, native, meta, body); err != nil {
		return nil, fmt.Errorf("snapshot of index %d: %w", meta.GetIndex(), err)
	}
	if err := m.seams.FS.Rename(m.dir.join(temp), m.dir.join(name)); err != nil {
		return nil, err
	}
	return func() error { return m.removeGeneration(name) }, m.syncDir(m.dir.path)
}

// readInto makes a store of a snapshot's bytes, all of it durable.
func (m *Member) readInto(ctx context.Context, dir string, native bool, meta *raftpb.SnapshotMetadata, body io.Reader) (err error) {
	for _, sub := range [...]string{storeDir, indexDir} {
		if err := makeDir(m.seams.FS, m.join(dir, sub)); err != nil {
			return err
		}
	}
	var got snapfile.Meta
	if native {
		got, err = snapfile.ReadNative(ctx, gatedReader{body, m.guard}, m.seams.FS, m.dir.join(dir))
	} else {
		got, err = m.readEtcd(ctx, dir, body)
	}
	if err != nil {
		return err
	}
	if got.Applied != meta.GetIndex() || got.Term != meta.GetTerm() {
		return fmt.Errorf("its store holds index %d of term %d, the message says index %d of term %d", got.Applied, got.Term, meta.GetIndex(), meta.GetTerm())
	}
	return errors.Join(m.syncDir(m.join(dir, storeDir)), m.syncDir(m.join(dir, indexDir)), m.syncDir(m.dir.join(dir)))
}

// gatedReader ends when the disk is nearly full.
type gatedReader struct {
	r     io.Reader
	guard *diskGuard
}

func (g gatedReader) Read(b []byte) (int, error) {
	if err := g.guard.Gate(); err != nil {
		return 0, err
	}
	return g.r.Read(b)
}

// gatedFile is gatedReader for what is read here and there.
type gatedFile struct {
	r     io.ReaderAt
	guard *diskGuard
}

func (g gatedFile) ReadAt(b []byte, at int64) (int, error) {
	if err := g.guard.Gate(); err != nil {
		return 0, err
	}
	return g.r.ReadAt(b, at)
}

// readEtcd keeps the file of etcd's form only until it is read, here and there.
// What is written of it meanwhile is no more than what is read.
func (m *Member) readEtcd(ctx context.Context, dir string, body io.Reader) (got snapfile.Meta, err error) {
	path := m.join(dir, datadir.ReceivedFile)
	f, err := m.seams.FS.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return got, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	size, err := io.Copy(f, gatedReader{body, m.guard})
	if err != nil {
		return got, err
	}
	store, err := storage.Open(through(m.seams.Storage, m.storageOptions(m.join(dir, storeDir))))
	if err != nil {
		return got, err
	}
	if got, err = snapfile.ReadEtcdAt(ctx, path, gatedFile{f, m.guard}, size, store); err != nil {
		if full := m.guard.Gate(); full != nil {
			err = full // what was not read may have been taken for damage
		}
		return got, errors.Join(err, store.Abandon())
	}
	return got, errors.Join(store.Close(), m.seams.FS.Remove(path))
}

// dropStale is removeStale beside a snapshot that may be coming in, which does
// it itself before it begins.
func (m *Member) dropStale() {
	if !m.receiving.TryLock() {
		return
	}
	defer m.receiving.Unlock()
	if err := m.removeStale(); err != nil {
		m.log.Warn("snapshots that raft did not take could not be deleted, the next start tries again", "error", err)
	}
}

// removeStale deletes received snapshots that this member has gone beyond, and
// what is left of some that did not arrive. The caller holds receiving.
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
		if !strings.HasSuffix(name, receiving) && (err != nil || index > applied) {
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
