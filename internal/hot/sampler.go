// Package hot finds out which prefixes, keys and clients a member is busiest with.
//
// It knows neither requests nor events, only that something of a kind happened to
// a key on behalf of a client, and it keeps no values. Sampler is the main type.
// Callers ask Pick, which costs a few nanoseconds, and only for what it picks call
// Add, which copies into a buffer; Tick does the counting, beside the requests.
// Invariants:
//
//	H1: memory is bounded by Options, whatever keys and clients there are.
//	H2: a name with more than 1/Names of the weight of what was counted is in its
//	    table (Space-Saving), and what may be another's is told as its doubt.
//	H3: while fewer than Buffer/2 things happen between two ticks, all are counted.
package hot

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/internal/keypath"
)

// Kind is what happened.
type Kind uint8

// The kinds: a key or range was read, a key was written, a watcher got an event.
const (
	Read Kind = iota
	Write
	Event
	kinds
)

// Client is who asked. The zero value is unknown.
type Client struct {
	Addr netip.Addr
	Name string // of the user or the certificate, if any
}

// MaxDepth is how many segments of a path are told apart.
const MaxDepth = 4

const (
	keyBytes    = 128     // of a key that are kept
	weightBytes = 4 << 10 // weigh as much as one request
	window      = 10 * time.Second
)

var slash = []byte{'/'}

// Options configure a Sampler. Zero values mean the defaults.
type Options struct {
	// Names bounds each table; default 256.
	Names int
	// Buffer bounds what is counted between two ticks; default 1024.
	Buffer int
}

// Interval is how often Tick is meant to be called.
const Interval = 250 * time.Millisecond

// Sampler counts. Safe for concurrent use; a nil Sampler picks nothing.
type Sampler struct {
	size int           // of the buffer
	mask atomic.Uint32 // one thing of mask+1 is picked; all bits below a power of two

	mu     sync.Mutex // the buffer that Add fills
	buffer []sample
	missed int // picked while the buffer was full

	counting sync.Mutex // all that follows
	spare    []sample
	prefixes [MaxDepth]*table
	keys     *table
	clients  *table
	total    counts
	seconds  float64 // that the counts speak of, decayed like them
	last     time.Time
}

type sample struct {
	kind   Kind
	length uint8 // of key
	bytes  int32
	scale  float64
	client Client
	key    [keyBytes]byte
}

// counts are decayed sums.
type counts struct {
	of    [kinds]float64
	bytes float64
}

func (c *counts) add(s *sample) {
	c.of[s.kind] += s.scale
	c.bytes += s.scale * float64(s.bytes)
}

func (c *counts) decay(f float64) {
	for i := range c.of {
		c.of[i] *= f
	}
	c.bytes *= f
}

// New returns a Sampler that has counted nothing. Its first second begins at now.
func New(o Options, now time.Time) *Sampler {
	names, buffer := o.Names, o.Buffer
	if names == 0 {
		names = 256
	}
	if buffer == 0 {
		buffer = 1024
	}
	s := &Sampler{size: buffer, buffer: make([]sample, 0, buffer), spare: make([]sample, 0, buffer), keys: newTable(names), clients: newTable(names), last: now}
	for i := range s.prefixes {
		s.prefixes[i] = newTable(names)
	}
	return s
}

// Pick says whether the thing that happens now is to be counted.
func (s *Sampler) Pick() bool {
	if s == nil {
		return false
	}
	mask := s.mask.Load()
	return mask == 0 || rand.Uint32()&mask == 0
}

// Add counts something that was picked. It keeps neither key nor value.
func (s *Sampler) Add(kind Kind, key []byte, bytes int, client Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.buffer)
	if n == cap(s.buffer) {
		s.missed++
		return
	}
	s.buffer = s.buffer[:n+1]
	e := &s.buffer[n]
	e.kind, e.bytes, e.client = kind, int32(min(bytes, math.MaxInt32)), client
	e.scale = float64(s.mask.Load()) + 1
	e.length = uint8(copy(e.key[:], key))
}

// Tick counts what was added since the last tick, and forgets a little of what was
// counted before.
func (s *Sampler) Tick(now time.Time) {
	s.counting.Lock()
	defer s.counting.Unlock()
	s.tick(now)
}

func (s *Sampler) tick(now time.Time) {
	s.mu.Lock()
	samples, missed := s.buffer, s.missed
	s.buffer, s.missed = s.spare[:0], 0
	s.mu.Unlock()
	defer func() {
		clear(samples) // clients
		s.spare = samples
	}()

	past := max(0, now.Sub(s.last))
	s.last = now
	f := math.Exp(-past.Seconds() / window.Seconds())
	s.seconds = s.seconds*f + past.Seconds()
	s.total.decay(f)
	for _, t := range s.tables() {
		t.decay(f)
	}
	for i := range samples {
		e := &samples[i]
		e.scale *= float64(len(samples)+missed) / float64(len(samples))
		s.count(e)
	}
	s.adapt(len(samples), missed, past)
}

// adapt keeps the samples of a tick between an eighth and a half of the buffer.
func (s *Sampler) adapt(taken, missed int, past time.Duration) {
	mask := s.mask.Load()
	switch {
	case missed > 0 || taken > s.size/2:
		s.mask.Store(min(mask<<1|1, 1<<20-1))
	case taken < s.size/8 && past >= Interval/2:
		s.mask.Store(mask >> 1)
	}
}

func (s *Sampler) tables() []*table { return append(s.prefixes[:], s.keys, s.clients) }

func (s *Sampler) count(e *sample) {
	s.total.add(e)
	key := e.key[:e.length]
	for i := range s.prefixes {
		path, _ := keypath.Cut(key, 0, slash, i+1)
		s.prefixes[i].add(path, e)
	}
	s.keys.add(key, e)
	s.clients.add(clientName(e.client), e)
}

// clientName is user@address, or the address alone.
func clientName(c Client) []byte {
	var b []byte
	if c.Name != "" {
		b = append([]byte(c.Name), '@')
	}
	if !c.Addr.IsValid() {
		return append(b, "unknown"...)
	}
	return c.Addr.Unmap().AppendTo(b)
}
