package server

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/dustin/go-humanize"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
)

// diskGuard watches the free space under the data directory. Below the reserve
// it refuses writes before a byte of them is promised, since what is accepted
// must reach the log and later Pebble, whose flushes and compactions need room.
// Reads go on. It lets writes pass again when there is a quarter more than the
// reserve.
//
// What makes space goes on passing, each as long as there is as much free as
// wants says. The last quarter of the reserve is nobody's: it is for flushes, for
// the physical work of compactions, and for another segment of the log, should
// those that are there already be full. Even where that is too little nothing is
// lost: Pebble tries again what found no space, and the log holds it till then.
//
// With --wal-dir there is another one, of the log's disk, which has less to keep:
// what makes space in the store costs it an entry, and gives it nothing back.
type diskGuard struct {
	fs      vfs.FS
	dir     string
	ofLog   bool   // dir holds the log alone
	reserve uint64 // bytes; 0 means no guard
	log     *slog.Logger
	refusal atomic.Pointer[error] // nil while writes pass
	free    atomic.Uint64         // at the last look
}

// diskPoll is the time between two looks. At a gigabyte a second the default
// reserve lasts for it.
const diskPoll = 200 * time.Millisecond

// newDiskGuard returns a guard that has looked once. A reserve that was not
// asked for is never more than a tenth of the disk, so that small disks work.
func newDiskGuard(fs vfs.FS, dir string, reserve int64, asked bool, log *slog.Logger) (*diskGuard, error) {
	return (&diskGuard{fs: fs, dir: dir, reserve: uint64(max(reserve, 0)), log: log}).begin(asked)
}

// logReserve is the most that is kept on a disk of the log alone: the last quarter
// of it is one more segment, and no more is needed.
const logReserve = 4 * raftlog.DefaultSegmentBytes

// newLogGuard is newDiskGuard for a directory that holds the log alone.
func newLogGuard(fs vfs.FS, dir string, reserve int64, asked bool, log *slog.Logger) (*diskGuard, error) {
	return (&diskGuard{fs: fs, dir: dir, ofLog: true, reserve: uint64(min(max(reserve, 0), logReserve)), log: log}).begin(asked)
}

func (g *diskGuard) begin(asked bool) (*diskGuard, error) {
	if g.reserve == 0 {
		return g, nil
	}
	u, err := g.fs.GetDiskUsage(g.dir)
	if err != nil {
		return nil, fmt.Errorf("free space of %s: %w", g.dir, err)
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

// LastGate returns nil while something may pass, and otherwise why not. It is
// cheap.
func (g *diskGuard) LastGate() error {
	if g.free.Load() < g.floor() {
		return g.Gate()
	}
	return nil
}

// floor is the free space below which nothing passes. On the log's disk another
// segment fits into it, unless the reserve is smaller than that.
func (g *diskGuard) floor() uint64 {
	if g.ofLog {
		return max(g.reserve/4, min(g.reserve, raftlog.DefaultSegmentBytes))
	}
	return g.reserve / 4
}

// half is the free space below which nothing passes that frees nothing by itself:
// a third of what is above the floor, which is half of the reserve if the floor is
// a quarter.
func (g *diskGuard) half() uint64 { return g.floor() + (g.reserve-g.floor())/3 }

// reckoner knows what a request would do to the keys that there are.
type reckoner interface {
	DeleteCost(c *command.Command) int64
	Overwrites(c *command.Command) bool
}

// Pass returns nil if an entry may be proposed, and otherwise why not. It is
// asked while Gate returns an error.
func (g *diskGuard) Pass(data []byte, r reckoner) error {
	refusal := g.Gate()
	if refusal == nil {
		return nil
	}
	var c command.Command
	if command.Decode(data, &c) != nil {
		return refusal
	}
	free, want := g.free.Load(), g.wants(&c, r)
	switch {
	case free >= want:
		return nil
	case want != never && free >= g.half():
		return status.Errorf(codes.ResourceExhausted,
			"etcdserver: mvcc: database space exceeded: the disk of %s has %s free, and the records of the keys that this deletes may take %s until a compaction removes them, and as much once more meanwhile, which is too much below the reserve of %s: delete fewer keys at a time, and compact after each",
			g.dir, humanize.IBytes(free), humanize.IBytes((want-g.floor())/2), humanize.IBytes(g.reserve))
	}
	return refusal
}

// never is what an entry wants that does not pass below the reserve.
const never = math.MaxUint64

// wants returns how much must be free for an entry while writes are refused.
//
// A compaction writes next to nothing before it frees, so it passes down to the
// floor, and so does what is asked of alarms. A delete frees nothing by itself: it
// leaves a record for each key, until a compaction. So deletes, and leases' ends,
// keep away from the last half, which is the compaction's, and one that names very
// many keys must leave the floor alone though its records are written twice: in
// the end a compaction may have to rewrite them, to get rid of what they hide.
// With deletes goes what takes no space by the rule of the quota, and an overwrite
// that is small enough for the last of the quota's reserve: without one
// Kubernetes' compactor does not come to compact.
func (g *diskGuard) wants(c *command.Command, r reckoner) uint64 {
	switch c.Kind {
	case command.KindCompaction, command.KindAlarm:
		return g.floor()
	}
	if cost := state.Cost(c); cost > state.ReserveLastCost || cost > 0 && !r.Overwrites(c) {
		return never
	}
	if g.ofLog {
		return g.half() // the records of what is deleted lie elsewhere
	}
	return max(g.half(), g.floor()+2*uint64(r.DeleteCost(c)))
}

// Room returns how much may be written of what helps, but need not be: none of
// what is kept for the rest.
func (g *diskGuard) Room() int64 {
	if g.reserve == 0 {
		return math.MaxInt64
	}
	return max(0, int64(g.free.Load())-int64(g.floor()))
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
	g.free.Store(avail)
	refusing := g.refusal.Load() != nil
	switch {
	case !refusing && avail < g.reserve:
		g.refuse(avail)
		g.log.Error("disk is nearly full: writes are refused until there is space", "dir", g.dir, "free-bytes", avail, "reserve-bytes", g.reserve)
	case refusing && avail >= g.reserve+g.reserve/4:
		g.refusal.Store(nil)
		g.log.Info("disk has space again: writes are accepted", "dir", g.dir, "free-bytes", avail)
	case refusing:
		g.refuse(avail)
	}
}

func (g *diskGuard) refuse(avail uint64) {
	cure := "free space there, or delete keys and compact"
	if g.ofLog {
		cure = "it holds the raft log: free space there"
	}
	err := status.Errorf(codes.ResourceExhausted,
		"etcdserver: mvcc: database space exceeded: the disk of %s has %s free, the reserve is %s: %s; writes resume by themselves",
		g.dir, humanize.IBytes(avail), humanize.IBytes(g.reserve), cure)
	g.refusal.Store(&err)
}

// diskGuards are those of every disk that a write needs.
type diskGuards []*diskGuard

// first returns the first error that a guard has.
func (gs diskGuards) first(ask func(*diskGuard) error) error {
	for _, g := range gs {
		if err := ask(g); err != nil {
			return err
		}
	}
	return nil
}

// Gate is diskGuard's, of the first disk that refuses.
func (gs diskGuards) Gate() error { return gs.first((*diskGuard).Gate) }

// LastGate is diskGuard's, of the first disk that refuses.
func (gs diskGuards) LastGate() error { return gs.first((*diskGuard).LastGate) }

// Pass is diskGuard's: every disk must let the entry pass.
func (gs diskGuards) Pass(data []byte, r reckoner) error {
	return gs.first(func(g *diskGuard) error { return g.Pass(data, r) })
}
