package server

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
)

// Backup implements rpc.Maintenance: it pins the present and lays it out as etcd's
// database file. The generation stays open until Close, whatever snapshot
// comes meanwhile.
func (m *Member) Backup(ctx context.Context) (_ rpc.Backup, err error) {
	g := m.hold()
	b := &outgoingBackup{ctx: ctx, m: m, g: g, began: time.Now(), pinned: g.machine.Snapshot()}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	b.plan, err = planEtcd(ctx, m.pace, b.pinned)
	return b, err
}

// outgoingBackup is rpc.Backup.
type outgoingBackup struct {
	ctx    context.Context
	m      *Member
	g      *generation
	began  time.Time
	pinned state.Snapshot
	plan   *snapfile.Plan
	whole  bool
}

// Size implements rpc.Backup.
func (b *outgoingBackup) Size() int64 { return b.plan.Size() }

// Version implements rpc.Backup.
func (b *outgoingBackup) Version() string { return storageVersion(b.pinned.Members) }

// WriteTo implements rpc.Backup.
func (b *outgoingBackup) WriteTo(w io.Writer) (int64, error) {
	n, err := writeEtcd(b.ctx, b.m.pace, b.plan, w)
	b.whole = err == nil
	return n, err
}

// Close implements rpc.Backup.
func (b *outgoingBackup) Close() error {
	err := b.pinned.Store.Close()
	b.g.release()
	if b.whole {
		took := time.Since(b.began)
		b.m.timed.snapshot.Observe(took.Seconds())
		b.m.log.Info("backup sent", "index", b.pinned.Applied, "term", b.pinned.Term, "bytes", b.plan.Size(), "took", took)
	}
	return err
}
