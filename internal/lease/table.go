// Package lease is the replicated table of leases, and the leader's judgement of
// when one has expired.
//
// It knows no keys but the names attached to a lease, and deletes none: revoking
// is a command like any other. Table is what the log made, the same on every
// member; Lessor is the leader's clock on top of it and changes no row.
// Invariants:
//
//	L1: rows and leases in memory agree whenever no batch is being gathered.
//	L2: Table depends on commands alone. Time enters only through Lessor, and
//	    from there only as proposals.
//	L3: a key is attached to at most one lease, which the index of the keys
//	    knows too: Attach and Detach follow it, nothing is stored on disk here.
//	L4: a lessor never expires a lease earlier than what its client was told
//	    last, by this member or, through promotion's extension, by another.
package lease

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/storage"
)

// MaxTTL is the longest TTL that can be granted, in seconds.
const MaxTTL = 9_000_000_000

var (
	// ErrNotFound says that there is no lease of that ID. Granting ID 0 is
	// answered with it too, as in etcd.
	ErrNotFound = errors.New("lease: not found")
	// ErrExists says that a lease of that ID was granted before.
	ErrExists = errors.New("lease: already exists")
	// ErrTTLTooLarge says that a TTL is beyond MaxTTL.
	ErrTTLTooLarge = errors.New("lease: TTL too large")
)

// Lease is one lease. Times are in seconds.
type Lease struct {
	ID int64
	// TTL is what was granted.
	TTL int64
	// Remaining is the rest of the TTL at the last checkpoint, 0 if there was
	// none since the last keep-alive.
	Remaining int64
}

// Options configure a Table.
type Options struct {
	// MinTTL is the TTL in seconds that shorter ones are raised to. It must be
	// the same on all members.
	MinTTL int64
}

// Table is the leases and their keys. Only the applier changes it; everybody
// may read it at any time. Readers see what the applier did when it did it, a
// moment before its batch is committed: what is asked of leases outside the log
// is not linearizable, in etcd neither. Nothing that is answered as committed
// may be read from here.
type Table struct {
	minTTL int64

	mu      sync.Mutex // held briefly, for a bounded number of keys
	leases  map[int64]*entry
	watcher watcher
}

// watcher hears of changes, in order, from the applier, with no lock held.
type watcher interface {
	granted(Lease)
	revoked(id int64)
	checkpointed(Lease)
}

type entry struct {
	Lease
	keys keySet
}

// Open reads the leases. Keys are attached by the caller, who finds the
// attachments in the index.
func Open(r storage.Reader, o Options) (*Table, error) {
	t := &Table{minTTL: o.MinTTL, leases: map[int64]*entry{}}
	err := storage.Rows(r, storage.TableLease, func(name, value []byte) error {
		l, err := parseRow(name, value)
		if err != nil {
			return err
		}
		l.TTL = max(l.TTL, t.minTTL) // in memory only, as in etcd
		t.leases[l.ID] = &entry{Lease: l}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("lease: open: %w", err)
	}
	return t, nil
}

// Grant makes a lease and returns the TTL in seconds that it got: ttl, raised to
// the minimum. It fails with ErrNotFound for ID 0, ErrTTLTooLarge or ErrExists,
// looked at in this order.
func (t *Table) Grant(b *storage.Batch, id, ttl int64) (effective int64, err error) {
	if id == 0 {
		return 0, fmt.Errorf("grant lease 0, which is no ID: %w", ErrNotFound)
	}
	if ttl > MaxTTL {
		return 0, fmt.Errorf("grant lease %x for %d s, at most %d s are allowed: %w", id, ttl, int64(MaxTTL), ErrTTLTooLarge)
	}
	l := Lease{ID: id, TTL: max(ttl, t.minTTL)}
	t.mu.Lock()
	_, exists := t.leases[id]
	if !exists {
		t.leases[id] = &entry{Lease: l}
	}
	w := t.watcher
	t.mu.Unlock()
	if exists {
		return 0, fmt.Errorf("grant lease %x: %w", id, ErrExists)
	}
	setRow(b, l)
	if w != nil {
		w.granted(l)
	}
	return l.TTL, nil
}

// Revoke removes a lease and forgets its attachments. The caller deletes the
// keys, which it got from Keys before. It fails with ErrNotFound.
func (t *Table) Revoke(b *storage.Batch, id int64) error {
	t.mu.Lock()
	_, exists := t.leases[id]
	delete(t.leases, id)
	w := t.watcher
	t.mu.Unlock()
	if !exists {
		return fmt.Errorf("revoke lease %x: %w", id, ErrNotFound)
	}
	b.Delete(rowKey(id))
	if w != nil {
		w.revoked(id)
	}
	return nil
}

// Checkpoint notes that of a lease's TTL that many seconds are left, 0 meaning
// all, and says whether there is such a lease: if not, nothing happens.
func (t *Table) Checkpoint(b *storage.Batch, id, remaining int64) (known bool) {
	t.mu.Lock()
	e := t.leases[id]
	if e == nil {
		t.mu.Unlock()
		return false
	}
	e.Remaining = remaining
	l, w := e.Lease, t.watcher
	t.mu.Unlock()
	setRow(b, l)
	if w != nil {
		w.checkpointed(l)
	}
	return true
}

// Attach attaches a key, which is copied, to a lease and says whether there is
// such a lease. O(1) amortized; attaching twice is the same as once.
func (t *Table) Attach(id int64, key []byte) (known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.leases[id]
	if e == nil {
		return false
	}
	e.keys.add(key)
	return true
}

// Detach detaches a key from a lease. It does nothing if either is unknown.
func (t *Table) Detach(id int64, key []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.leases[id]; e != nil {
		e.keys.remove(key)
	}
}

// Exists says whether there is such a lease.
func (t *Table) Exists(id int64) bool {
	_, ok := t.Lookup(id)
	return ok
}

// Lookup returns a lease.
func (t *Table) Lookup(id int64) (Lease, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.leases[id]; e != nil {
		return e.Lease, true
	}
	return Lease{}, false
}

// Len is the number of leases.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.leases)
}

