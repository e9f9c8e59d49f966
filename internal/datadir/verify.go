package datadir

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"

	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

// Verify examines the data directory of a member that does not run.
type Verify struct {
	FS  storage.FS // nil means the operating system's
	Dir string
	// LogDir is where the raft log is, if not in Dir.
	LogDir string
	// State is what the machine is opened with: Version and MinLeaseTTL.
	State state.Options
	// Progress, if not nil, is told what is read now.
	Progress func(what string)
}

// Report is what a verification found. A directory without problems can be
// started on, and what it gives is what was written.
type Report struct {
	Dir      string   `json:"dataDir"`
	Identity Identity `json:"-"`
	Log      struct {
		Segments int    `json:"segments"`
		Records  int64  `json:"records"`
		First    uint64 `json:"firstIndex"` // above Last: there are no entries
		Last     uint64 `json:"lastIndex"`
		Commit   uint64 `json:"commitIndex"` // as far as it was written down
		Term     uint64 `json:"term"`
		// UnprovenBytes are those at the end that no mark says to be synced.
		UnprovenBytes int64 `json:"unprovenBytes"`
		Torn          bool  `json:"torn"`
	} `json:"log"`
	Store struct {
		Dir             string `json:"dir"`
		Records         int64  `json:"records"` // of the revision log
		Rows            int64  `json:"rows"`    // of the small tables
		Bytes           int64  `json:"bytes"`
		Keys            int64  `json:"keys"`
		Revision        int64  `json:"revision"`
		CompactRevision int64  `json:"compactRevision"`
		Applied         uint64 `json:"appliedIndex"`
		Term            uint64 `json:"appliedTerm"`
	} `json:"store"`
	Index struct {
		There    bool  `json:"there"`
		Revision int64 `json:"revision"`
	} `json:"index"`
	Problems []Problem `json:"problems"`
	Notes    []string  `json:"notes,omitempty"`
}

// Problem is why a member must not be started on a directory.
type Problem struct {
	Where string `json:"where"` // a file, or a directory
	What  string `json:"what"`
	Cure  string `json:"cure"`
}

const cureIndex = "delete the file: the next start reads all records instead, and writes a new one"

// cureRebuild is what to do about data that only the member's peers can make good. The command is whole but for their addresses.
func (r *Report) cureRebuild() string {
	who := "<its name or ID>"
	if id := r.Identity.Member; id != 0 {
		who = fmt.Sprintf("%x", id)
	}
	return fmt.Sprintf("rebuild the member from its peers: `engram ctl --endpoints <other members> rebuild --data-dir %s %s`; or, if it is the only one, restore a backup with `engram util snapshot restore`", r.Dir, who)
}

// Run examines the directory. It changes nothing but the lock files. The error is
// of what kept it from examining; what it found is in the report.
func (v Verify) Run(ctx context.Context) (r Report, err error) {
	if v.FS == nil {
		v.FS = storage.DefaultFS
	}
	r.Dir, r.Problems = v.Dir, []Problem{}
	if v.LogDir == "" {
		v.LogDir = v.FS.PathJoin(v.Dir, Log)
	}
	if _, err := v.FS.Stat(v.Dir); err != nil {
		return r, err
	}
	id, known, err := ReadIdentity(v.FS, v.Dir)
	if err != nil {
		r.problem(v.FS.PathJoin(v.Dir, IdentityFile), err.Error(), "write it anew by hand: see docs/format.md")
	}
	r.Identity = id
	exists, err := raftlog.Exists(v.FS, v.LogDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return r, err
	}
	if !exists && !known {
		return r, fmt.Errorf("%s holds no member's data: it has neither %s nor a raft log", v.Dir, IdentityFile)
	}
	if !exists {
		r.problem(v.LogDir, "there is no raft log here, and the directory belongs to a member", "put the log back (with --wal-dir, name its directory), or restore a backup into an empty directory")
		return r, nil
	}
	v.tell("raft log")
	summary, ok, err := v.checkLog(&r, known)
	if err != nil {
		return r, err
	}
	names, err := v.FS.List(v.Dir)
	if err != nil {
		return r, err
	}
	storeDir := v.Dir
	switch {
	case ok && summary.Installed != nil && summary.Installed.Dir != "":
		storeDir = v.FS.PathJoin(v.Dir, summary.Installed.Dir)
	case !ok && slices.ContainsFunc(names, IsWholeSnapshot):
		r.note("which store is the present one the raft log alone says, so none was read, and none may be deleted")
		return r, v.names(&r, "")
	}
	if err := v.checkStore(ctx, &r, storeDir, summary, ok); err != nil {
		return r, err
	}
	return r, v.names(&r, storeDir)
}

func (v Verify) tell(what string) {
	if v.Progress != nil {
		v.Progress(what)
	}
}

func (r *Report) problem(where, what, cure string) {
	r.Problems = append(r.Problems, Problem{where, what, cure})
}

