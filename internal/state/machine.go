// Package state runs commands in the order that consensus gives them.
//
// It is deterministic: no clock, no chance, no network. The same entries give
// the same keys, tables and results on every member, however they are cut into
// batches and wherever a restart falls. It does not know raft beyond the
// entries, nor gRPC. Machine is the main type. Invariants:
//
//	M1: applying a batch of entries is one storage.Batch that holds their
//	    effects, the new revision and the applied index together.
//	M2: order of publication: the commit; one atomic pointer to the new moment;
//	    the events; then the results go back to the caller.
//	M3: an entry's error is a result and leaves no effect (but for OverQuota,
//	    where the effect stays and the error is the answer).
//	M4: a batch ends at a membership entry.
//	M5: readers take no lock that Apply holds; they see whole moments.
//	M6: after a batch that failed, memory holds half of it. Nothing goes on from
//	    there: readers keep the moment before it, and no file is written.
//
// DESIGN.md tells why, and names the roads not taken.
package state

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/alarm"
	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/storage"
)

// The errors of requests that belong to no single table.
var (
	// ErrKeyNotFound: ignore_value or ignore_lease on a key that is not there.
	ErrKeyNotFound = errors.New("state: key not found")
	// ErrNoSpace: the NOSPACE alarm is on, or the quota was exceeded by this
	// very request, which then was made all the same.
	ErrNoSpace = errors.New("state: database space exceeded")
	// ErrCorrupt: the CORRUPT alarm is on.
	ErrCorrupt = errors.New("state: corrupt cluster")
)

// Publisher receives what was committed.
type Publisher interface {
	// Publish is called by the applier after each batch, in revision order. It
	// must not block. The events are immutable and may be kept.
	Publish(root mvcc.Root, events []mvcc.Event)
}

// Options configure a Machine. Storage is required.
type Options struct {
	Storage *storage.Store
	// MVCC configures the keys; its Storage field is set here.
	MVCC mvcc.Options
	// MinLeaseTTL is the lowest lease TTL in seconds (state-machine.md, section 0).
	MinLeaseTTL int64
	MaxLearners int
	// Version is etcd's version that this member is compatible with; a cluster
	// version beyond it stops the member.
	Version string
	// QuotaBytes is the usage at which requests that take space get ErrNoSpace;
	// 0 means none. Usage is a function of the log, so every member agrees.
	QuotaBytes int64
	// Wanted says whether somebody here waits for the request with that ID.
	// What only an answer needs is left out for the others. Nil means always.
	Wanted func(id uint64) bool
	// Tokens takes the simple tokens that entries make and void. They are no part
	// of the state: nothing that is applied depends on them. Nil means that nobody
	// asks for them.
	Tokens *auth.Tokens
	// Publisher may be nil.
	Publisher Publisher
	Logger    *slog.Logger
}

// Machine is the replicated state of one member. Apply, CompactStep and Close
// exclude each other; everything else may be called by anyone at any time.
type Machine struct {
	o       Options
	store   *storage.Store
	kv      *mvcc.Store
	leases  *lease.Table
	auth    *auth.Table
	members *member.Table
	alarms  *alarm.Table

	mu      sync.Mutex // held while the state changes
	failed  error      // of Apply, final
	applied uint64
	term    uint64
	cmd     command.Command

	now atomic.Pointer[moment]

	puts, deletes, txns, putBytes atomic.Int64
}

// Counts is how much the machine has done since it was opened.
type Counts struct {
	// Puts and Deletes are keys written and removed, Txns the entries that did
	// so; PutBytes is the size of the puts' keys and values.
	Puts, Deletes, Txns, PutBytes int64
}

// Counts returns what was done so far.
func (m *Machine) Counts() Counts {
	return Counts{m.puts.Load(), m.deletes.Load(), m.txns.Load(), m.putBytes.Load()}
}

// moment is what readers pin: everything that a batch published, at once.
type moment struct {
	kv            mvcc.Root
	auth          *auth.Root
	members       *member.Root
	alarms        *alarm.Root
	applied, term uint64
}

