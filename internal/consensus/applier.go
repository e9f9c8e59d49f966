package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// Applied is what the applier reports: the entries it was given, and one result for each.
type Applied struct {
	Entries []*raftpb.Entry
	Results []Result
}

// Applier runs committed entries on the machine. Not safe for concurrent use.
type Applier struct{ m Machine }

// NewApplier returns the applier of m.
func NewApplier(m Machine) *Applier { return &Applier{m} }

// Step applies all entries, of which only the last may be a conf change. An error means that the machine's disk failed and
// the member must stop: what was applied of the entries is unknown.
func (a *Applier) Step(entries []*raftpb.Entry) (Applied, error) {
	done := Applied{Entries: entries}
	for n := 0; n < len(entries); n = len(done.Results) {
		results, err := a.m.Apply(entries[n:])
		if err != nil {
			return Applied{}, fmt.Errorf("consensus: applying entries %d to %d: %w", entries[n].GetIndex(), entries[len(entries)-1].GetIndex(), err)
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
