package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
)

// Names and order of what follows are those of internal/server, snapshots.go
// and generation.go.
const (
	snapshotPrefix = "snapshot-"
	receiving      = ".receiving"
	sendingPrefix  = "sending-"
)

func snapshotDirName(index, term uint64) string {
	return fmt.Sprintf("%s%016x-%016x", snapshotPrefix, index, term)
}

// sendSnapshot sends the state of the moment in place of a message's snapshot.
func (m *member) sendSnapshot(to *member, msg *raftpb.Message) {
	w := m.w
	w.cover["snapshot sent"]++
	if !w.quiet && w.chance(0.1) {
		m.disk.arm(1 + w.rng.IntN(40))
	}
	files, body, err := m.readState()
	if m.disk.dead() {
		w.cover["crash while sending a snapshot"]++
		return
	}
	if err != nil {
		m.must(err)
		return
	}
	msg = proto.CloneOf(msg)
	msg.Snapshot = &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: &files.Applied, Term: &files.Term, ConfState: state.ConfStateOf(files.Members),
	}}
	life := m.life
	report := func(ok bool) {
		w.after(w.upTo(0, w.plan.delay), func() {
			m.run(life, func() {
				m.in.Snapshots = append(m.in.Snapshots, consensus.SnapshotReport{Member: to.id, OK: ok})
				m.wake()
			})
		})
	}
	w.note("%d sends to %d the state of index %d, %d bytes", m.id, to.id, files.Applied, len(body))
	// When it arrives another may lead, or the receiver may have got there by itself.
	d := w.upTo(time.Millisecond, 300*time.Millisecond)
	if !w.quiet && w.chance(0.2) {
		d = w.about(3 * time.Second)
	}
	w.after(d, func() {
		if l := (link{m.id, to.id}); w.net.blocked[l] || !to.up || w.now.Before(to.paused) || !w.quiet && w.chance(0.1) {
			w.cover["snapshot lost"]++
			report(false)
			return
		}
		to.run(to.life, func() {
			if !w.quiet && w.chance(0.4) {
				to.disk.arm(1 + w.rng.IntN(80))
			}
			ok := to.storeSnapshot(msg.GetSnapshot().GetMetadata(), body)
			if to.disk.dead() {
				w.cover["crash while receiving a snapshot"]++
			} else if ok {
				w.cover["snapshot received"]++
				to.after(w.upTo(0, 20*time.Millisecond), func() {
					if !w.quiet && w.chance(0.3) {
						to.disk.arm(1 + w.rng.IntN(60))
					}
					w.note("%d gets from %d the snapshot of index %d", to.id, m.id, msg.GetSnapshot().GetMetadata().GetIndex())
					to.receive(msg)
				})
			}
			report(ok && !to.disk.dead())
		})
	})
}

// readState returns the state of the moment in Engram's own form.
func (m *member) readState() (files *snapfile.Files, _ []byte, err error) {
	m.sendings++
	dir := fmt.Sprint(sendingPrefix, m.sendings)
	defer func() { err = errors.Join(err, m.removeGeneration(dir)) }()
	if err := m.machine().Checkpoint(m.join(dir, storeDir), m.join(dir, indexDir)); err != nil {
		return nil, nil, err
	}
	if files, err = snapfile.OpenFiles(m.fs, m.fs.PathJoin(dataDir, dir)); err != nil {
		return nil, nil, err
	}
	var body bytes.Buffer
	err = files.WriteNative(context.Background(), &body, nil)
	return files, body.Bytes(), err
}