// Open reads the state that o.Storage holds.
func Open(o Options) (*Machine, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Tokens == nil {
		o.Tokens = auth.NewTokens(0, time.Now)
	}
	m := &Machine{o: o, store: o.Storage}
	var err error
	if m.leases, err = lease.Open(o.Storage, lease.Options{MinTTL: o.MinLeaseTTL}); err != nil {
		return nil, fmt.Errorf("state: leases: %w", err)
	}
	if m.auth, err = auth.Open(o.Storage); err != nil {
		return nil, fmt.Errorf("state: auth: %w", err)
	}
	if m.members, err = member.Open(o.Storage, member.Options{MaxLearners: o.MaxLearners, Version: o.Version}); err != nil {
		return nil, fmt.Errorf("state: members: %w", err)
	}
	if m.alarms, err = alarm.Open(o.Storage); err != nil {
		return nil, fmt.Errorf("state: alarms: %w", err)
	}
	o.MVCC.Storage = o.Storage
	if o.MVCC.Logger == nil {
		o.MVCC.Logger = o.Logger
	}
	if m.kv, err = mvcc.Open(o.MVCC); err != nil {
		return nil, fmt.Errorf("state: keys: %w", err)
	}
	m.applied, m.term = m.kv.Applied()
	m.kv.Leases(func(id int64, key []byte) {
		if !m.leases.Exists(id) {
			o.Logger.Warn("key is attached to a lease that does not exist", "lease", id, "key", string(key))
			return
		}
		m.leases.Attach(id, key)
	})
	m.publish(m.kv.Root())
	return m, nil
}

// Close writes what makes the next start fast, unless Apply has failed. The store
// stays open.
func (m *Machine) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed != nil {
		m.kv.Abandon()
		return nil
	}
	return m.kv.Close()
}

// Abandon ends what runs in the background and writes nothing: another machine
// has taken this one's place. The store stays open.
func (m *Machine) Abandon() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.kv.Abandon()
}

// Snapshot is the whole state after one entry, as it lies in the store.
type Snapshot struct {
	Store         *storage.Snapshot
	Applied, Term uint64
	Members       *member.Root
}

// Snapshot pins the state of the last batch. It waits for the batch at hand, and
// the store keeps what it deletes from then on until the caller closes
// Snapshot.Store.
func (m *Machine) Snapshot() Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now.Load()
	return Snapshot{Store: m.store.Snapshot(), Applied: now.applied, Term: now.term, Members: now.members}
}

// Checkpoint makes what Open reads in two directories that do not exist, on the
// same file system: the state of a moment between call and return, durable, out
// of hard links. Apply goes on meanwhile. The error is the disk's, or that of the
// Apply that failed.
func (m *Machine) Checkpoint(storeDir, indexDir string) error {
	if err := m.prepareCheckpoint(); err != nil {
		return err
	}
	return m.kv.Checkpoint(storeDir, indexDir)
}

func (m *Machine) prepareCheckpoint() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed != nil {
		return m.failed
	}
	m.kv.PrepareCheckpoint()
	return nil
}

// Applied returns index and term of the last entry applied, 0 and 0 if none.
func (m *Machine) Applied() (index, term uint64) {
	now := m.now.Load()
	return now.applied, now.term
}

// ConfState returns the voters and learners after the last entry applied. As in
// etcd 3.7 it comes from the member table, which changes in the same batch as
// the applied index; so it cannot be of another moment.
func (m *Machine) ConfState() *raftpb.ConfState {
	return ConfStateOf(m.now.Load().members)
}

// ConfStateOf is what raft is to know of a membership.
func ConfStateOf(members *member.Root) *raftpb.ConfState {
	cs := &raftpb.ConfState{AutoLeave: new(bool)}
	for _, mem := range members.List() {
		if mem.IsLearner {
			cs.Learners = append(cs.Learners, mem.ID)
		} else {
			cs.Voters = append(cs.Voters, mem.ID)
		}
	}
	return cs
}

// Apply runs entries in order and commits their effects. It consumes all of
// them, or those up to and including the first membership entry, and returns a
// result for each it consumed. An error is the disk's, or that of an entry that
// cannot be understood: the member must stop, and nothing of the batch is visible.
// All later calls, and those of CompactStep and Checkpoint, return it again.
func (m *Machine) Apply(entries []*raftpb.Entry) (results []Result, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed == nil {
		results, m.failed = m.apply(entries)
	}
	return results, m.failed
}

