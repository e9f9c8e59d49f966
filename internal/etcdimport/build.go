package etcdimport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dustin/go-humanize"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/etcddir"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

const (
	// slackBytes is what small files and the unfinished parts of large ones take.
	slackBytes = 64 << 20
	// batchBytes is how much of the log is handled at once.
	batchBytes   = 4 << 20
	batchEntries = 4096
	// tellEvery is the time between two words about how far it is.
	tellEvery = 3 * time.Second
)

// checkSpace refuses to begin what the disk cannot hold. The store takes what the
// database does, or less; entries take in our log what they take in etcd's.
func (o *Options) checkSpace(d *etcddir.Dir, dir, logDir string) error {
	store, log := uint64(max(d.DB.PageBytes, 0))+slackBytes, uint64(slackBytes)
	for _, s := range d.Segments {
		log += uint64(s.Bytes)
	}
	need := map[string]uint64{dir: store + log}
	if logDir != "" && !o.sameDisk(dir, logDir) {
		need = map[string]uint64{dir: store, logDir: log}
	}
	for path, bytes := range need {
		u, err := o.FS.GetDiskUsage(path)
		if err != nil {
			o.Logger.Warn("free space is not known, the import goes on", "dir", path, "error", err)
			continue
		}
		bytes += min(o.ReserveBytes, u.TotalBytes/10)
		if u.AvailBytes < bytes {
			return fmt.Errorf("%w: the disk of %s has %s free, the import needs up to %s beside etcd's files, which stay: free space there, or move the directory to a larger disk",
				ErrNoSpace, path, humanize.IBytes(u.AvailBytes), humanize.IBytes(bytes))
		}
	}
	return nil
}

// sameDisk says whether two directories take their space from one file system.
func (o *Options) sameDisk(a, b string) bool {
	one, err := o.FS.Stat(a)
	if err != nil {
		return false
	}
	other, err := o.FS.Stat(b)
	return err == nil && one.DeviceID() == other.DeviceID()
}

// build makes store, index and log of d in new directories, all of it durable
// but for the name of dir. The report is never nil, and of what was found before
// an error.
func (o *Options) build(ctx context.Context, d *etcddir.Dir, dir, logDir string) (*Report, error) {
	b := &builder{o: o, d: d, dir: dir, r: newReport(d)}
	for _, path := range []string{o.FS.PathJoin(dir, datadir.Store), o.FS.PathJoin(dir, datadir.Index), logDir} {
		if err := o.FS.MkdirAll(path, 0o700); err != nil {
			return b.r, err
		}
	}
	err := b.run(ctx, logDir)
	if err = errors.Join(err, b.close(err == nil)); err != nil {
		return b.r, err
	}
	return b.r, syncAll(o.FS, o.FS.PathJoin(dir, datadir.Store), o.FS.PathJoin(dir, datadir.Index), logDir, dir)
}

// builder is one import on its way.
type builder struct {
	o   *Options
	d   *etcddir.Dir
	dir string
	r   *Report

	store   *storage.Store
	machine *state.Machine
	log     *raftlog.Log
}

func (b *builder) run(ctx context.Context, logDir string) error {
	if err := b.openStore(ctx); err != nil {
		return err
	}
	if err := b.openMachine(); err != nil {
		return err
	}
	var err error
	b.log, err = raftlog.Open(raftlog.Options{
		FS: b.o.FS, Dir: logDir, Logger: b.o.Logger,
		Identity: raftlog.Identity{ClusterID: b.d.ClusterID, MemberID: b.d.MemberID},
	})
	if err != nil {
		return err
	}
	if err := b.writeLog(ctx); err != nil {
		return err
	}
	if err := b.replay(ctx); err != nil {
		return err
	}
	return b.judge()
}

// close makes all durable if whole, and otherwise only lets go of it.
func (b *builder) close(whole bool) error {
	var errs []error
	if b.machine != nil {
		if whole {
			errs = append(errs, b.machine.Close())
		} else {
			b.machine.Abandon()
		}
	}
	if b.store != nil {
		if whole {
			errs = append(errs, b.store.Close())
		} else {
			errs = append(errs, b.store.Abandon())
		}
	}
	if b.log != nil {
		if whole {
			errs = append(errs, b.log.Close())
		} else {
			errs = append(errs, b.log.Abandon())
		}
	}
	return errors.Join(errs...)
}

// openStore fills a store from the database. If the database holds nothing yet,
// the log has everything.
func (b *builder) openStore(ctx context.Context) (err error) {
	b.store, err = storage.Open(storage.Options{FS: b.o.FS, Dir: b.o.FS.PathJoin(b.dir, datadir.Store), Logger: b.o.Logger, OnFatal: b.o.OnFatal})
	if err != nil || b.d.DB.Applied == 0 {
		return err
	}
	db := &told{r: b.d.Database(), tell: b.teller("reading etcd's database", b.d.DB.PageBytes)}
	meta, err := snapfile.ReadEtcdAt(ctx, b.d.DB.Path, db, b.d.DB.Bytes, b.store)
	if err != nil {
		return err
	}
	if meta.Applied != b.d.DB.Applied || meta.Term != b.d.DB.Term {
		return fmt.Errorf("%s held index %d of term %d, and now %d of %d: something writes to it", b.d.DB.Path, b.d.DB.Applied, b.d.DB.Term, meta.Applied, meta.Term)
	}
	b.r.DBRevision = meta.Revision
	return nil
}

