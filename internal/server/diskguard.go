package server

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/dustin/go-humanize"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
)

// diskGuard watches the free space under the data directory. Below the reserve
// it refuses writes before a byte of them is promised, since what is accepted
// must reach the log and later Pebble, whose flushes and compactions need room.
// Reads go on. It lets writes pass again when there is a quarter more than the
// reserve.
type diskGuard struct {
	fs      vfs.FS
	dir     string
	reserve uint64 // bytes; 0 means no guard
	log     *slog.Logger
	refusal atomic.Pointer[error] // nil while writes pass
}

// diskPoll is the time between two looks. At a gigabyte a second the default
// reserve lasts for it.
const diskPoll = 200 * time.Millisecond

// newDiskGuard returns a guard that has looked once. A reserve that was not
// asked for is never more than a tenth of the disk, so that small disks work.
func newDiskGuard(fs vfs.FS, dir string, reserve int64, asked bool, log *slog.Logger) (*diskGuard, error) {
	g := &diskGuard{fs: fs, dir: dir, reserve: uint64(max(reserve, 0)), log: log}
	if g.reserve == 0 {
		return g, nil
	}
	u, err := fs.GetDiskUsage(dir)
	if err != nil {
		return nil, fmt.Errorf("free space of %s: %w", dir, err)
	}
	if !asked {
		g.reserve = min(g.reserve, u.TotalBytes/10)
	}
	g.judge(u.AvailBytes)
	return g, nil
}

// Gate returns nil, or why writes are refused. It is cheap.
func (g *diskGuard) Gate() error {
	if e := g.refusal.Load(); e != nil {
		return *e
	}
	return nil
}

// Run looks again and again until ctx ends.
func (g *diskGuard) Run(ctx context.Context, c clock.Clock) {
	if g.reserve == 0 {
		return
	}
	t := c.NewTicker(diskPoll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C():
		}
		u, err := g.fs.GetDiskUsage(g.dir)
		if err != nil {
			continue // the last judgement stands
		}
		g.judge(u.AvailBytes)
	}
}

func (g *diskGuard) judge(avail uint64) {
	refusing := g.refusal.Load() != nil
	switch {
	case !refusing && avail < g.reserve:
		err := status.Errorf(codes.ResourceExhausted,
			"etcdserver: mvcc: database space exceeded: the disk of %s has %s free, the reserve is %s: free space there; writes resume by themselves",
			g.dir, humanize.IBytes(avail), humanize.IBytes(g.reserve))
		g.refusal.Store(&err)
		g.log.Error("disk is nearly full: writes are refused until there is space", "dir", g.dir, "free-bytes", avail, "reserve-bytes", g.reserve)
	case refusing && avail >= g.reserve+g.reserve/4:
		g.refusal.Store(nil)
		g.log.Info("disk has space again: writes are accepted", "dir", g.dir, "free-bytes", avail)
	}
}