// storeSnapshot makes a directory of what came in. It has its final name only
// once all of it is synced.
func (m *member) storeSnapshot(meta *raftpb.SnapshotMetadata, body []byte) bool {
	if m.gate() != nil {
		return false
	}
	name := snapshotDirName(meta.GetIndex(), meta.GetTerm())
	if _, ok := m.Received(meta.GetIndex(), meta.GetTerm()); ok {
		return true
	}
	temp := name + receiving
	err := func() error {
		if err := errors.Join(m.removeStale(), m.removeGeneration(temp)); err != nil {
			return err
		}
		if err := errors.Join(makeDir(m.fs, m.join(temp, storeDir)), makeDir(m.fs, m.join(temp, indexDir))); err != nil {
			return err
		}
		if _, err := snapfile.ReadNative(context.Background(), bytes.NewReader(body), m.fs, m.fs.PathJoin(dataDir, temp)); err != nil {
			return err
		}
		if m.w.mutant == unsyncedSnapshot {
			return m.fs.Rename(m.fs.PathJoin(dataDir, temp), m.fs.PathJoin(dataDir, name))
		}
		if err := errors.Join(syncDir(m.fs, m.join(temp, storeDir)), syncDir(m.fs, m.join(temp, indexDir)), syncDir(m.fs, m.fs.PathJoin(dataDir, temp))); err != nil {
			return err
		}
		if err := m.fs.Rename(m.fs.PathJoin(dataDir, temp), m.fs.PathJoin(dataDir, name)); err != nil {
			return err
		}
		return syncDir(m.fs, dataDir)
	}()
	m.must(err)
	return err == nil
}

func makeDir(fs vfs.FS, path string) error {
	parent := fs.PathDir(path)
	if err := fs.MkdirAll(path, 0o700); err != nil {
		return err
	}
	return errors.Join(syncDir(fs, parent), syncDir(fs, fs.PathDir(parent)))
}

// Received implements consensus.Machine.
func (m *member) Received(index, term uint64) (dir string, ok bool) {
	dir = snapshotDirName(index, term)
	_, err := m.fs.Stat(m.join(dir, storeDir))
	return dir, err == nil
}

// Install implements consensus.Machine.
func (m *member) Install(s raftlog.Snapshot) error {
	w := m.w
	if w.mutant == swapFirst && m.gen.dir == s.Dir {
		return nil // it was too soon, but it is done
	}
	next, err := m.openGeneration(s.Dir)
	if err != nil {
		return err
	}
	last := m.gen
	m.durable, m.sure = s.Index, s.Index
	m.lessor.Reset(next.machine.Leases())
	m.gen = next
	m.hub.Reset(next.source())
	m.olds = append(m.olds, last)
	w.cover["snapshot installed"]++
	if index, _ := last.machine.Applied(); index > 0 {
		w.cover["snapshot installed over an older state"]++
	}
	w.note("%d installs the snapshot of index %d", m.id, s.Index)
	if !m.disk.dead() {
		w.check.installed(m, s)
	}
	m.after(w.upTo(0, time.Second), func() { m.retire(last) })
	m.compactSoon()
	m.deliverSoon()
	return nil
}

// retire closes what a snapshot has replaced, and deletes it.
func (m *member) retire(g *generation) {
	for i, old := range m.olds {
		if old == g {
			m.olds = append(m.olds[:i:i], m.olds[i+1:]...)
		}
	}
	g.machine.Abandon()
	if err := errors.Join(g.store.Abandon(), m.removeGeneration(g.dir)); err != nil {
		m.must(err)
	}
}

func (m *member) removeGeneration(dir string) error {
	if dir != "" {
		return m.fs.RemoveAll(m.fs.PathJoin(dataDir, dir))
	}
	return errors.Join(m.fs.RemoveAll(m.join("", storeDir)), m.fs.RemoveAll(m.join("", indexDir)))
}

// removeLeftovers deletes the generations that the log does not name.
func (m *member) removeLeftovers(present string) error {
	names, err := m.fs.List(dataDir)
	if err != nil {
		return err
	}
	if present != "" {
		if err := m.removeGeneration(""); err != nil {
			return err
		}
	}
	for _, name := range names {
		if strings.HasPrefix(name, snapshotPrefix) && name != present || strings.HasPrefix(name, sendingPrefix) {
			if err := m.removeGeneration(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeStale deletes received snapshots that this member has gone beyond.
func (m *member) removeStale() error {
	applied, _ := m.machine().Applied()
	names, err := m.fs.List(dataDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, snapshotPrefix) || name == m.gen.dir || strings.HasSuffix(name, receiving) {
			continue
		}
		var index, term uint64
		if _, err := fmt.Sscanf(name, snapshotPrefix+"%016x-%016x", &index, &term); err != nil || index >= applied {
			continue
		}
		if err := m.removeGeneration(name); err != nil {
			return err
		}
	}
	return nil
}
