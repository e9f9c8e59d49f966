package leader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

// Hash is what a member answers to the question for a hash of its keys. Two
// members may be compared if their CompactRevision is the same.
type Hash struct {
	Hash                          uint32
	CompactRevision, HashRevision int64
	Revision                      int64 // the member's newest
}

// Standing is the newest revision and the compact revision of a member. A Hash
// may be one of before the last compaction.
type Standing struct{ Revision, CompactRevision int64 }

// Suspect is a member that differs, and why. Member 0 means that nobody knows
// which of them is wrong.
type Suspect struct {
	Member uint64
	Reason string
}

// CheckerOptions configure a Checker. All fields are required, but for those
// where a zero value is said to mean something.
type CheckerOptions struct {
	Self uint64
	// Peers are the other members, as of now.
	Peers func() []uint64
	// Leads says that this member leads and has applied the first entry of its term.
	Leads func() bool
	// Hash is this member's own at a revision, 0 for the newest, once it has done
	// the physical work of its last compaction. Ok is false if there is nothing
	// that could be compared, in an empty store.
	Hash func(ctx context.Context, revision int64) (h Hash, ok bool, err error)
	// Stands is how far this member has come.
	Stands func() Standing
	// Compactions are the hashes of the newest compactions, oldest first.
	Compactions func() []Hash
	// Ask asks a peer for its hash.
	Ask func(ctx context.Context, peer uint64, revision int64) (Hash, error)
	// Barrier returns once all that is committed now is applied here.
	Barrier func(ctx context.Context) error
	// Alarm says whether the alarm CORRUPT stands for a member, Raise raises it.
	Alarm func(member uint64) bool
	Raise func(ctx context.Context, member uint64) error

	// Every is the time between two comparisons of the whole store, CompactEvery
	// that between two looks at hashes of compactions. 0 is never.
	Every, CompactEvery time.Duration
	Clock               clock.Clock
	Logger              *slog.Logger
	// Checked is told of each comparison that came to an end, with at least one
	// other member: which of the two kinds, and how many members differ. Nil is not
	// told.
	Checked func(kind string, differ int)
}

// Checker compares hashes between the members, on the leader, and raises the
// alarm CORRUPT for one that differs. The alarm stops the whole cluster from
// taking writes, so it is raised only if rounds comparisons one after the other
// find the same.
type Checker struct {
	o CheckerOptions
	// seen is the revision of the newest compaction that all members agreed on, or
	// that was given up.
	seen int64
	// looked is how often that of revision lookedAt was asked for in vain.
	lookedAt int64
	looked   int
}

const (
	// rounds is how often a difference must be found, roundPause the time between.
	rounds     = 3
	roundPause = 5 * time.Second
	// askWithin bounds one comparison. A member of many gigabytes takes its time.
	askWithin = 10 * time.Minute
)

// The kinds of comparison, as metrics name them.
const (
	CheckStore      = "store"
	CheckCompaction = "compaction"
)

// NewChecker returns a Checker.
func NewChecker(o CheckerOptions) *Checker {
	if o.Checked == nil {
		o.Checked = func(string, int) {}
	}
	return &Checker{o: o}
}

// Run works until ctx ends.
func (c *Checker) Run(ctx context.Context) {
	never := make(chan time.Time)
	ticks := func(every time.Duration) (<-chan time.Time, func()) {
		if every <= 0 {
			return never, func() {}
		}
		t := c.o.Clock.NewTicker(every)
		return t.C(), t.Stop
	}
	whole, stop := ticks(c.o.Every)
	defer stop()
	compactions, stop := ticks(c.o.CompactEvery)
	defer stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return
		case <-whole:
			err = c.whole(ctx, CheckStore)
		case <-compactions:
			err = c.compactions(ctx)
		}
		if err != nil && ctx.Err() == nil {
			c.o.Logger.Info("comparing hashes with the other members did not come to an end, it is tried again", "error", err)
		}
	}
}

