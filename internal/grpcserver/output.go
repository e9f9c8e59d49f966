package grpcserver

import (
	"sync"
	"time"
)

const (
	chunkBytes = 16 << 10
	// copiedBytes is up to which size the bytes of others are copied into a chunk
	// rather than written from where they are: an entry of a vectored write costs
	// about as much as such a copy.
	copiedBytes = 2 << 10
	// highWater is how much is made ready for one write. What does not fit stays
	// with its stream, where flow control and cancellation still reach it.
	highWater = 256 << 10
)

// chunks are what frames are put together in.
var chunks = sync.Pool{New: func() any { return new([chunkBytes]byte) }}

// output is what a connection has to write next, in order. The connection's
// lock covers it.
type output struct {
	parts [][]byte
	own   []*[chunkBytes]byte
	tail  []byte // the part of the last chunk that is in use; its capacity is what is left
	bytes int
	sent  []sentRecord
}

// sentRecord is what is to be told once the bytes before it are written.
type sentRecord struct {
	fn     func() // may be nil
	stream *stream
	// Of a bidirectional stream.
	message Message
	began   time.Time
}

// room returns where to append up to n bytes, which fit without growing;
// n is at most chunkBytes. Used takes what was appended.
func (o *output) room(n int) []byte {
	if cap(o.tail)-len(o.tail) < n {
		o.seal()
		c := chunks.Get().(*[chunkBytes]byte)
		o.own = append(o.own, c)
		o.tail = c[:0]
	}
	return o.tail[len(o.tail):]
}

// used takes b, which was appended to what room returned.
func (o *output) used(b []byte) {
	o.tail = o.tail[:len(o.tail)+len(b)]
	o.bytes += len(b)
}

// seal makes a part of what is in the tail. The chunk goes on behind it.
func (o *output) seal() {
	if len(o.tail) > 0 {
		o.parts = append(o.parts, o.tail[:len(o.tail):len(o.tail)])
		o.tail = o.tail[len(o.tail):]
	}
}

// add appends p, by reference unless it is small. It must not change until it is
// written.
func (o *output) add(p []byte) {
	if len(p) <= copiedBytes {
		o.used(append(o.room(len(p)), p...))
		return
	}
	o.seal()
	o.parts = append(o.parts, p)
	o.bytes += len(p)
}

// fill appends the next n bytes of a body.
func (o *output) fill(b Body, n int) {
	for n > 0 {
		if len(o.tail) == cap(o.tail) {
			o.room(1)
		}
		p := o.tail[len(o.tail):]
		p = p[:min(n, cap(p))]
		b.Fill(p)
		o.used(p)
		n -= len(p)
	}
}

// empty says that there is nothing to write and nothing to tell.
func (o *output) empty() bool { return o.bytes == 0 && len(o.sent) == 0 }

// takeAll moves everything to b, whose slices are used again.
func (o *output) takeAll(b *output) {
	o.seal()
	*o, *b = output{parts: b.parts[:0], own: b.own[:0], sent: b.sent[:0]}, *o
	b.tail = nil
}

// release gives the chunks back and forgets the rest. Sent must have been told.
func (o *output) release() {
	for i, c := range o.own {
		chunks.Put(c)
		o.own[i] = nil
	}
	clear(o.parts)
	clear(o.sent)
	if cap(o.parts) > 64 {
		o.parts = nil
	}
	if cap(o.sent) > 64 {
		o.sent = nil
	}
	o.parts, o.own, o.sent, o.tail, o.bytes = o.parts[:0], o.own[:0], o.sent[:0], nil, 0
}
