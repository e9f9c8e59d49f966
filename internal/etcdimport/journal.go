package etcdimport

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/etcddir"
	"github.com/engram-kv/engram/internal/storage"
)

// journalFile says how an import that is built is to be ended. It is there from
// before etcd's directory gets another name until all has its final one.
const journalFile = datadir.ImportJournal

// journal is the content of journalFile, and the steps that it is for.
type journal struct {
	dir string

	// Member is what etcd's directory is called from now on.
	Member string `json:"member"`
	// WALDir is where the log goes, if it is not below the data directory; WAL is
	// the directory in it for what etcd had there, empty if it had nothing.
	WALDir string `json:"wal-dir,omitempty"`
	WAL    string `json:"wal,omitempty"`
}

func (o *Options) newJournal(d *etcddir.Dir, at time.Time) *journal {
	stamp := at.UTC().Format("20060102T150405Z")
	j := &journal{dir: o.Dir, Member: movedDir + stamp, WALDir: o.WALDir}
	if o.WALDir != "" && d.WALPath() == o.WALDir {
		j.WAL = movedWAL + stamp
	}
	return j
}

// readJournal returns what an interrupted import left; there is none if ok is false.
func readJournal(fs storage.FS, dir string) (j *journal, ok bool, err error) {
	path := fs.PathJoin(dir, journalFile)
	text, err := readFile(fs, path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, false, nil
	}
	j = &journal{dir: dir}
	if err == nil {
		if err = json.Unmarshal(text, j); err == nil && !strings.HasPrefix(j.Member, movedDir) {
			err = fmt.Errorf("%q is no name for etcd's directory", j.Member)
		}
	}
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", path, err)
	}
	return j, true, nil
}

// write writes the journal, whole or not at all.
func (j *journal) write(fs storage.FS) error {
	text, err := json.Marshal(j)
	if err != nil {
		return err
	}
	path := fs.PathJoin(j.dir, journalFile)
	if err := writeFile(fs, path+datadir.TempSuffix, append(text, '\n')); err != nil {
		return err
	}
	if err := fs.Rename(path+datadir.TempSuffix, path); err != nil {
		return err
	}
	return datadir.Sync(fs, j.dir)
}

// writeMarker writes the file that takes the place of etcd's directory: whoever
// looks finds out what happened, and an etcd that is started there fails.
func (j *journal) writeMarker(fs storage.FS) error {
	wal, log := "", datadir.Log
	if j.WALDir != "" {
		log = ""
	}
	if j.WAL != "" {
		wal = fmt.Sprintf("  in %s: rm *.log, and mv %s/* .\n", j.WALDir, j.WAL)
	}
	text := fmt.Sprintf(`Engram has imported the etcd data of this directory and goes on as the same member.
What etcd wrote lies unchanged in %[1]s. This file keeps an etcd from
starting here: two members with one identity would make a cluster lose data.

Back to etcd, if this is the only member of its cluster, without what was
written since (of several members, one is replaced by a new one instead).
Stop Engram first, then, in this directory:

  rm %[2]s
  mv %[1]s %[2]s
%[3]s  rm -r %[4]s %[5]s %[6]s %[7]s
`, j.Member, etcddir.MemberDir, wal, datadir.Store, datadir.Index, datadir.IdentityFile, log)
	return writeFile(fs, fs.PathJoin(j.dir, tempDir, markerFile), []byte(text))
}

// What a name stands for.
const (
	nothing = iota
	aFile
	aDirectory
)

func kindOf(fs storage.FS, path string) (int, error) {
	info, err := fs.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nothing, nil
	case err != nil:
		return 0, err
	case info.IsDir():
		return aDirectory, nil
	}
	return aFile, nil
}

// discard takes back what moveMember does before it is decided.
func (j *journal) discard(fs storage.FS) error {
	path := fs.PathJoin(j.dir, j.Member)
	if kind, err := kindOf(fs, path); err != nil || kind != aFile {
		return err
	}
	return fs.Remove(path) // the marker
}

// moved says whether etcd's directory has its other name: from then on there is
// no way back but to the end.
func (j *journal) moved(fs storage.FS) (bool, error) {
	kind, err := kindOf(fs, fs.PathJoin(j.dir, j.Member))
	return kind == aDirectory, err
}

// finish gives all that was built its final names. It may be called again.
func (j *journal) finish(fs storage.FS) error {
	if err := j.moveMember(fs); err != nil {
		return fmt.Errorf("moving %s away: %w", fs.PathJoin(j.dir, etcddir.MemberDir), err)
	}
	for _, step := range []func(storage.FS) error{j.moveWAL, j.publish, j.clear} {
		if err := step(fs); err != nil {
			return fmt.Errorf("ending the import of etcd's data in %s, the next start goes on: %w", j.dir, err)
		}
	}
	return nil
}

