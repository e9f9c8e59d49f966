package backup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

var (
	// ErrNotEmpty says that a directory to restore into holds something.
	ErrNotEmpty = errors.New("backup: directory is not empty")
	// ErrSpace says that the disk has too little room.
	ErrSpace = errors.New("backup: not enough space")
)

// Restore makes data directories of a backup. The cluster that they are for is a
// new one: its members know neither the log nor the members of the old one.
type Restore struct {
	FS storage.FS // nil means the operating system's
	// Founders are the members of the new cluster, by ID.
	Founders []member.Member
	// Targets are the directories to make. They appear when all are whole.
	Targets []Target
	// SkipSum takes a backup with no checksum, or with another one.
	SkipSum bool
	// BumpRevision is how much to raise the revision; all revisions up to the new
	// one count as compacted then, so that whoever watches from an old one hears
	// that it is gone. 0 leaves both as they are.
	BumpRevision uint64
	// State is what the machine on the new store is opened with, to prove that it
	// can be: Version and MinLeaseTTL.
	State    state.Options
	Logger   *slog.Logger                        // nil means discard
	Progress func(target Target, done, of int64) // nil, or told of the bytes read for a target
}

// Target is one member's data directory.
type Target struct {
	Member  uint64
	DataDir string
	// LogDir is the directory of the raft log; "" is its place in DataDir.
	LogDir string
}

// Restored tells what is in the directories.
type Restored struct {
	Cluster uint64
	// Revision is the one that the store has, Saved the one that the backup had.
	Revision, Saved int64
	Keys            int64
	Leases, Users   int
	Alarms          int
	Version         string // of the cluster, as saved
}

// Restore makes the directories of r, each whole or not there. On an error, and
// when ctx ends, nothing is left behind; what a crash leaves has another name,
// or is refused by a member that is started on it.
func (b *File) Restore(ctx context.Context, r Restore) (report Restored, err error) {
	if r.FS == nil {
		r.FS = storage.DefaultFS
	}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	var ids []uint64
	for _, m := range r.Founders {
		ids = append(ids, m.ID)
	}
	report.Cluster = member.ClusterID(ids)
	for _, t := range r.Targets {
		if err := r.checkTarget(t); err != nil {
			return report, err
		}
	}
	if !r.SkipSum {
		if err := b.CheckSum(ctx); err != nil {
			return report, err
		}
	}
	if err := r.checkSpace(b); err != nil {
		return report, err
	}
	var made []*staging
	defer func() {
		whole := err == nil
		for _, s := range slices.Backward(made) {
			if !whole {
				err = errors.Join(err, s.discard())
			} else if err := s.unlock(); err != nil { // all is there, and the lock ends with the process
				r.Logger.Warn("a restored directory could not be unlocked", "dir", s.target.DataDir, "error", err)
			}
		}
	}()
	for _, t := range r.Targets {
		s, err := r.stage(t, datadir.Identity{Cluster: report.Cluster, Member: t.Member})
		if err != nil {
			return report, err
		}
		made = append(made, s)
		if err := r.fill(ctx, b, s, &report); err != nil {
			return report, fmt.Errorf("restore into %s: %w", t.DataDir, err)
		}
	}
	for _, s := range made {
		if err := ctx.Err(); err != nil {
			return report, err
		}
		if err := s.commit(); err != nil {
			return report, fmt.Errorf("restore into %s: %w", s.target.DataDir, err)
		}
	}
	return report, nil
}