func (b *builder) openMachine() (err error) {
	s := b.o.State
	s.Storage, s.Publisher, s.Logger = b.store, nil, b.o.Logger
	s.MVCC = mvcc.Options{FS: b.o.FS, Dir: b.o.FS.PathJoin(b.dir, datadir.Index), WarmBytes: -1, CheckpointBytes: -1}
	s.Wanted = func(uint64) bool { return false } // nobody waits for an answer
	if b.machine, err = state.Open(s); err != nil {
		return err
	}
	if b.d.V2 == nil {
		return nil
	}
	_, members, _ := b.machine.Tables()
	if why := b.d.V2.Differs(members.List()); why != "" {
		return fmt.Errorf("%w: %s knows other members than etcd 3.5 itself, which goes by its snapshot file and the log: %s; "+
			"add a new member to the cluster and remove this one, or upgrade etcd to a 3.6 that starts on it", ErrRefused, b.d.DB.Path, why)
	}
	return nil
}

// writeLog writes the entries after the snapshot that etcd's log begins with,
// those that are not known to be committed too: a leader may count on them.
func (b *builder) writeLog(ctx context.Context) error {
	first := raftlog.Append{}
	if s := b.d.Snapshot; s.Index > 0 {
		cs := s.ConfState
		if b.d.DB.Applied == s.Index {
			cs = b.machine.ConfState() // the log is held against the store
		}
		first.Snapshot = &raftlog.Snapshot{Index: s.Index, Term: s.Term, ConfState: cs}
	}
	batch, size := first, 0
	write := func() error {
		_, err := b.log.Write([]raftlog.Append{batch})
		if err == nil {
			err = b.log.Sync()
		}
		batch, size = raftlog.Append{}, 0
		return err
	}
	tell := b.teller("copying the log", int64(b.d.Last-b.d.Snapshot.Index))
	next := b.d.Snapshot.Index + 1
	err := b.d.Entries(ctx, func(e *raftpb.Entry) error {
		index := e.GetIndex()
		if index != next || size > batchBytes || len(batch.Entries) >= batchEntries {
			if err := write(); err != nil { // entries of one write follow each other
				return err
			}
		}
		batch.Entries = append(batch.Entries, e)
		size += len(e.GetData())
		next = index + 1
		tell(int64(index - b.d.Snapshot.Index))
		return nil
	})
	if err != nil {
		return err
	}
	commit := b.d.Commit()
	batch.HardState = &raftpb.HardState{Term: &b.d.Hard.Term, Vote: &b.d.Hard.Vote, Commit: &commit}
	if err := write(); err != nil {
		return err
	}
	if last, err := b.log.LastIndex(); err != nil || last != b.d.Last {
		return errors.Join(err, fmt.Errorf("the log ends at index %d, %d was found before: something writes to %s", last, b.d.Last, b.d.WALPath()))
	}
	return nil
}

// replay runs the committed entries that the database does not hold.
func (b *builder) replay(ctx context.Context) error {
	applied, _ := b.machine.Applied()
	commit := b.d.Commit()
	b.r.Replayed = commit - applied
	tell := b.teller("running the entries that etcd's database lacks", int64(b.r.Replayed))
	var batch []*raftpb.Entry
	size := 0
	run := func() error {
		for len(batch) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			results, err := b.machine.Apply(batch)
			if err != nil {
				return fmt.Errorf("%w: the log in %s: %w", ErrRefused, b.d.WALPath(), err)
			}
			for _, r := range results {
				r.Reply.Release()
			}
			batch = batch[len(results):]
		}
		size = 0
		return nil
	}
	err := b.log.Replay(applied+1, commit+1, func(e *raftpb.Entry) error {
		batch = append(batch, e)
		if size += len(e.GetData()); size < batchBytes && len(batch) < batchEntries {
			return nil
		}
		tell(int64(e.GetIndex() - applied))
		return run()
	})
	if err != nil {
		return err
	}
	return run()
}

// judge looks at what came of it, and refuses what could not run.
func (b *builder) judge() error {
	b.r.describe(b.machine, b.o)
	var errs []error
	if b.r.removed {
		errs = append(errs, fmt.Errorf("%w: member %x was removed from its cluster: add a new member and start it with an empty data directory", ErrRefused, b.d.MemberID))
	}
	if b.d.Last == 0 {
		errs = append(errs, fmt.Errorf("%w: etcd was stopped before member %x got anything from its cluster: delete the data directory and start Engram with the same flags", ErrRefused, b.d.MemberID))
	}
	if b.r.old {
		errs = append(errs, fmt.Errorf("%w: the cluster agreed on version %s: upgrade all of its members to etcd 3.5 first", etcddir.ErrVersion, b.r.ClusterVersion))
	}
	return errors.Join(errs...)
}

// teller returns a function that says now and then how much is done.
func (b *builder) teller(what string, total int64) func(done int64) {
	next := time.Now().Add(tellEvery)
	return func(done int64) {
		if now := time.Now(); now.After(next) {
			next = now.Add(tellEvery)
			b.o.Logger.Info("importing: "+what, "done", done, "of", total, "percent", done*100/max(total, 1))
		}
	}
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