// chunk is how many items are copied before the lock is given away.
const chunk = 1024

// All returns the leases in no order. Those that are granted or revoked while it
// runs may be missing or present.
func (t *Table) All() []Lease {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Lease, 0, len(t.leases))
	for _, e := range t.leases {
		out = append(out, e.Lease)
		t.breathe(len(out))
	}
	return out
}

// breathe lets the applier in after each chunk. A map may be changed between
// two steps of an iteration over it.
func (t *Table) breathe(done int) {
	if done%chunk == 0 {
		t.mu.Unlock()
		t.mu.Lock()
	}
}

// KeyCount is the number of keys attached to a lease.
func (t *Table) KeyCount(id int64) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.leases[id]; e != nil {
		return e.keys.len()
	}
	return 0
}

// Keys returns the keys attached to a lease in ascending order, none if it is
// unknown. The caller owns them. To the applier they are exact; to others, keys
// that come and go meanwhile may be missing or present.
func (t *Table) Keys(id int64) [][]byte {
	t.mu.Lock()
	var names []string
	if e := t.leases[id]; e != nil {
		names = make([]string, 0, e.keys.len())
		for name := range e.keys.all() {
			names = append(names, name)
			t.breathe(len(names))
		}
	}
	t.mu.Unlock()
	slices.Sort(names)
	size := 0
	for _, name := range names {
		size += len(name)
	}
	keys, buf := make([][]byte, len(names)), make([]byte, 0, size)
	for i, name := range names {
		at := len(buf)
		buf = append(buf, name...)
		keys[i] = buf[at:len(buf):len(buf)]
	}
	return keys
}

// EveryKey says whether ok holds for every key attached to a lease, true if there
// is none. It asks in no order, until the first that it does not hold for, and
// reuses the key's memory. It must not call the Table.
func (t *Table) EveryKey(id int64, ok func(key []byte) bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.leases[id]
	if e == nil {
		return true
	}
	var buf []byte
	done := 0
	for name := range e.keys.all() {
		buf = append(buf[:0], name...)
		if !ok(buf) {
			return false
		}
		done++
		t.breathe(done)
	}
	return true
}

// watch makes w hear of changes. There is one watcher in a Table's life.
func (t *Table) watch(w watcher) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.watcher != nil {
		panic("lease: a table has one lessor")
	}
	t.watcher = w
}

// A row is BE64(id) -> {ID=1, TTL=2, RemainingTTL=3}, as in etcd's file.

func rowKey(id int64) []byte {
	return storage.RowKey(storage.TableLease, binary.BigEndian.AppendUint64(nil, uint64(id)))
}

func setRow(b *storage.Batch, l Lease) { b.Set(rowKey(l.ID), encodeRow(l)) }

func encodeRow(l Lease) (v []byte) {
	for i, n := range [...]int64{l.ID, l.TTL, l.Remaining} {
		if n != 0 {
			v = protowire.AppendTag(v, protowire.Number(i+1), protowire.VarintType)
			v = protowire.AppendVarint(v, uint64(n))
		}
	}
	return v
}

func parseRow(name, value []byte) (l Lease, err error) {
	row := value
	for len(value) > 0 {
		field, typ, n := protowire.ConsumeTag(value)
		if n < 0 {
			return l, fmt.Errorf("row %x = %x: %w", name, row, protowire.ParseError(n))
		}
		value = value[n:]
		var u uint64
		if field <= 3 && typ == protowire.VarintType {
			u, n = protowire.ConsumeVarint(value)
		} else {
			n = protowire.ConsumeFieldValue(field, typ, value)
			field = 0
		}
		if n < 0 {
			return l, fmt.Errorf("row %x = %x: %w", name, row, protowire.ParseError(n))
		}
		value = value[n:]
		switch field {
		case 1:
			l.ID = int64(u)
		case 2:
			l.TTL = int64(u)
		case 3:
			l.Remaining = int64(u)
		}
	}
	if l.ID == 0 || len(name) != 8 || int64(binary.BigEndian.Uint64(name)) != l.ID {
		return l, fmt.Errorf("row %x = %x holds lease %x", name, row, l.ID)
	}
	return l, nil
}