func (m *Machine) apply(entries []*raftpb.Entry) ([]Result, error) {
	sb := m.store.NewBatch()
	b := &batch{m: m, store: sb, kv: m.kv.NewWriter(sb)}
	m.auth.Init(sb)
	results := make([]Result, 0, len(entries))
	for i, e := range entries {
		b.left = len(entries) - i
		if e.GetIndex() != m.applied+1 {
			panic(fmt.Sprintf("state: broken invariant: entry %d after applied index %d", e.GetIndex(), m.applied))
		}
		r, err := b.apply(e)
		if err != nil {
			sb.Discard()
			return nil, fmt.Errorf("state: entry %d of term %d: %w", e.GetIndex(), e.GetTerm(), err)
		}
		results = append(results, r)
		m.applied, m.term = e.GetIndex(), e.GetTerm()
		if r.ConfChange != nil {
			break
		}
	}
	b.kv.Seal(m.applied, m.term)
	if err := m.store.Commit(sb); err != nil {
		return nil, fmt.Errorf("state: %w", err)
	}
	b.kv.Committed()
	root := b.kv.Root()
	m.publish(root)
	events := b.kv.Events()
	m.count(events)
	if m.o.Publisher != nil {
		m.o.Publisher.Publish(root, events)
	}
	return results, nil
}

func (m *Machine) count(events []mvcc.Event) {
	var puts, txns, size, last int64
	for i := range events {
		e := &events[i]
		if !e.Delete {
			puts++
			size += int64(len(e.KV))
		}
		if e.Rev.Main != last {
			last = e.Rev.Main
			txns++
		}
	}
	m.puts.Add(puts)
	m.deletes.Add(int64(len(events)) - puts)
	m.txns.Add(txns)
	m.putBytes.Add(size)
}

func (m *Machine) publish(root mvcc.Root) {
	m.now.Store(&moment{
		kv: root, auth: m.auth.Root(), members: m.members.Root(), alarms: m.alarms.Root(),
		applied: m.applied, term: m.term,
	})
}

// CompactStep does a bounded piece of the physical work that compactions left.
// It returns whether more is left and how long to pause before it. An error is the
// disk's, or that of the Apply that failed.
func (m *Machine) CompactStep() (more bool, pause time.Duration, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed != nil {
		return false, 0, m.failed
	}
	more, pause, err = m.kv.CompactStep()
	if err == nil {
		m.publish(m.kv.Root())
	}
	return more, pause, err
}

// Leases is the lease table, for readers.
func (m *Machine) Leases() *lease.Table { return m.leases }

// Keys is the store of keys, for watch history and hashes.
func (m *Machine) Keys() *mvcc.Store { return m.kv }

// Root is the published moment of the keys.
func (m *Machine) Root() mvcc.Root { return m.now.Load().kv }

// View is a pinned moment: the keys, and the tables in force at it. Safe for
// concurrent use. Release must be called.
type View struct {
	*mvcc.View
	now *moment
}

// View pins the published moment.
func (m *Machine) View() *View {
	for {
		now := m.now.Load()
		v := m.kv.View(now.kv)
		if !v.Stale() {
			return &View{View: v, now: now}
		}
		v.Release() // a compaction began between the two lines above
	}
}

// Applied and Term are those of the last entry applied.
func (v *View) Applied() uint64 { return v.now.applied }

// Term is the term of the last entry applied.
func (v *View) Term() uint64 { return v.now.term }

// Auth, Members and Alarms are the small tables in force.
func (v *View) Auth() *auth.Root { return v.now.auth }

// Members is the membership in force.
func (v *View) Members() *member.Root { return v.now.members }

// Alarms are the alarms in force.
func (v *View) Alarms() *alarm.Root { return v.now.alarms }

// Tables returns the small tables in force, without pinning keys.
func (m *Machine) Tables() (*auth.Root, *member.Root, *alarm.Root) {
	now := m.now.Load()
	return now.auth, now.members, now.alarms
}
