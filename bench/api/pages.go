package api

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// headMost is how much of a message within an answer is kept: the header, and the beginning of a KeyValue, which is its key.
const headMost = 512

// Pages reads a RangeResponse from its bytes as they come, without keeping them: a list may be far larger than its reader cares to hold.
// Reset makes it ready for the next answer.
type Pages struct {
	Keys  int
	More  bool
	Count int64

	value  uint64 // of a varint, so far
	shift  uint
	field  protowire.Number
	state  pagesState
	left   int // bytes of a field that are still to come
	header []byte
	head   []byte // of the last KeyValue
	broken error
	inside bool // a message of a RangeStream
}

type pagesState uint8

const (
	atTag pagesState = iota
	atInt
	atLength
	inBytes
	atStreamTag // of what a message of a RangeStream holds
	atStreamLength
)

// Reset forgets what was read.
func (p *Pages) Reset() { *p = Pages{header: p.header[:0], head: p.head[:0]} }

// Add reads the next bytes.
func (p *Pages) Add(b []byte) {
	var last []byte // of the KeyValue that is kept in the end: most are followed by another
	for len(b) > 0 && p.broken == nil {
		if p.state == inBytes {
			n := min(p.left, len(b))
			switch p.field {
			case 1:
				p.header = keep(p.header, b[:n])
			case 2:
				last = b[:n]
			}
			b = b[n:]
			if p.left -= n; p.left == 0 {
				p.state = atTag
			}
			continue
		}
		c := b[0]
		b = b[1:]
		if p.shift > 63 {
			p.broken = errors.New("a number in the answer does not end")
			return
		}
		p.value |= uint64(c&0x7f) << p.shift
		if p.shift += 7; c&0x80 != 0 {
			continue
		}
		v := p.value
		p.value, p.shift = 0, 0
		if p.state == atLength && p.field == 2 {
			last = nil
		}
		p.number(v)
	}
	p.head = keep(p.head, last)
}

// AddStream reads the next bytes of an answer to RangeStream, whose messages each hold a part of it; last says that one ends.
func (p *Pages) AddStream(b []byte, last bool) {
	if !p.inside {
		p.inside, p.state = true, atStreamTag
	}
	p.Add(b)
	if !last || p.broken != nil {
		return
	}
	if p.inside = false; p.state == atStreamTag && p.shift == 0 {
		p.state = atTag // the message is empty
	}
	p.broken = p.Err()
}

func keep(to, b []byte) []byte { return append(to, b[:min(len(b), headMost-len(to))]...) }

func (p *Pages) number(v uint64) {
	switch p.state {
	case atTag:
		num, typ := protowire.DecodeTag(v)
		p.field = num
		switch typ {
		case protowire.VarintType:
			p.state = atInt
		case protowire.BytesType:
			p.state = atLength
		default:
			p.broken = fmt.Errorf("field %d of the answer has wire type %d, which none uses", num, typ)
		}
	case atStreamTag:
		p.state = atStreamLength
		if num, typ := protowire.DecodeTag(v); num != 1 || typ != protowire.BytesType {
			p.broken = fmt.Errorf("a message of the stream has field %d, want 1 alone", num)
		}
	case atStreamLength: // the message ends with it
		p.state = atTag
	case atInt:
		p.state = atTag
		switch p.field {
		case 3:
			p.More = v != 0
		case 4:
			p.Count = int64(v)
		}
	case atLength:
		if v > 1<<31-1 {
			p.broken = fmt.Errorf("field %d of the answer has %d bytes", p.field, v)
			return
		}
		p.left, p.state = int(v), inBytes
		switch p.field {
		case 1:
			p.header = p.header[:0]
		case 2:
			p.Keys++
			p.head = p.head[:0]
		}
		if v == 0 {
			p.state = atTag
		}
	}
}

// Err tells what is wrong with the answer, once all of it was added.
func (p *Pages) Err() error {
	if p.broken == nil && (p.state != atTag || p.shift != 0) {
		return errors.New("the answer ends within a field")
	}
	return p.broken
}

// Revision is the one in the header; 0 if it has none.
func (p *Pages) Revision() int64 { return number(p.header, headerRevision) }

// Last is the last key; nil if there is none, or if it is longer than can be kept.
func (p *Pages) Last() []byte {
	num, typ, n := protowire.ConsumeTag(p.head)
	if n < 0 || num != 1 || typ != protowire.BytesType {
		return nil
	}
	key, n := protowire.ConsumeBytes(p.head[n:])
	if n < 0 {
		return nil
	}
	return key
}