// checkTarget refuses directories with something in them. The texts are etcd's.
func (r *Restore) checkTarget(t Target) error {
	names, err := r.FS.List(t.DataDir)
	switch {
	case err == nil && slices.Contains(names, stagingInside):
		return fmt.Errorf("data-dir %q not empty or could not be read: %w: a restore into it was interrupted; delete what is in it", t.DataDir, ErrNotEmpty)
	case err == nil && len(names) > 0:
		return fmt.Errorf("data-dir %q not empty or could not be read: %w: it holds %s; name another directory, or move away what is in it", t.DataDir, ErrNotEmpty, names[0])
	case err != nil && !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("data-dir %q not empty or could not be read: %w", t.DataDir, err)
	}
	if t.LogDir == "" {
		return nil
	}
	inside, err := t.logInside()
	if err != nil {
		return err
	}
	around, err := within(t.LogDir, t.DataDir)
	if err != nil {
		return err
	}
	first, _, _ := strings.Cut(inside, "/")
	if around != "" || slices.Contains([]string{datadir.Store, datadir.Index, datadir.Lock, datadir.IdentityFile, stagingInside}, first) {
		return fmt.Errorf("wal-dir %q and data-dir %q are in each other's place: name another directory for the log, or none for one in data-dir", t.LogDir, t.DataDir)
	}
	if _, err := r.FS.Stat(t.LogDir); err == nil {
		return fmt.Errorf("wal-dir %q exists: %w: name a directory that is not there", t.LogDir, ErrNotEmpty)
	}
	return nil
}

// logInside is the path of the log's directory in the data directory, "" if it lies outside of that.
func (t Target) logInside() (string, error) {
	if t.LogDir == "" {
		return datadir.Log, nil
	}
	return within(t.DataDir, t.LogDir)
}

// within is the path of one directory in another, "." if they are the same, "" if it lies outside.
func within(dir, path string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", err
	}
	path, err = filepath.Rel(dir, path)
	if err != nil || !filepath.IsLocal(path) {
		return "", nil
	}
	return path, nil
}

// logBytes is what a new log takes on disk, and the store's files beside the rows.
const logBytes = raftlog.DefaultSegmentBytes + 16<<20

// checkSpace refuses what would fill the disk: in the middle of it a store does
// not fail, it waits for room.
func (r *Restore) checkSpace(b *File) error {
	need := uint64(len(r.Targets)) * uint64(b.size+logBytes)
	dir := r.Targets[0].DataDir
	for _, err := r.FS.Stat(dir); err != nil && r.FS.PathDir(dir) != dir; _, err = r.FS.Stat(dir) {
		dir = r.FS.PathDir(dir)
	}
	usage, err := r.FS.GetDiskUsage(dir)
	if err != nil {
		return nil // the file system does not say
	}
	if usage.AvailBytes < need {
		return fmt.Errorf("%w: %s has %d bytes left, up to %d are needed: free some, or restore to another disk", ErrSpace, dir, usage.AvailBytes, need)
	}
	return nil
}

// fill makes all that belongs into a data directory, durable.
func (r *Restore) fill(ctx context.Context, b *File, s *staging, report *Restored) error {
	if err := r.fillStore(ctx, b, s, report); err != nil {
		return err
	}
	log, err := raftlog.Open(raftlog.Options{
		FS: r.FS, Dir: s.logDir, Logger: r.Logger,
		Identity: raftlog.Identity{ClusterID: report.Cluster, MemberID: s.target.Member},
	})
	if err != nil {
		return err
	}
	if err := r.begin(log); err != nil {
		return errors.Join(err, log.Abandon())
	}
	return errors.Join(log.Close(), s.sync())
}

// begin begins the log where the store stands: behind what would be the first
// entries of the new cluster, which the store has applied. They are not in the
// log, nor is anything that leads to what the store holds: a member that is added
// gets a snapshot.
func (r *Restore) begin(log *raftlog.Log) error {
	index, term := uint64(len(r.Founders)), uint64(1)
	voters := &raftpb.ConfState{AutoLeave: new(bool)}
	for _, m := range r.Founders {
		voters.Voters = append(voters.Voters, m.ID)
	}
	_, err := log.Write([]raftlog.Append{{
		Snapshot:  &raftlog.Snapshot{Index: index, Term: term, ConfState: voters},
		HardState: &raftpb.HardState{Term: &term, Commit: &index},
	}})
	if err != nil {
		return err
	}
	return log.Sync()
}

