package sim

import (
	"errors"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/raftlog"
)

// mutant is a rule that members break on purpose, to see that the checks find
// it.
type mutant int

const (
	sound            mutant = iota
	noSync                  // a member acknowledges before its log is synced
	markApart               // the applied index is committed after its batch
	cutEarly                // the log is cut up to what is applied, durable or not
	readAnywhere            // a read is answered without asking the leader
	swapFirst               // a snapshot is installed before the log says so
	unsyncedSnapshot        // a received snapshot is said to be there before it is on disk
	eventsLost              // a batch of events does not reach the hub
	leasesCut               // a new leader does not give leases their time
)

var mutants = map[mutant]string{
	noSync: "acknowledges before sync", markApart: "applied index outside its batch", cutEarly: "log cut before the store is durable",
	readAnywhere: "read without read index", swapFirst: "snapshot installed without its log record", eventsLost: "events lost",
	unsyncedSnapshot: "received snapshot not synced", leasesCut: "leases cut short by a new leader",
}

// log returns what stands before a member's log, or nil for nothing.
func (mu mutant) log(m *member) consensus.Log {
	switch mu {
	case noSync:
		return lyingLog{m.log}
	case swapFirst:
		return &hastyLog{m.log, m}
	}
	return nil
}

// lyingLog says that it has synced and has not.
type lyingLog struct{ *raftlog.Log }

func (lyingLog) Sync() error { return nil }
func (lyingLog) Mark() error { return nil }

// hastyLog has a snapshot installed, and what was before it deleted, before the
// record that says so is written, and leaves it to the next sync to make that durable.
type hastyLog struct {
	*raftlog.Log
	m *member
}

func (l *hastyLog) Write(appends []raftlog.Append) (bool, error) {
	hasty := false
	for i := range appends {
		if s := appends[i].Snapshot; s != nil {
			hasty = true
			last := l.m.gen
			if err := l.m.Install(*s); err != nil {
				return false, err
			}
			if err := errors.Join(l.m.removeGeneration(last.dir), syncDir(l.m.fs, dataDir)); err != nil {
				return false, err
			}
		}
	}
	must, err := l.Log.Write(appends)
	return must && !hasty, err
}
