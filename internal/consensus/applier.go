package consensus

import (
	"fmt"
	"sync"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

// Applied is what the applier reports: the entries it was given, and one result for each but the first Covered ones, which a
// snapshot installed meanwhile made superfluous.
type Applied struct {
	Entries []*raftpb.Entry
	Covered int
	Results []Result
}

// Applier runs committed entries on the machine, or puts a snapshot in place of them: one at a time. Step is called from one
// goroutine, and only install may run beside it.
type Applier struct {
	mu    sync.Mutex // held while the machine changes
	m     Machine
	floor uint64 // index of the snapshot installed last

	failed error // of an earlier step: there are no others after it
}

// NewApplier returns the applier of m.
func NewApplier(m Machine) *Applier { return &Applier{m: m} }

// Step applies all entries that no snapshot covers, of which only the last may be a conf change. An error means that the machine's
// disk failed and the member must stop: what was applied of the entries is unknown. It is that of all later steps, too.
func (a *Applier) Step(entries []*raftpb.Entry) (Applied, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed != nil {
		return Applied{}, a.failed
	}
	done := Applied{Entries: entries}
	for done.Covered < len(entries) && entries[done.Covered].GetIndex() <= a.floor {
		done.Covered++
	}
	entries = entries[done.Covered:]
	for n := 0; n < len(entries); n = len(done.Results) {
		results, err := a.m.Apply(entries[n:])
		if err != nil {
			a.failed = fmt.Errorf("consensus: applying entries %d to %d: %w", entries[n].GetIndex(), entries[len(entries)-1].GetIndex(), err)
			return Applied{}, a.failed
		}
		if len(results) == 0 || len(results) > len(entries)-n {
			panic(fmt.Sprintf("consensus: the machine answered %d results for %d entries from index %d",
				len(results), len(entries)-n, entries[n].GetIndex()))
		}
		if done.Results == nil {
			done.Results = results
		} else {
			done.Results = append(done.Results, results...)
		}
	}
	return done, nil
}

// install waits for a Step under way and has the machine become s. Called by the log writer once the log says so durably.
func (a *Applier) install(s raftlog.Snapshot) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.m.Install(s); err != nil {
		return fmt.Errorf("consensus: installing the snapshot of index %d from %s: %w", s.Index, s.Dir, err)
	}
	if err := fits(s, a.m); err != nil {
		return err
	}
	a.floor = s.Index
	return nil
}

// fits checks that the machine is exactly what the snapshot says.
func fits(s raftlog.Snapshot, m Machine) error {
	if index, term := m.Applied(); index != s.Index || term != s.Term {
		return fmt.Errorf("%w: the snapshot in %s is of index %d and term %d, the store in it has applied index %d of term %d",
			ErrStoreMismatch, s.Dir, s.Index, s.Term, index, term)
	}
	if cs := m.ConfState(); s.ConfState.Equivalent(cs) != nil {
		return fmt.Errorf("%w: the snapshot in %s has voters %x and learners %x, the store in it voters %x and learners %x",
			ErrStoreMismatch, s.Dir, s.ConfState.GetVoters(), s.ConfState.GetLearners(), cs.GetVoters(), cs.GetLearners())
	}
	return nil
}