func (r *Restore) fillStore(ctx context.Context, b *File, s *staging, report *Restored) (err error) {
	store, err := storage.Open(storage.Options{FS: r.FS, Dir: r.FS.PathJoin(s.dir, datadir.Store), Logger: r.Logger})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, store.Abandon())
		} else {
			err = store.Close()
		}
	}()
	reader := io.ReaderAt(b.f)
	if r.Progress != nil {
		reader = &told{r: b.f, tell: func(done int64) { r.Progress(s.target, min(done, b.size), b.size) }}
	}
	meta, err := snapfile.ReadEtcdAt(ctx, b.path, reader, b.size, store)
	if err != nil {
		return err
	}
	report.Saved, report.Version = meta.Revision, meta.ClusterVersion
	if err := r.found(store, meta.Revision); err != nil {
		return err
	}
	return r.prove(store, s, report)
}

// found makes the store that of a new cluster: its members, and the applied
// index of one that has applied the first entries of its log, which name them. As
// in etcd, all else stays as it was saved: leases, users and roles, alarms, the
// cluster's version.
//
// The revision is raised from that of the last record, as in etcd: members made
// of one file must be alike, whoever made them.
func (r *Restore) found(store *storage.Store, saved int64) error {
	batch := store.NewBatch()
	for _, table := range [...]storage.Table{storage.TableMember, storage.TableMemberRemoved} {
		batch.DeleteRange(storage.TableBounds(table))
	}
	for _, m := range r.Founders {
		row, value := member.Row(m)
		batch.Set(row, value)
	}
	batch.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)), storage.AppendApplied(nil, uint64(len(r.Founders)), 1))
	if r.BumpRevision > 0 {
		last, err := lastRecord(store)
		if err != nil {
			return err
		}
		if r.BumpRevision > math.MaxInt64/2 || last > math.MaxInt64/2 {
			return fmt.Errorf("--bump-revision=%d is too much for revision %d: 1000000000 is more than most clusters reach in their life", r.BumpRevision, last)
		}
		rev := last + int64(r.BumpRevision)
		if rev <= saved {
			return fmt.Errorf("--bump-revision=%d is too little: it counts from the last record, of revision %d, and the backup is compacted at %d: 1000000000 is more than most clusters reach in their life", r.BumpRevision, last, saved)
		}
		// etcd writes a record without bytes there, so that its revision is that one
		// even before the compaction ran; HashKV has it in it.
		batch.SetRevision(rev, 0, storage.RevisionRecord{})
		batch.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaScheduledCompact)), binary.BigEndian.AppendUint64(nil, uint64(rev)))
	}
	return store.Commit(batch)
}

// lastRecord returns the main revision of the last record, 0 if there is none.
func lastRecord(store *storage.Store) (rev int64, err error) {
	lower, upper := storage.RevisionBounds(0, 0)
	it, err := store.Iter(context.Background(), lower, upper)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	if !it.Last() {
		return 0, it.Error()
	}
	rev, _, err = storage.ParseRevisionKey(it.Key())
	return rev, err
}

// prove opens the store as a member will, and leaves behind what makes that fast.
func (r *Restore) prove(store *storage.Store, s *staging, report *Restored) error {
	o := r.State
	o.Storage, o.Logger = store, r.Logger
	o.MVCC = mvcc.Options{FS: r.FS, Dir: r.FS.PathJoin(s.dir, datadir.Index), WarmBytes: -1, CheckpointBytes: -1}
	m, err := state.Open(o)
	if err != nil {
		return err
	}
	if applied, term := m.Applied(); applied != uint64(len(r.Founders)) || term != 1 {
		m.Abandon()
		return fmt.Errorf("the store came out at index %d of term %d, want %d of 1", applied, term, len(r.Founders))
	}
	report.Revision, report.Keys = m.Root().Revision(), m.Root().Keys()
	if r.BumpRevision > 0 {
		report.Keys-- // nobody can read the record that raised the revision
	}
	users, _, alarms := m.Tables()
	report.Leases, report.Users, report.Alarms = m.Leases().Len(), len(users.UserNames()), len(alarms.List(0))
	return m.Close()
}

// told is a file whose reading is told of.
type told struct {
	r    io.ReaderAt
	done int64
	tell func(done int64)
}

func (t *told) ReadAt(b []byte, at int64) (int, error) {
	n, err := t.r.ReadAt(b, at)
	t.done += int64(n)
	t.tell(t.done)
	return n, err
}
