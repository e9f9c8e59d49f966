package consensus

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

// Options say what a Node or Core works with. Zero values get the defaults named here.
type Options struct {
	// ID is this member's raft ID; Log and Machine hold its state. Required.
	ID      uint64
	Log     Log
	Machine Machine
	// IDs names read rounds. Required; shared with whoever names requests, so that no two things bear the same name.
	IDs *IDs

	// Transport reaches the other members; nil for a member that is alone.
	Transport Transport
	// Clock is the time Node runs by; nil is the real one. Core does not use it.
	Clock clock.Clock
	// Logger receives what an operator should know, raft's own lines included; nil discards.
	Logger *slog.Logger
	// Metrics are kept up to date if not nil.
	Metrics *Metrics
	// Listener hears rare happenings. It is called from the raft goroutine and must not block.
	Listener func(Event)

	// Discard is given results that carry a Reply nobody here waits for (any more), on the raft goroutine. It must not block.
	// Nil drops them.
	Discard func(Result)

	// Tick is raft's unit of time (100 ms); elections take ElectionTicks (10) of them, heartbeats come every HeartbeatTicks (1).
	Tick           time.Duration
	ElectionTicks  int
	HeartbeatTicks int
	// NoPreVote lets elections begin without asking first.
	NoPreVote bool
	// NoTickAdvance makes a member of a cluster wait out its whole first election time-out even when peers are connected.
	NoTickAdvance bool

	// MaxMessageBytes bounds one append message (1 MiB), MaxInflight and MaxInflightBytes what is on its way to one peer
	// (512, 64 MiB), MaxForwardBytes one message of proposals for the leader (256 KiB), MaxProposeBytes one batch of the leader's
	// own (4 MiB).
	MaxMessageBytes  uint64
	MaxInflight      int
	MaxInflightBytes uint64
	MaxForwardBytes  int
	MaxProposeBytes  int
	// MaxUncommittedBytes bounds the leader's log tail that has no quorum yet (256 MiB), MaxApplyBytes the committed entries
	// handed to the machine and not yet applied (8 MiB).
	MaxUncommittedBytes uint64
	MaxApplyBytes       uint64
	// MaxPending and MaxPendingBytes bound the proposals of this member that have no answer yet (16384, 64 MiB), MaxReads the
	// reads (65536), MaxReceived and MaxReceivedBytes the messages of peers waiting for the loop (4096, 64 MiB).
	MaxPending       int
	MaxPendingBytes  int64
	MaxReads         int
	MaxReceived      int
	MaxReceivedBytes int64
	// MaxBacklog is how many committed entries may wait to be applied before proposals are refused (50,000: more than a second's, as
	// the 5,000 of real members are at their rate; fewer are passed in any hiccup of a follower's disk). They wait in the log.
	MaxBacklog uint64

	// RequestTimeout ends a proposal or read without answer (5 s and two election time-outs). ReadRetry is after how long
	// an unanswered read round is asked again (500 ms).
	RequestTimeout time.Duration
	ReadRetry      time.Duration

	// Gate is asked before proposals, and appends of a leader, are taken: its error refuses them with the reason, and nothing
	// reaches the log. It is called often and must be cheap. Nil lets everything pass.
	Gate func() error
	// Pass is asked of each proposal while Gate is shut, whose data it may look at: nil lets it pass all the same, as what frees
	// space must while there is room for it. Its error is the reason. Nil lets none pass.
	Pass func(data []byte) error
	// LastGate is asked before appends of a leader are taken while Gate is shut. It stays open for as long as Pass may let anything
	// pass: what frees space may stand behind what was taken before the gate shut, so they pass whatever they hold. An empty entry,
	// with which a leader begins, is not asked for. Nil is Gate.
	LastGate func() error

	// DurableApplied returns the last index the machine has made durable: the log may be cut below it. Called once a tick. Nil
	// means that all applied entries are durable.
	DurableApplied func() uint64
	// StartFlush asks the machine to make durable what it has applied, in the background. Called again only after
	// DurableApplied has moved or FlushAge has passed. Nil is never asked.
	StartFlush func()
	// A flush is asked for when the log beyond DurableApplied has grown to FlushLogBytes (256 MiB), or its oldest part is older
	// than FlushAge (5 min).
	FlushLogBytes int64
	FlushAge      time.Duration
	// The log keeps CatchUpEntries (5000) applied entries, or as many of them as fit in CatchUpBytes (256 MiB), for peers that
	// come back. For a follower that is there it keeps what that one lacks, as long as it fits in CatchUpBytes.
	CatchUpEntries uint64
	CatchUpBytes   int64
	// SlowDisk is how long a leader's own log may take to store an entry (500 ms). One that takes longer, again and again, hands
	// leadership to a voter that is at least 8 times faster, at most once a minute. A negative value turns that off.
	SlowDisk time.Duration
}