// moveMember gives etcd's directory its other name and puts the marker in its
// place: at once where the file system can do that.
func (j *journal) moveMember(fs storage.FS) error {
	member, moved := fs.PathJoin(j.dir, etcddir.MemberDir), fs.PathJoin(j.dir, j.Member)
	marker := fs.PathJoin(j.dir, tempDir, markerFile)
	is, err := kindOf(fs, member)
	if err != nil {
		return err
	}
	was, err := kindOf(fs, moved)
	if err != nil {
		return err
	}
	switch {
	case is == aFile && was == aDirectory:
		return nil
	case is == nothing && was == aDirectory: // a crash came between the two renames below
		if err := fs.Rename(marker, member); err != nil {
			return err
		}
		return datadir.Sync(fs, j.dir)
	case is != aDirectory || was != nothing:
		return fmt.Errorf("both %s and %s are there: etcd was started on the directory since; move one of them elsewhere, the other is to be called %s",
			member, moved, j.Member)
	}
	if exchanges(fs) {
		if err := fs.Rename(marker, moved); err != nil {
			return err
		}
		if err := exchange(member, moved); err == nil {
			return datadir.Sync(fs, j.dir)
		}
		if err := fs.Rename(moved, marker); err != nil { // this file system cannot
			return err
		}
	}
	if err := fs.Rename(member, moved); err != nil {
		return err
	}
	if err := fs.Rename(marker, member); err != nil {
		return err
	}
	return datadir.Sync(fs, j.dir)
}

// moveWAL moves what etcd had in a directory of the log's own into one below it:
// it may be a mount, which cannot be renamed.
func (j *journal) moveWAL(fs storage.FS) error {
	if j.WAL == "" {
		return nil
	}
	names, err := fs.List(j.WALDir)
	if err != nil {
		return err
	}
	to := fs.PathJoin(j.WALDir, j.WAL)
	if err := fs.MkdirAll(to, 0o700); err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, ".wal") || strings.HasSuffix(name, ".wal.broken") || name == "0.tmp" || name == "1.tmp" {
			if err := fs.Rename(fs.PathJoin(j.WALDir, name), fs.PathJoin(to, name)); err != nil {
				return err
			}
		}
	}
	return syncAll(fs, to, j.WALDir)
}

// publish gives what is below the data directory its names. The identity comes
// last: a directory that has it must have the rest.
func (j *journal) publish(fs storage.FS) error {
	for _, name := range [...]string{datadir.Store, datadir.Index, datadir.Log, datadir.IdentityFile} {
		from := fs.PathJoin(j.dir, tempDir, name)
		if kind, err := kindOf(fs, from); err != nil || kind == nothing {
			if err != nil {
				return err
			}
			continue // it has it already, or lies in WALDir
		}
		if name == datadir.IdentityFile {
			if err := j.publishLog(fs); err != nil {
				return err
			}
			if err := datadir.Sync(fs, j.dir); err != nil {
				return err
			}
		}
		if err := fs.Rename(from, fs.PathJoin(j.dir, name)); err != nil {
			return err
		}
	}
	return datadir.Sync(fs, j.dir)
}

// publishLog moves the segments of the log into WALDir.
func (j *journal) publishLog(fs storage.FS) error {
	if j.WALDir == "" {
		return nil
	}
	temp := fs.PathJoin(j.WALDir, tempDir)
	names, err := fs.List(temp)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".log") {
			continue
		}
		if err := fs.Rename(fs.PathJoin(temp, name), fs.PathJoin(j.WALDir, name)); err != nil {
			return err
		}
	}
	return datadir.Sync(fs, j.WALDir)
}

func (j *journal) clear(fs storage.FS) error { return forget(fs, j.dir, j.WALDir) }

// forget deletes what is only there during an import, the journal last.
func forget(fs storage.FS, dir, walDir string) error {
	for _, d := range [...]string{walDir, dir} {
		if d == "" {
			continue
		}
		path := fs.PathJoin(d, tempDir)
		if kind, err := kindOf(fs, path); err != nil {
			return err
		} else if kind == nothing {
			continue
		}
		if err := fs.RemoveAll(path); err != nil {
			return err
		}
		if err := datadir.Sync(fs, d); err != nil {
			return err
		}
	}
	for _, name := range [...]string{journalFile + datadir.TempSuffix, journalFile} {
		path := fs.PathJoin(dir, name)
		if kind, err := kindOf(fs, path); err != nil {
			return err
		} else if kind == nothing {
			continue
		}
		if err := fs.Remove(path); err != nil {
			return err
		}
		if err := datadir.Sync(fs, dir); err != nil {
			return err
		}
	}
	return nil
}
