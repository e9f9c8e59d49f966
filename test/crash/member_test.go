package crash

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/server"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

// disk is a memory file system under a whole member. A hook is asked before each
// operation, and the power can go away.
type disk struct {
	mu    sync.Mutex
	mem   *vfs.MemFS
	hook  func(errorfs.Op) error // nil lets all pass
	clone *vfs.MemFS
	rnd   *rand.Rand
}

func newDisk(seed uint64) *disk {
	return &disk{mem: vfs.NewCrashableMem(), rnd: rand.New(rand.NewPCG(seed, 21))}
}

// fs is the file system for the next member.
func (d *disk) fs() vfs.FS {
	return errorfs.Wrap(d.mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		d.mu.Lock()
		hook := d.hook
		d.mu.Unlock()
		if hook == nil {
			return nil
		}
		return hook(op)
	}))
}

func (d *disk) setHook(hook func(errorfs.Op) error) {
	d.mu.Lock()
	d.hook = hook
	d.mu.Unlock()
}

// cut takes the power away: what clients are told from now on does not count,
// and only what is on disk now is there for the next member.
func (d *disk) cut(w *load) {
	w.ledger.freeze()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.clone == nil {
		d.clone = d.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: []int{0, 20, 50, 80, 100}[d.rnd.IntN(5)], RNG: d.rnd})
	}
}

// next goes over to what the power cut left.
func (d *disk) next() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mem, d.clone, d.hook = crashable(d.clone), nil, nil
}

// tinySeams are a member on a disk with everything small, so that it flushes,
// compacts and cuts its log all the time.
func tinySeams(fs vfs.FS, fatal func(error)) server.Seams {
	return server.Seams{
		FS: fs,
		Storage: func(o *storage.Options) {
			o.MemTableBytes, o.CacheBytes, o.OnFatal = 64<<10, 1<<20, fatal
		},
		Machine: func(o *state.Options) {
			o.MVCC.CheckpointBytes, o.MVCC.CheckpointInterval, o.MVCC.ValueBudgetBytes = 64<<10, time.Millisecond, 256<<10
		},
		RaftLog:   func(o *raftlog.Options) { o.SegmentBytes, o.CacheBytes = 64<<10, 64<<10 },
		Consensus: func(o *consensus.Options) { o.FlushLogBytes, o.CatchUpBytes, o.CatchUpEntries = 64<<10, 64<<10, 50 },
	}
}

// host is a member in this process.
type host struct {
	member *server.Member
	addr   string
	cancel context.CancelFunc
	ended  chan struct{} // closed when Wait has returned
	err    error         // what it returned
}

func startHost(seams server.Seams, flags ...string) (*host, error) {
	cfg, err := config.Parse("engram", append([]string{
		"--data-dir=data", "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0",
		"--listen-peer-urls=http://127.0.0.1:0", "--disk-reserve-bytes=0", "--heartbeat-interval=10", "--election-timeout=100",
	}, flags...), nil)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		return nil, err
	}
	started, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	m, err := server.StartWith(started, cfg, slog.New(slog.DiscardHandler), seams)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	h := &host{member: m, addr: m.ClientAddrs()[0], cancel: cancel, ended: make(chan struct{})}
	go func() {
		h.err = m.Wait(ctx)
		close(h.ended)
	}()
	return h, nil
}

// drop ends a member whose disk is gone already.
func (h *host) drop(t testing.TB) {
	t.Helper()
	h.cancel()
	select {
	case <-h.ended:
	case <-time.After(30 * time.Second):
		t.Error("a member does not stop")
	}
}

// TestMemberPowerCut takes the power away from a whole member under load, as
// TestPowerCut does from its core: here the wiring is the server's own.
func TestMemberPowerCut(t *testing.T) {
	runs, lives := 2, 6
	if long() {
		runs, lives = 8, 20
	}
	if *livesFlag != 0 {
		lives = *livesFlag
	}
	for _, seed := range seeds(t, runs) {
		replay(t, seed)
		if err := memberLives(t, seed, lives, nil); err != nil {
			t.Fatal(err)
		}
	}
}

// memberLives runs lives of one member. change may break what it is started with.
func memberLives(t *testing.T, seed uint64, lives int, change func(*server.Seams), flags ...string) error {
	d, w := newDisk(seed), newLoad(seed)
	w.padding = 3000
	for n := range lives {
		seams := tinySeams(d.fs(), nil)
		if change != nil {
			change(&seams)
		}
		h, err := startHost(seams, flags...)
		if err != nil {
			return fmt.Errorf("seed %d, life %d: %w", seed, n, err)
		}
		l, err := w.begin(h.addr, 1<<30)
		if err != nil {
			h.drop(t)
			return fmt.Errorf("seed %d, life %d: %w", seed, n, err)
		}
		down := make(chan struct{})
		count := 1 + d.rnd.IntN(1500)
		d.setHook(func(op errorfs.Op) error {
			if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
				return nil
			}
			d.mu.Lock()
			count--
			now := count == 0
			d.mu.Unlock()
			if now {
				d.cut(w)
				close(down)
			}
			return nil
		})
		select {
		case <-down:
		case <-h.ended:
			err = fmt.Errorf("seed %d, life %d: the member ended by itself: %w", seed, n, h.err)
		case <-time.After(time.Minute):
			err = fmt.Errorf("seed %d, life %d, after a minute: %w", seed, n, errors.Join(errTooLittle, w.failed()))
		}
		l.gone()
		h.drop(t)
		if err != nil {
			return err
		}
		d.next()
	}
	h, err := startHost(tinySeams(d.fs(), nil))
	if err != nil {
		return err
	}
	defer h.drop(t)
	return w.end(h.addr, t.Logf)
}

var errTooLittle = errors.New("the load tried too little")
