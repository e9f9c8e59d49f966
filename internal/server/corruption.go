package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/leader"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/rpc"
)

// ErrDiffers says that this member's keys are not those of the others.
var ErrDiffers = errors.New("server: this member's keys differ from those of other members")

const (
	// hashBytesPerSecond is how fast a store is read to be compared while it serves.
	hashBytesPerSecond = 128 << 20
	// Before it serves a member reads no more than initialHashBytes for the
	// comparison, unless the gate was turned on by name: else it is made beside
	// the first calls.
	initialHashBytes = 512 << 20
	// A difference at the start must be found so often, with this time between.
	initialRounds = 3
	initialPause  = time.Second
	// initialWithin bounds the whole comparison.
	initialWithin = 10 * time.Minute
)

// checkMetrics count comparisons of hashes.
type checkMetrics struct{ checks *prometheus.CounterVec }

func newCheckMetrics() *checkMetrics {
	c := &checkMetrics{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "engram_hash_checks_total", Help: "Comparisons of hashes with other members that came to an end, by what was compared (compaction, initial, store) and result (equal, different).",
	}, []string{"kind", "result"})}
	for _, kind := range []string{leader.CheckCompaction, leader.CheckStore, checkInitial} {
		for _, result := range []string{"equal", "different"} {
			c.checks.WithLabelValues(kind, result)
		}
	}
	return c
}

const checkInitial = "initial"

func (c *checkMetrics) checked(kind string, differ int) {
	result := "equal"
	if differ > 0 {
		result = "different"
	}
	c.checks.WithLabelValues(kind, result).Inc()
}

// newChecker compares hashes while this member leads.
func (m *Member) newChecker() *leader.Checker {
	every := m.cfg.CompactHashCheckTime
	if !m.cfg.FeatureGates.On("CompactHashCheck") {
		every = 0
	}
	return leader.NewChecker(leader.CheckerOptions{
		Self: m.id.member, Leads: m.leading.Load, Peers: m.otherMembers, Barrier: m.caughtUp,
		Hash: func(ctx context.Context, revision int64) (leader.Hash, bool, error) {
			return m.settledHash(ctx, revision)
		},
		Stands: m.stands,
		Compactions: func() []leader.Hash {
			var out []leader.Hash
			for _, h := range m.machine().Keys().CompactionHashes() {
				out = append(out, leader.Hash(h))
			}
			return out
		},
		Ask: m.askHash,
		Alarm: func(id uint64) bool {
			for _, a := range m.Alarms() {
				if a.MemberID == id && a.Alarm == pb.AlarmType_CORRUPT {
					return true
				}
			}
			return false
		},
		Raise: func(ctx context.Context, id uint64) error {
			return m.proposeAndWait(ctx, command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: id, Alarm: pb.AlarmType_CORRUPT})
		},
		Every: m.cfg.CorruptCheckTime, CompactEvery: every, Clock: m.clock, Logger: m.log, Checked: m.timed.check.checked,
	})
}

// stands is how far this member has come.
func (m *Member) stands() leader.Standing {
	root := m.machine().Root()
	return leader.Standing{Revision: root.Revision(), CompactRevision: root.CompactRevision()}
}

// otherMembers are the IDs of all members but this one.
func (m *Member) otherMembers() []uint64 {
	var out []uint64
	for _, other := range m.root().List() {
		if other.ID != m.id.member {
			out = append(out, other.ID)
		}
	}
	return out
}

// askHash asks another member for its hash.
func (m *Member) askHash(ctx context.Context, id uint64, revision int64) (leader.Hash, error) {
	other := m.root().Member(id)
	if other == nil {
		return leader.Hash{}, fmt.Errorf("member %x has left", id)
	}
	h, err := m.client.HashKV(ctx, other.PeerURLs, revision)
	return leader.Hash{Hash: h.Hash, CompactRevision: h.CompactRevision, HashRevision: h.HashRevision, Revision: h.Revision}, err
}

// settledHash is this member's hash once the last compaction has deleted what it
// frees. Of a store without a live key, etcd's hash depends on how far that is,
// so there is none to compare.
func (m *Member) settledHash(ctx context.Context, revision int64) (h leader.Hash, ok bool, err error) {
	g := m.hold()
	defer g.release()
	keys := g.machine.Keys()
	select {
	case <-keys.CompactionDone(g.machine.Root().CompactRevision()):
	case <-ctx.Done():
		return h, false, fmt.Errorf("waiting for the compaction at revision %d: %w", g.machine.Root().CompactRevision(), ctx.Err())
	}
	root := g.machine.Root()
	if root.Keys() == 0 {
		return h, false, nil
	}
	hash, err := keys.HashKVPaced(ctx, root, revision, m.paceHash(ctx))
	return leader.Hash(hash), err == nil, err
}

// pacedHashKV is HashKV for other members, who are in no hurry.
func (m *Member) pacedHashKV(ctx context.Context, revision int64) (rpc.HashKV, error) {
	pace, end := m.hashingForPeers.turn(ctx, m.paceHash(ctx))
	defer end()
	g := m.hold()
	defer g.release()
	h, err := g.machine.Keys().HashKVPaced(ctx, g.machine.Root(), revision, pace)
	return rpc.HashKV(h), err
}

