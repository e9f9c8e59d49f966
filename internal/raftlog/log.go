package raftlog

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// Errors of this package, to be matched with errors.Is.
var (
	// ErrDamaged: bytes that were known to be on disk no longer are what was
	// written. The error is a *DamageError.
	ErrDamaged = errors.New("raftlog: damaged")
	// ErrNoSpace: the disk had no room for a new segment. Nothing was written
	// or promised; the same call may be repeated when there is space.
	ErrNoSpace = errors.New("raftlog: no space for a new segment, free some on the disk")
	// ErrIdentity: the log belongs to another member or cluster.
	ErrIdentity = errors.New("raftlog: log of another member")
	// ErrOrder: entries that do not continue the log, or would replace what is
	// committed or compacted. Nothing was written.
	ErrOrder = errors.New("raftlog: entries out of order")
	// ErrTooLarge: one Write does not fit the format's limits.
	ErrTooLarge = errors.New("raftlog: write too large")
	// ErrClosed: the log was closed.
	ErrClosed = errors.New("raftlog: closed")
	// ErrFormat: the log was written by a version with another format.
	ErrFormat = errors.New("raftlog: unknown format version")
)

// Defaults of Options.
const (
	DefaultSegmentBytes = 64 << 20
	DefaultCacheBytes   = 32 << 20
)

// Identity says whose log it is. It stands in each segment.
type Identity struct {
	ClusterID uint64
	MemberID  uint64
}

// Options configure a Log. FS and Dir are required.
type Options struct {
	FS  vfs.FS
	Dir string // created if absent
	// Identity is written into a new log, and must equal that of an existing
	// one; the zero Identity accepts whatever is there.
	Identity Identity
	// SegmentBytes is the size of a segment file; a single Write larger than it
	// gets a segment of its own. Default 64 MiB.
	SegmentBytes int64
	// CacheBytes bounds the entries kept in memory at the log's tail.
	// Default 32 MiB.
	CacheBytes int64
	// PrefetchBytes bounds the older entries that Prefetch keeps in memory, all
	// its calls together. Default CacheBytes/4.
	PrefetchBytes int64
	// Snapshot answers raft's wish for a snapshot that a member far behind can
	// install. It must not block: while none is ready it returns
	// raft.ErrSnapshotTemporarilyUnavailable. nil means that the snapshot last
	// recorded in the log is offered, if any. May be replaced by SetSnapshot.
	Snapshot func() (*raftpb.Snapshot, error)
	// Rand draws the seed of each segment's checksums; nil means crypto/rand.
	// A simulation hands in its own.
	Rand    func() uint64
	Metrics *Metrics     // nil means none
	Syncs   Syncs        // told of each sync; nil means nobody
	Logger  *slog.Logger // nil means discard
}

// Syncs is told of the syncs of segments, of which there is one at a time. Its methods must not block.
type Syncs interface {
	SyncBegan()
	SyncEnded()
}

