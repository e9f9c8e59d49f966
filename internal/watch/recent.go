package watch

import (
	"sort"
	"sync"

	"github.com/engram-kv/engram/internal/mvcc"
)

// recent holds the newest batches of events under a byte budget. Live watchers
// are fed from it alone, and those a little behind need not touch the disk.
type recent struct {
	budget int

	mu      sync.Mutex
	batches []batch // oldest first; without gaps between them
	bytes   int
	// first is the lowest revision from which on all events are here, last the
	// highest published one.
	first, last int64
}

// batch is what one Publish brought: events till the first time that somebody
// wants them, then entries.
type batch struct {
	first, last int64
	events      []mvcc.Event
	entries     []entry
	bytes       int // as entries, also before they are made
}

// encode makes the entries.
func (b *batch) encode() {
	if b.entries == nil {
		b.entries, b.events = newEntries(b.events), nil
	}
}

func newRecent(budget int, revision int64) *recent {
	return &recent{budget: budget, first: revision + 1, last: revision}
}

// encodeLater bounds the batches that are encoded later, under the lock, in bytes.
const encodeLater = 1 << 20

// add appends a batch that ends at revision and drops the oldest ones that no
// longer fit. The events are encoded when somebody wants them: where nobody
// watches, that is never. Till then they hold what the store keeps them in, which
// has the same bytes and little more, since events lie there in order too. A very
// large batch is encoded at once, as others would wait for it later.
func (r *recent) add(revision int64, events []mvcc.Event) {
	bytes := entriesSize(events)
	first, last := events[0].Rev.Main, events[len(events)-1].Rev.Main
	b := batch{last: revision, events: events, bytes: bytes}
	if bytes > encodeLater {
		b.encode()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if first <= r.last || last > revision {
		broken("events of revisions %d to %d published for root %d after revision %d", first, last, revision, r.last)
	}
	b.first = r.last + 1
	r.batches = append(r.batches, b)
	r.last = revision
	r.grow(bytes)
}

// grow accounts for n more bytes. r.mu is held.
func (r *recent) grow(n int) {
	r.bytes += n
	drop := 0
	for r.bytes > r.budget && drop < len(r.batches)-1 {
		r.bytes -= r.batches[drop].bytes
		drop++
	}
	if drop > 0 {
		clear(r.batches[:drop]) // the array lives on for a while, the entries need not
		r.batches = r.batches[drop:]
		r.first = r.batches[0].first
	}
}

// addPrev accounts for n bytes that were added to the entries of a revision.
func (r *recent) addPrev(revision int64, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.find(revision); at < len(r.batches) && r.batches[at].first <= revision {
		r.batches[at].bytes += n
		r.grow(n)
	}
}

// find returns the place of the first batch that ends at or after revision.
func (r *recent) find(revision int64) int {
	return sort.Search(len(r.batches), func(i int) bool { return r.batches[i].last >= revision })
}

// span returns the revisions that are here.
func (r *recent) span() (first, last int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first, r.last
}

// since appends to dst the entries from revision from on, in whole batches that
// begin at or below to, till maxBytes are reached. It returns the revision that
// they reach to, at least from-1. ok is false if from is no longer here.
func (r *recent) since(dst []*entry, from, to int64, maxBytes int) (entries []*entry, upTo int64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if from < r.first {
		return dst, 0, false
	}
	upTo = from - 1
	bytes := 0
	for i := r.find(from); i < len(r.batches) && bytes < maxBytes; i++ {
		b := &r.batches[i]
		if b.first > to {
			break
		}
		b.encode()
		start := sort.Search(len(b.entries), func(k int) bool { return b.entries[k].main() >= from })
		for k := start; k < len(b.entries); k++ {
			dst = append(dst, &b.entries[k])
		}
		bytes += b.bytes
		upTo = b.last
	}
	return dst, upTo, true
}

// reset forgets all events.
func (r *recent) reset(revision int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches, r.bytes = nil, 0
	r.first, r.last = revision+1, revision
}
