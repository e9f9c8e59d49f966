package datadir

import (
	"path"
	"slices"
	"strings"

	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/storage"
)

// Names that are not there all the time. docs/format.md says what they are for.
const (
	TempSuffix = ".tmp" // of a file that is being written, or what a crash left of it

	SnapshotPrefix  = "snapshot-"   // directory of a state that came from the leader
	ReceivingSuffix = ".receiving"  // of one that is coming
	ReceivedFile    = "received.db" // in it: what comes in etcd's form
	SendingPrefix   = "sending-"    // directory of one that is going out

	Restoring       = "restoring" // directory of a restore on its way
	RestoringSuffix = ".restoring"

	Fixtures   = "fixtures" // certificates that the member made for itself
	ClientSide = "client"   // in it: of the listeners for clients
	PeerSide   = "peer"     // and for members

	EtcdMember    = "member" // of etcd: its directory or, after an import, the mark that it is no more
	MovedMember   = EtcdMember + ".etcd-"
	MovedWAL      = "wal.etcd-"
	ImportDir     = "import.tmp"
	ImportMarker  = "MARKER" // in ImportDir: what becomes the mark
	ImportJournal = "IMPORT"
)

// name is one that may be in a data directory.
type name struct {
	pattern string // as of path.Match
	// state is that of a directory with a member's state, of which one is the present one.
	state bool
	// note is what to tell of it, with its path; nothing of what is a member's own.
	note string
	// inside is what may be in it; nil says that it is nobody's concern.
	inside []name
}

const (
	crashNote    = "%s is what a crash left of a file being written: it can be deleted"
	keyNote      = "%s is what a crash left of a certificate being written, and may hold a key: it can be deleted"
	snapshotNote = "%s is what a snapshot left behind: the next start deletes it"
	restoreNote  = "%s is what an interrupted restore left behind: it can be deleted"
	importNote   = "%s is of an import of etcd's data that was interrupted: the next start ends it, or begins it again"
	etcdNote     = "%s is the etcd member that this one was made of: delete it when it is not needed any more"
	unknownNote  = "%s is none of a member's files"
)

// dirNames are all names of a data directory: what a member, a restore or an import writes there, and what a crash leaves of them.
// What writes another one adds it here. The inside of Store is Pebble's.
var (
	dirNames = []name{
		{pattern: Lock}, {pattern: IdentityFile}, {pattern: IdentityFile + TempSuffix, note: crashNote},
		{pattern: Store, state: true}, {pattern: Index, state: true, inside: indexNames},
		{pattern: SnapshotPrefix + "*", state: true, inside: []name{{pattern: Store}, {pattern: Index, inside: indexNames}, {pattern: ReceivedFile}}},
		{pattern: Log, inside: logNames},
		{pattern: SendingPrefix + "*", note: snapshotNote},
		{pattern: Restoring, note: restoreNote}, {pattern: "*" + RestoringSuffix, note: restoreNote},
		{pattern: Fixtures, inside: []name{{pattern: ClientSide, inside: pairNames}, {pattern: PeerSide, inside: pairNames}}},
		{pattern: ImportJournal, note: importNote}, {pattern: ImportJournal + TempSuffix, note: importNote}, {pattern: ImportDir, note: importNote},
		{pattern: EtcdMember}, {pattern: MovedMember + "*", note: etcdNote}, {pattern: MovedWAL + "*", note: etcdNote},
	}
	// logNames are those of the directory of the log, wherever that is.
	logNames = []name{
		{pattern: LogLock}, {pattern: "*" + raftlog.SegmentSuffix}, {pattern: raftlog.SparePrefix + "*"},
		{pattern: ImportDir, note: importNote}, {pattern: MovedWAL + "*", note: etcdNote},
	}
	indexNames = []name{{pattern: mvcc.CheckpointFile}, {pattern: mvcc.CheckpointTemp, note: crashNote}}
	pairNames  = []name{{pattern: "cert.pem"}, {pattern: "key.pem"}, {pattern: ".new-*", note: keyNote}} // as internal/tlsfiles names them
)

// IsSnapshot says whether a name in a data directory is that of a snapshot which came, or was coming, from another member.
func IsSnapshot(name string) bool { return strings.HasPrefix(name, SnapshotPrefix) }

// IsWholeSnapshot says that of one which came.
func IsWholeSnapshot(name string) bool {
	return IsSnapshot(name) && !strings.HasSuffix(name, ReceivingSuffix)
}

// Unknown lists what is in a data directory, and in that of its log if it is elsewhere, and is none of the files that a member, a restore
// or an import leaves there, whenever it ends.
func Unknown(fs storage.FS, dir, logDir string) (paths []string, err error) {
	err = walk(fs, dir, logDir, func(path string, n *name) {
		if n == nil {
			paths = append(paths, path)
		}
	})
	return paths, err
}

// walk tells f of each path below a data directory and what its name stands for, nil if that is nothing.
func walk(fs storage.FS, dir, logDir string, f func(path string, n *name)) error {
	if logDir == "" {
		logDir = fs.PathJoin(dir, Log)
	}
	list := dirNames
	if logDir == dir {
		list = slices.Concat(list, logNames)
	}
	err := walkNames(fs, dir, list, func(path string, n *name) {
		if n != nil || !strings.HasPrefix(logDir+"/", path+"/") {
			f(path, n)
		}
	})
	if err != nil || logDir == dir || logDir == fs.PathJoin(dir, Log) {
		return err
	}
	return walkNames(fs, logDir, logNames, f)
}

func walkNames(fs storage.FS, dir string, list []name, f func(path string, n *name)) error {
	names, err := fs.List(dir)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, base := range names {
		full := fs.PathJoin(dir, base)
		i := slices.IndexFunc(list, func(n name) bool { ok, err := path.Match(n.pattern, base); return ok && err == nil })
		if i < 0 {
			f(full, nil)
			continue
		}
		f(full, &list[i])
		if list[i].inside == nil {
			continue
		}
		if info, err := fs.Stat(full); err != nil {
			return err
		} else if !info.IsDir() {
			f(full, nil)
			continue
		}
		if err := walkNames(fs, full, list[i].inside, f); err != nil {
			return err
		}
	}
	return nil
}