// withDefaults fills what is zero and reports everything that cannot work.
func (o Options) withDefaults() (Options, error) {
	o.Tick = cmp.Or(o.Tick, 100*time.Millisecond)
	o.ElectionTicks = cmp.Or(o.ElectionTicks, 10)
	o.HeartbeatTicks = cmp.Or(o.HeartbeatTicks, 1)
	o.MaxMessageBytes = cmp.Or(o.MaxMessageBytes, 1<<20)
	o.MaxInflight = cmp.Or(o.MaxInflight, 512)
	o.MaxInflightBytes = cmp.Or(o.MaxInflightBytes, 64<<20)
	o.MaxForwardBytes = cmp.Or(o.MaxForwardBytes, 256<<10)
	o.MaxProposeBytes = cmp.Or(o.MaxProposeBytes, 4<<20)
	o.MaxUncommittedBytes = cmp.Or(o.MaxUncommittedBytes, 256<<20)
	o.MaxApplyBytes = cmp.Or(o.MaxApplyBytes, 8<<20)
	o.MaxPending = cmp.Or(o.MaxPending, 16384)
	o.MaxPendingBytes = cmp.Or(o.MaxPendingBytes, 64<<20)
	o.MaxReads = cmp.Or(o.MaxReads, 65536)
	o.MaxReceived = cmp.Or(o.MaxReceived, 4096)
	o.MaxReceivedBytes = cmp.Or(o.MaxReceivedBytes, 64<<20)
	o.MaxBacklog = cmp.Or(o.MaxBacklog, 50_000)
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 5*time.Second+2*o.electionTimeout())
	o.ReadRetry = cmp.Or(o.ReadRetry, 500*time.Millisecond)
	o.FlushLogBytes = cmp.Or(o.FlushLogBytes, 256<<20)
	o.FlushAge = cmp.Or(o.FlushAge, 5*time.Minute)
	o.CatchUpEntries = cmp.Or(o.CatchUpEntries, 5000)
	o.CatchUpBytes = cmp.Or(o.CatchUpBytes, 256<<20)
	o.SlowDisk = cmp.Or(o.SlowDisk, 500*time.Millisecond)
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	if o.Listener == nil {
		o.Listener = func(Event) {}
	}
	if o.Gate == nil {
		o.Gate = func() error { return nil }
	}
	if o.Pass == nil {
		o.Pass = func([]byte) error { return o.Gate() }
	}
	if o.LastGate == nil {
		o.LastGate = o.Gate
	}
	if o.StartFlush == nil {
		o.StartFlush = func() {}
	}

	var errs []error
	need := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("consensus: "+format, args...))
		}
	}
	need(o.ID != 0, "Options.ID is 0: give the member's id")
	need(o.Log != nil, "Options.Log is nil: open the raft log first")
	need(o.Machine != nil, "Options.Machine is nil: open the machine first")
	need(o.IDs != nil, "Options.IDs is nil: make one with NewIDs")
	need(o.Tick > 0, "Options.Tick is %v: must be positive", o.Tick)
	need(o.HeartbeatTicks > 0, "Options.HeartbeatTicks is %d: must be positive", o.HeartbeatTicks)
	need(o.ElectionTicks > o.HeartbeatTicks, "Options.ElectionTicks is %d: must be above HeartbeatTicks, %d", o.ElectionTicks, o.HeartbeatTicks)
	need(o.MaxInflight > 0, "Options.MaxInflight is %d: must be positive", o.MaxInflight)
	need(o.MaxInflightBytes >= o.MaxMessageBytes, "Options.MaxInflightBytes is %d: must be at least MaxMessageBytes, %d",
		o.MaxInflightBytes, o.MaxMessageBytes)
	need(o.RequestTimeout > 0, "Options.RequestTimeout is %v: must be positive", o.RequestTimeout)
	return o, errors.Join(errs...)
}

// electionTimeout is the shortest time without a leader's word after which a member stands for election.
func (o *Options) electionTimeout() time.Duration {
	return time.Duration(o.ElectionTicks) * o.Tick
}