func (r *Report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// checkLog reads each record of the log. ok says that the log could be read.
func (v Verify) checkLog(r *Report, known bool) (s raftlog.Summary, ok bool, err error) {
	s, err = raftlog.Scan(v.FS, v.LogDir, func(raftlog.Record) error { r.Log.Records++; return nil })
	if damage := (*raftlog.DamageError)(nil); errors.As(err, &damage) {
		r.problem(damage.File, fmt.Sprintf("damaged at offset %d, which held %s: %s", damage.Offset, damage.Held, damage.Why), r.cureRebuild())
		return s, false, nil
	}
	if err != nil {
		r.problem(v.LogDir, err.Error(), r.cureRebuild())
		return s, false, nil
	}
	l := &r.Log
	l.Segments, l.First, l.Last, l.Commit, l.Term = s.Segments, s.First, s.Last, s.Commit, s.Term
	l.UnprovenBytes, l.Torn = s.Unproven, s.Torn
	whose := Identity{Cluster: s.Identity.ClusterID, Member: s.Identity.MemberID}
	if known && (whose.Cluster != r.Identity.Cluster || whose.Member != r.Identity.Member) {
		r.problem(v.LogDir, fmt.Sprintf("the log belongs to member %x of cluster %x, the directory to member %x of cluster %x", whose.Member, whose.Cluster, r.Identity.Member, r.Identity.Cluster),
			"put the log back that belongs to the store")
	}
	if !known {
		r.Identity = whose
	}
	if s.Torn {
		r.note("the last write to the log was interrupted: it was never acknowledged, and the next start cuts it off at offset %d of %s", s.EndOffset, s.EndFile)
	}
	return s, true, nil
}

// checkStore reads every block of the store, makes its index in both ways, opens
// it as a member does, and compares it with the log.
func (v Verify) checkStore(ctx context.Context, r *Report, dir string, log raftlog.Summary, haveLog bool) (err error) {
	path := v.FS.PathJoin(dir, Store)
	r.Store.Dir = path
	damaged := func(err error) {
		r.problem(path, err.Error(), r.cureRebuild())
	}
	if _, err := v.FS.Stat(path); err != nil {
		damaged(fmt.Errorf("there is no store: %w", err))
		return nil
	}
	v.tell("store")
	var corrupt []error
	store, err := storage.Open(storage.Options{
		FS: v.FS, Dir: path, ReadOnly: true, Logger: slog.New(slog.DiscardHandler),
		OnCorruption: func(err error) { corrupt = append(corrupt, err) },
	})
	if err != nil {
		damaged(err)
		return nil
	}
	defer func() { err = errors.Join(err, store.Abandon()) }()
	found := func(err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if len(corrupt) > 0 {
			err = corrupt[0] // it names the file
		}
		damaged(err)
		return nil
	}
	err = store.Check(ctx, func(key, value []byte) error {
		r.Store.Bytes += int64(len(key) + len(value))
		if main, sub, err := storage.ParseRevisionKey(key); err == nil {
			r.Store.Records++
			if _, err := storage.ParseRevisionValue(value); err != nil {
				return fmt.Errorf("the record of revision %d.%d: %w", main, sub, err)
			}
		} else {
			r.Store.Rows++
		}
		return ctx.Err()
	})
	if err != nil {
		return found(err)
	}
	v.tell("index")
	index, err := mvcc.CheckIndex(mvcc.Options{Storage: store, FS: v.FS, Dir: v.FS.PathJoin(dir, Index)})
	switch {
	case errors.Is(err, mvcc.ErrIndex):
		r.problem(v.FS.PathJoin(dir, Index), err.Error(), cureIndex)
	case err != nil:
		return found(err)
	}
	r.Index.There, r.Index.Revision = index.There, index.Revision
	if index.Unusable != nil {
		r.note("the index checkpoint in %s is of no use, so the next start reads all records: %v", v.FS.PathJoin(dir, Index), index.Unusable)
	}
	s := &r.Store
	s.Keys, s.Revision, s.CompactRevision, s.Applied, s.Term = index.Keys, index.LastRevision, index.CompactRevision, index.Applied, index.Term
	if err := v.open(store); err != nil {
		damaged(err)
	}
	if haveLog {
		return v.compare(r, log)
	}
	return nil
}

// open opens a machine on the store, which reads all small tables.
func (v Verify) open(store *storage.Store) error {
	o := v.State
	o.Storage = store
	o.MVCC = mvcc.Options{FS: v.FS, WarmBytes: -1, CheckpointBytes: -1}
	m, err := state.Open(o)
	if err != nil {
		return err
	}
	m.Abandon()
	return nil
}

// compare holds the store's applied index against the log. Which of the two is
// the wrong one cannot be told: the end of the log may be lost, or that of the
// store's MANIFEST, which Pebble takes for an interrupted write.
func (v Verify) compare(r *Report, log raftlog.Summary) error {
	applied, term := r.Store.Applied, r.Store.Term
	switch {
	case applied > log.Last:
		r.problem(v.Dir, fmt.Sprintf("the log ends at index %d, the store has applied %d: the log is older than the store, or the end of the log or of the store's MANIFEST is lost", log.Last, applied), r.cureRebuild())
	case applied+1 < log.First:
		r.problem(v.Dir, fmt.Sprintf("the store has applied index %d and needs %d next, the log begins at %d: the store is older than the log, or the end of its MANIFEST is lost", applied, applied+1, log.First), r.cureRebuild())
	case applied >= log.First:
		var has uint64
		_, err := raftlog.Scan(v.FS, v.LogDir, func(rec raftlog.Record) error {
			if rec.Kind == raftlog.KindEntry && rec.Index == applied {
				has = rec.Term // the last one replaces those before
			}
			return nil
		})
		if err != nil {
			return err
		}
		if has != term {
			r.problem(v.Dir, fmt.Sprintf("the log has term %d at index %d, the store applied it with term %d: they are not of one history", has, applied, term), r.cureRebuild())
		}
	}
	return nil
}

// names tells of what lies in the directory beside the member's own. storeDir is "" if it is not known which store that is.
func (v Verify) names(r *Report, storeDir string) error {
	return walk(v.FS, v.Dir, v.LogDir, func(path string, n *name) {
		switch {
		case n == nil:
			r.note(unknownNote, path)
		case n.state && storeDir != "" && path != storeDir && (storeDir != v.Dir || IsSnapshot(n.pattern)):
			r.note(snapshotNote, path)
		case n.note != "":
			r.note(n.note, path)
		}
	})
}
