package consensus

import (
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

// Founder is one member of a cluster at its birth.
type Founder struct {
	ID uint64
	// Context is the member as JSON, byte for byte what every founder writes: the entries are born committed, so founders
	// that disagree would diverge silently.
	Context []byte
}

// Founded tells whether the log has seen the birth of its cluster: Bootstrap ended, and no crash tore what it wrote. The commit
// index comes last in that write, so it tells; a log with entries and no commit index would never have a leader.
func Founded(l Log) (bool, error) {
	hs, _, err := l.InitialState()
	if err != nil {
		return false, fmt.Errorf("consensus: hard state of the log: %w", err)
	}
	return hs.GetCommit() > 0, nil
}

// Bootstrap writes the first entries of a new cluster into a log that is not Founded and syncs them: at term 1 one conf change for each
// founder, in ascending order of ID, all committed. Every founder does the same on its own log.
func Bootstrap(l Log, founders []Founder) error {
	if len(founders) == 0 {
		return errors.New("consensus: bootstrap without founders: a cluster begins with at least one member")
	}
	if done, err := Founded(l); err != nil {
		return err
	} else if done {
		last, err := l.LastIndex()
		return errors.Join(err, fmt.Errorf("consensus: bootstrap of a log that ends at index %d: only one without a whole first write can be bootstrapped", last))
	}
	founders = slices.Clone(founders)
	slices.SortFunc(founders, func(a, b Founder) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	entries := make([]*raftpb.Entry, len(founders))
	for i, f := range founders {
		if f.ID == 0 || i > 0 && f.ID == founders[i-1].ID {
			return fmt.Errorf("consensus: bootstrap with member id %x: ids must be distinct and not 0", f.ID)
		}
		cc := &raftpb.ConfChange{Type: raftpb.ConfChangeAddNode.Enum(), NodeId: new(f.ID), Context: f.Context}
		data, err := proto.Marshal(cc)
		if err != nil {
			return fmt.Errorf("consensus: encoding founder %x: %w", f.ID, err)
		}
		entries[i] = &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Term: new(uint64(1)), Index: new(uint64(i + 1)), Data: data}
	}
	hs := &raftpb.HardState{Term: new(uint64(1)), Commit: new(uint64(len(entries)))}
	if _, err := l.Write([]raftlog.Append{{Entries: entries, HardState: hs}}); err != nil {
		return fmt.Errorf("consensus: writing the first entries: %w", err)
	}
	return l.Sync()
}