func (o *Options) fill() error {
	if o.FS == nil || o.Dir == "" {
		return errors.New("raftlog: Options need FS and Dir")
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = DefaultSegmentBytes
	}
	if o.SegmentBytes < minSegmentBytes || o.SegmentBytes > maxSegmentBytes {
		return fmt.Errorf("raftlog: SegmentBytes is %d, must be from %d to %d",
			o.SegmentBytes, minSegmentBytes, int64(maxSegmentBytes))
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = DefaultCacheBytes
	}
	if o.PrefetchBytes == 0 {
		o.PrefetchBytes = o.CacheBytes / 4
	}
	if o.Rand == nil {
		o.Rand = func() uint64 {
			var b [8]byte
			_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
			return binary.LittleEndian.Uint64(b[:])
		}
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Snapshot is the record of a snapshot installed on this member. Once it is
// synced the member's state is the one in Dir, and the log begins after Index.
type Snapshot struct {
	Index, Term uint64
	Dir         string // name of the directory that holds the state
	ConfState   *raftpb.ConfState
}

// Log is a raft log on disk. See the package comment for who may call what.
type Log struct {
	o   Options
	fs  vfs.FS
	dir vfs.File // for syncing the directory

	// wmu is held while bytes are added to the log, and by Sync. It is taken
	// before mu. Whoever changes st holds both, so its holder may read st.
	wmu      sync.Mutex
	err      error    // poison: the first failure of promised bytes, or ErrClosed
	epoch    uint32   // grows with each Open
	end      uint64   // position after the last record written
	synced   uint64   // position up to which all is known to be on disk
	marked   uint64   // position up to which some record says that it is synced
	content  uint64   // position after the last record that is not a mark
	mustSync bool     // something was written that may not be acknowledged yet
	spare    *spare   // prepared next segment, or nil
	buf      []byte   // encodes one Write
	pending  []extent // the records in buf

	// dmu serializes Prepare and the deletion of segments, which touch the
	// directory and not the log's end. It is taken before wmu.
	dmu     sync.Mutex
	garbage []string // files whose removal failed; tried again by Compact

	spares atomic.Uint64 // numbers the spare files

	// mu covers the log as readers see it. Nothing slow happens under it.
	mu       sync.RWMutex
	st       state
	tail     tailCache
	windows  windows
	restarts uint64 // counts truncations, so that Prefetch notices one
	boot     *raftpb.ConfState
	applied  uint64 // commit index the caller vouches for, see SetInitialState
	onMiss   func(lo, hi uint64) bool
	snapshot func() (*raftpb.Snapshot, error)
}

// Open opens the log in o.Dir, or creates an empty one. A tail that a crash left
// half written is cut; any other damage is refused with a *DamageError. The
// log is then marked as synced to its end.
func Open(o Options) (*Log, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	l := &Log{o: o, fs: o.FS, snapshot: o.Snapshot}
	l.tail.budget = o.CacheBytes
	l.windows.budget = o.PrefetchBytes
	if err := l.open(); err != nil {
		return nil, errors.Join(err, l.closeFiles())
	}
	return l, nil
}

// Exists reports whether dir holds a log.
func Exists(fs vfs.FS, dir string) (bool, error) {
	names, err := listSegments(fs, dir)
	return len(names) > 0, err
}

// Identity returns whose log it is.
func (l *Log) Identity() Identity {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.st.identity
}

// Installed returns the record of the snapshot last installed; ok is false if
// there was none. The caller must not change the ConfState.
func (l *Log) Installed() (s Snapshot, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.st.snap == nil {
		return Snapshot{}, false
	}
	return *l.st.snap, true
}

// SetInitialState tells what the state machine knows better than the log,
// before raft starts: cs is the configuration as of applied, and everything up to
// applied is committed even if the log's last hard state, whose commit index is
// not synced, does not say so. cs is kept.
func (l *Log) SetInitialState(applied uint64, cs *raftpb.ConfState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.applied, l.boot = applied, cs
}

// SetSnapshot replaces Options.Snapshot.
func (l *Log) SetSnapshot(f func() (*raftpb.Snapshot, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.snapshot = f
}

// SetOnMiss chooses what Entries does about entries that are not in memory. With
// nil, as after Open, it reads them from disk within the call: right while a
// member replays its log at start. Otherwise f is called with what was asked, by
// the goroutine that called Entries. If f returns true Entries returns
// no entries and no error, and f has arranged for a Prefetch elsewhere after
// which raft is driven again; if false, they are read within the call. f must
// not block nor call the log.
//
// Raft stops the program when it is given no entries while it looks for
// configuration changes between applied and commit before an election, so f
// should return false for lo above the applied index.
func (l *Log) SetOnMiss(f func(lo, hi uint64) (later bool)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.onMiss = f
}

// Size returns the bytes of the log's files that are in use.
func (l *Log) Size() int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return int64(l.st.end - l.st.segments[0].base)
}

// SizeAfter returns the bytes of the log after the entry at index: what a
// restart would replay if index were the applied one. An index from before the
// log counts as its first.
func (l *Log) SizeAfter(index uint64) int64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.st.sizeAfter(index)
}

// Segments returns how many segment files there are, without a prepared one.
func (l *Log) Segments() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return len(l.st.segments)
}

// Close syncs, marks the end, and closes the files. After a failure of promised bytes
// it closes the files and returns that failure. Reads are no longer allowed.
func (l *Log) Close() error {
	err := l.Mark()
	if errors.Is(err, ErrClosed) {
		return err
	}
	l.dmu.Lock()
	defer l.dmu.Unlock()
	l.wmu.Lock()
	defer l.wmu.Unlock()
	l.err = ErrClosed
	return errors.Join(err, l.closeFiles())
}

// Abandon closes the files as a crash would leave them: nothing is synced or
// marked. For a member that stops on a failure, and for tests.
func (l *Log) Abandon() error {
	l.dmu.Lock()
	defer l.dmu.Unlock()
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if errors.Is(l.err, ErrClosed) {
		return l.err
	}
	l.err = ErrClosed
	return l.closeFiles()
}

func (l *Log) closeFiles() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, s := range l.st.segments {
		errs = append(errs, s.close())
	}
	if l.spare != nil {
		errs = append(errs, l.spare.file.Close())
		l.spare = nil
	}
	if l.dir != nil {
		errs = append(errs, l.dir.Close())
		l.dir = nil
	}
	return errors.Join(errs...)
}

func cloneConfState(cs *raftpb.ConfState) *raftpb.ConfState {
	if cs == nil {
		return &raftpb.ConfState{}
	}
	return proto.Clone(cs).(*raftpb.ConfState)
}