// whole compares the whole store, and acts on what it finds again and again.
func (c *Checker) whole(ctx context.Context, kind string) error {
	var (
		suspects []Suspect
		compared bool
	)
	for round := range rounds {
		if round > 0 && !c.pause(ctx) {
			return ctx.Err()
		}
		if !c.o.Leads() {
			return nil
		}
		found, some, err := c.round(ctx)
		if err != nil {
			return err
		}
		compared = some
		if round > 0 {
			found = slices.DeleteFunc(found, func(s Suspect) bool {
				return !slices.ContainsFunc(suspects, func(before Suspect) bool { return before.Member == s.Member })
			})
		}
		if suspects = found; len(suspects) == 0 {
			break
		}
		for _, s := range suspects {
			c.o.Logger.Warn("a member's keys seem to differ, the comparison is repeated", "member", fmt.Sprintf("%x", s.Member), "reason", s.Reason,
				"round", round+1, "rounds", rounds)
		}
	}
	if !compared {
		return nil
	}
	c.o.Checked(kind, len(suspects))
	var errs []error
	for _, s := range suspects {
		if c.o.Alarm(s.Member) || !c.o.Leads() {
			continue
		}
		c.o.Logger.Error("a member's keys differ from the others': alarm CORRUPT is raised; rebuild the member with `engram ctl rebuild`",
			"member", fmt.Sprintf("%x", s.Member), "reason", s.Reason)
		errs = append(errs, c.o.Raise(ctx, s.Member))
	}
	return errors.Join(errs...)
}

func (c *Checker) pause(ctx context.Context) bool {
	t := c.o.Clock.NewTimer(roundPause)
	defer t.Stop()
	select {
	case <-t.C():
		return true
	case <-ctx.Done():
		return false
	}
}

// round is one comparison of the whole store at the newest revision. Compared is
// false if no other member had anything to compare.
func (c *Checker) round(ctx context.Context) (suspects []Suspect, compared bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	own, ok, err := c.o.Hash(ctx, 0)
	if err != nil || !ok {
		return nil, false, err
	}
	told := c.ask(ctx, own.HashRevision)
	// What a peer had applied when it answered is applied here after this.
	if err := c.o.Barrier(ctx); err != nil {
		return nil, false, fmt.Errorf("waiting for what was committed: %w", err)
	}
	now, ok, err := c.o.Hash(ctx, own.HashRevision)
	switch {
	case err != nil || !ok:
		return nil, false, err // compacted meanwhile, most likely
	case now.CompactRevision != own.CompactRevision:
		own = now // those of the peers that are as far, or remember the same, are compared
	case now.Hash != own.Hash:
		return []Suspect{{c.o.Self, fmt.Sprintf("two hashes at revision %d: %08x and %08x", own.HashRevision, own.Hash, now.Hash)}}, true, nil
	}
	suspects, compared = judge(c.o.Self, len(c.o.Peers())+1, own, c.o.Stands(), told)
	return suspects, compared, nil
}

