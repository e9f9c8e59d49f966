package rpc

import (
	"net"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/hot"
)

// touch is what a request that Options.Hot has picked will be counted as.
type touch struct {
	kind  hot.Kind
	key   []byte
	bytes int // of a write's request
}

// touches says which key a request is about and how long it is, before it is
// done. Only requests that are picked take memory for it.
func (q *request) touches(kind hot.Kind, key []byte, bytes int) {
	if q.s.o.Hot.Pick() {
		q.touched = &touch{kind, key, bytes}
	}
}

// touchesOps is touches for a transaction, which is counted as its first op.
func (q *request) touchesOps(r *command.TxnRequest, readOnly bool, bytes int) {
	ops := r.Success
	if len(ops) == 0 {
		ops = r.Failure
	}
	if len(ops) == 0 {
		return
	}
	kind := hot.Write
	if readOnly {
		kind = hot.Read
	}
	if key := opKey(&ops[0]); key != nil {
		q.touches(kind, key, bytes)
	}
}

// opKey returns the key of an op, nil for a transaction inside of one.
func opKey(o *command.Op) []byte {
	switch {
	case o.Put != nil:
		return o.Put.Key
	case o.Range != nil:
		return o.Range.Key
	case o.DeleteRange != nil:
		return o.DeleteRange.Key
	}
	return nil
}

// tally counts the request if it was picked; answer is the length of its answer.
func (q *request) tally(answer int) {
	t := q.touched
	if t == nil {
		return
	}
	if t.kind == hot.Read {
		t.bytes = answer
	}
	q.s.o.Hot.Add(t.kind, wholeRange(t.key), t.bytes, q.s.hotClient(q.call))
}

// tallyRead counts a read that is not a request.
func (s *Server) tallyRead(call *grpcserver.Call, key []byte, bytes int) {
	if s.o.Hot.Pick() {
		s.o.Hot.Add(hot.Read, wholeRange(key), bytes, s.hotClient(call))
	}
}

// tallyEvents counts encoded events that were sent to a watcher.
func (s *Server) tallyEvents(call *grpcserver.Call, events [][]byte) {
	for _, e := range events {
		if s.o.Hot.Pick() {
			s.o.Hot.Add(hot.Event, eventKey(e), len(e), s.hotClient(call))
		}
	}
}

// wholeRange is a key as hot shows it: a range from the zero byte on begins with
// nothing.
func wholeRange(key []byte) []byte {
	if len(key) == 1 && key[0] == 0 {
		return nil
	}
	return key
}

// hotClient says who calls, without waiting to learn it.
func (s *Server) hotClient(call *grpcserver.Call) hot.Client {
	c := hot.Client{Name: call.CommonName()}
	if who, err := s.identify(call); err == nil && who.User != "" {
		c.Name = who.User
	}
	if a, ok := call.RemoteAddr().(*net.TCPAddr); ok {
		c.Addr = a.AddrPort().Addr()
	}
	return c
}

// Fields on the way from WatchResponse's events to a key.
const (
	fieldEventKV = 2 // of mvccpb.Event
	fieldKVKey   = 1 // of mvccpb.KeyValue
)

// eventKey finds the key in an event as it stands in a WatchResponse: with the
// field's tag and length before it. It returns nil if there is none.
func eventKey(e []byte) []byte {
	_, typ, n := protowire.ConsumeTag(e)
	if n < 0 || typ != protowire.BytesType {
		return nil
	}
	event, m := protowire.ConsumeBytes(e[n:])
	if m < 0 {
		return nil
	}
	return bytesOf(bytesOf(event, fieldEventKV), fieldKVKey)
}

// bytesOf returns a message's first field of that number, nil if it has none.
func bytesOf(b []byte, field protowire.Number) []byte {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil
		}
		if num == field && typ == protowire.BytesType {
			v, m := protowire.ConsumeBytes(b[n:])
			if m < 0 {
				return nil
			}
			return v
		}
		m := protowire.ConsumeFieldValue(num, typ, b[n:])
		if m < 0 {
			return nil
		}
		b = b[n+m:]
	}
	return nil
}