// paceHash lets hashBytesPerSecond pass, from its first call on.
func (m *Member) paceHash(ctx context.Context) func(bytes int) error {
	var begun time.Time
	read := int64(0)
	return func(bytes int) error {
		if read += int64(bytes); begun.IsZero() {
			begun = m.clock.Now()
		}
		ahead := time.Duration(float64(read)/hashBytesPerSecond*float64(time.Second)) - m.clock.Now().Sub(begun)
		if ahead <= 0 {
			return ctx.Err()
		}
		t := m.clock.NewTimer(ahead)
		defer t.Stop()
		select {
		case <-t.C():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// checkAtStart compares this member's keys with those of the others, if it has
// any, before it serves; a large store beside the first calls. It must come before
// anything is applied that the disk did not hold.
func (m *Member) checkAtStart(ctx context.Context) (beside func(context.Context) error, err error) {
	none := func(context.Context) error { return nil }
	root := m.machine().Root()
	if !m.cfg.FeatureGates.On("InitialCorruptCheck") || root.Keys() == 0 || len(m.otherMembers()) == 0 {
		return none, nil
	}
	if root.UsageBytes() > cmp.Or(m.seams.InitialHashBytes, initialHashBytes) && !m.cfg.FeatureGates["InitialCorruptCheck"] {
		// Calls compact meanwhile, and want the disk for themselves.
		return func(ctx context.Context) error { return m.checkInitially(ctx, m.settledHash) }, nil
	}
	return none, m.checkInitially(ctx, m.hash)
}

// hash is this member's hash, without waiting for a compaction or for anybody's reads.
func (m *Member) hash(ctx context.Context, revision int64) (leader.Hash, bool, error) {
	g := m.hold()
	defer g.release()
	h, err := g.machine.Keys().HashKV(ctx, g.machine.Root(), revision)
	return leader.Hash(h), err == nil, err
}

// ownHash is hash or settledHash.
type ownHash func(ctx context.Context, revision int64) (h leader.Hash, ok bool, err error)

// checkInitially fails with ErrDiffers if as many other members differ as agree,
// this one counted among those that agree. Who does not answer, or cannot be
// compared with, is of no account.
func (m *Member) checkInitially(ctx context.Context, hash ownHash) error {
	ctx, cancel := context.WithTimeout(ctx, initialWithin)
	defer cancel()
	for round := 1; ; round++ {
		differ, agree, err := m.compareOnce(ctx, hash)
		if err != nil {
			m.log.Info("keys could not be compared with those of other members", "error", err)
			return nil
		}
		if len(differ) == 0 || len(differ) < agree {
			for _, d := range differ {
				m.log.Error("another member's keys differ, and the majority has those of this one", "difference", d)
			}
			if agree == 1 {
				m.log.Info("no other member had keys to compare with those of this one")
				return nil
			}
			m.timed.check.checked(checkInitial, 0)
			m.log.Info("keys are those of the other members", "compared", agree-1)
			return nil
		}
		if round == initialRounds {
			m.timed.check.checked(checkInitial, len(differ))
			return fmt.Errorf("%w: %s: rebuild this member with `engram ctl rebuild`, or, if it is the others that are wrong, start it with --feature-gates=InitialCorruptCheck=false",
				ErrDiffers, strings.Join(differ, "; "))
		}
		m.log.Warn("keys seem to differ from those of other members, the comparison is repeated", "differences", differ, "round", round, "rounds", initialRounds)
		t := m.clock.NewTimer(initialPause)
		select {
		case <-t.C():
		case <-ctx.Done():
			t.Stop()
			return nil
		}
	}
}

// askServing is askHash of a member that serves already. One that starts at the
// same time takes connections and is silent, while it asks this one.
func (m *Member) askServing(ctx context.Context, id uint64, revision int64) (leader.Hash, error) {
	if other := m.root().Member(id); other != nil {
		first, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		if _, err := m.client.Version(first, other.PeerURLs); err != nil {
			return leader.Hash{}, err
		}
	}
	return m.askHash(ctx, id, revision)
}

// compareOnce says which members differ, and how many agree, this one included.
func (m *Member) compareOnce(ctx context.Context, hash ownHash) (differ []string, agree int, err error) {
	own, ok, err := hash(ctx, 0)
	if err != nil {
		return nil, 0, err
	}
	agree = 1
	if !ok { // nothing to compare
		return nil, agree, nil
	}
	type answer struct {
		id   uint64
		hash leader.Hash
		err  error
	}
	others := m.otherMembers()
	answers := make(chan answer, len(others))
	for _, id := range others {
		go func() {
			h, err := m.askServing(ctx, id, own.HashRevision)
			answers <- answer{id, h, err}
		}()
	}
	for range others {
		a := <-answers
		switch {
		case errors.Is(a.err, peer.ErrFutureRevision), errors.Is(a.err, peer.ErrCompacted):
		case a.err != nil:
			m.log.Info("a member has no hash to compare", "member", fmt.Sprintf("%x", a.id), "error", a.err)
		case a.hash.CompactRevision != own.CompactRevision || a.hash.HashRevision != own.HashRevision:
		case a.hash.Hash == own.Hash:
			agree++
		default:
			differ = append(differ, fmt.Sprintf("at revision %d, compacted at %d, the hash of member %x is %08x, that of this one is %08x",
				own.HashRevision, own.CompactRevision, a.id, a.hash.Hash, own.Hash))
		}
	}
	return differ, agree, nil
}