// ask asks all peers at the same time. Who does not answer is missing, as is one
// that has compacted the revision or does not have it yet.
func (c *Checker) ask(ctx context.Context, revision int64) map[uint64]Hash {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	told := map[uint64]Hash{}
	var mu sync.Mutex
	var asking sync.WaitGroup
	for _, id := range c.o.Peers() {
		asking.Go(func() {
			h, err := c.o.Ask(ctx, id, revision)
			if err != nil {
				c.o.Logger.Info("a member has no hash to compare", "member", fmt.Sprintf("%x", id), "revision", revision, "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			told[id] = h
		})
	}
	asking.Wait()
	return told
}

// judge finds whom to suspect, and says whether there was anything to go by. Own
// is this member's hash at the revision that was asked for, now where it stands
// after all that they had applied is applied here. A member that is ahead of its
// leader has what nobody else has. Of those that can be compared the majority of
// the cluster is right.
func judge(self uint64, members int, own Hash, now Standing, told map[uint64]Hash) (suspects []Suspect, compared bool) {
	same := map[uint32][]uint64{own.Hash: {self}}
	for id, h := range told {
		switch {
		case h.Revision > now.Revision:
			suspects = append(suspects, Suspect{id, fmt.Sprintf("it is at revision %d, the leader at %d", h.Revision, now.Revision)})
		case h.CompactRevision > now.CompactRevision:
			suspects = append(suspects, Suspect{id, fmt.Sprintf("it is compacted at revision %d, the leader at %d", h.CompactRevision, now.CompactRevision)})
		case h.CompactRevision == own.CompactRevision && h.HashRevision == own.HashRevision:
			same[h.Hash] = append(same[h.Hash], id)
			compared = true
		}
	}
	compared = compared || len(suspects) > 0
	suspects = append(suspects, minority(same, own, members)...)
	slices.SortFunc(suspects, func(a, b Suspect) int {
		if a.Member < b.Member {
			return -1
		}
		return 1
	})
	return suspects, compared
}

// minority is who has another hash than a majority of all members, or member 0 if
// none of the hashes has one.
func minority(same map[uint32][]uint64, at Hash, members int) []Suspect {
	if len(same) < 2 {
		return nil
	}
	var right uint32
	found := false
	for hash, ids := range same {
		if len(ids) > members/2 {
			right, found = hash, true
		}
	}
	if !found {
		return []Suspect{{0, fmt.Sprintf("at revision %d, compacted at %d, the members have %d different hashes and none of them a majority: %s", at.HashRevision, at.CompactRevision, len(same), listed(same))}}
	}
	var out []Suspect
	for hash, ids := range same {
		if hash == right {
			continue
		}
		for _, id := range ids {
			out = append(out, Suspect{id, fmt.Sprintf("its hash at revision %d, compacted at %d, is %08x, that of the majority is %08x", at.HashRevision, at.CompactRevision, hash, right)})
		}
	}
	return out
}

func listed(same map[uint32][]uint64) string {
	var out []string
	for hash, ids := range same {
		for _, id := range ids {
			out = append(out, fmt.Sprintf("%x has %08x", id, hash))
		}
	}
	slices.Sort(out)
	return fmt.Sprint(out)
}

// maxLooks is how often a compaction is asked for. A peer that has started since
// does not remember it, and would read its whole store for nothing each time.
const maxLooks = 3

// giveUp forgets about the newest compaction when it was asked for often enough.
func (c *Checker) giveUp(hashes []Hash) {
	if len(hashes) == 0 {
		return
	}
	newest := hashes[len(hashes)-1].HashRevision
	if c.lookedAt != newest {
		c.lookedAt, c.looked = newest, 0
	}
	if c.looked++; c.looked >= maxLooks {
		c.seen = max(c.seen, newest)
	}
}

// compactions compares what compactions found before they deleted it, the newest
// first, down to one that all members agreed on. Such hashes cost nothing, and
// are of what may be gone by now: a difference is followed by a comparison of the
// whole store, which alone is acted on.
func (c *Checker) compactions(ctx context.Context) error {
	if !c.o.Leads() {
		return nil
	}
	peers := len(c.o.Peers())
	hashes := c.o.Compactions()
	for i := len(hashes) - 1; i >= 0 && peers > 0; i-- {
		h := hashes[i]
		if h.HashRevision <= c.seen {
			return nil
		}
		told := c.ask(ctx, h.HashRevision)
		same := map[uint32][]uint64{h.Hash: {c.o.Self}}
		compared := 0
		for id, answer := range told {
			if answer.CompactRevision == h.CompactRevision && answer.HashRevision == h.HashRevision {
				compared++
				same[answer.Hash] = append(same[answer.Hash], id)
			}
		}
		if len(same) > 1 {
			c.o.Logger.Warn("members found different things in a compaction, the whole store is compared", "revision", h.HashRevision, "hashes", listed(same))
			err := c.whole(ctx, CheckCompaction)
			if err == nil {
				c.seen = h.HashRevision
			}
			return err
		}
		if compared == peers {
			c.seen = h.HashRevision
			c.o.Checked(CheckCompaction, 0)
			return nil
		}
	}
	c.giveUp(hashes)
	return nil
}
