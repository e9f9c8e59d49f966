package watch

import (
	"bytes"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/mvcc"
)

// Field numbers of etcdserverpb.WatchResponse, mvccpb.Event and
// etcdserverpb.ResponseHeader.
const (
	responseHeader   = 1
	responseWatchID  = 2
	responseCreated  = 3
	responseCanceled = 4
	responseCompact  = 5
	responseReason   = 6
	responseFragment = 7
	responseEvents   = 11

	eventType   = 1
	eventKV     = 2
	eventPrevKV = 3

	headerCluster  = 1
	headerMember   = 2
	headerRevision = 3
	headerTerm     = 4
)

// Kind says what a response is for.
type Kind uint8

// The kinds of responses.
const (
	KindControl  Kind = iota // created or canceled
	KindEvents               // events of one watcher
	KindProgress             // an empty one that tells a revision
)

// Response is one encoded etcdserverpb.WatchResponse: Prefix, then each of
// Events. The slices are shared between watchers and immutable; whoever gets
// them may keep them.
type Response struct {
	Kind   Kind
	Prefix []byte
	// Events are encoded mvccpb.Events, each with tag and length in front.
	Events [][]byte
}

// Size is the encoded length in bytes.
func (r Response) Size() int {
	n := len(r.Prefix)
	for _, e := range r.Events {
		n += len(e)
	}
	return n
}

// AppendTo appends the encoded response.
func (r Response) AppendTo(dst []byte) []byte {
	dst = append(dst, r.Prefix...)
	for _, e := range r.Events {
		dst = append(dst, e...)
	}
	return dst
}

// entry is an event that was encoded once for all who get it. It is immutable
// but for withPrev.
type entry struct {
	event mvcc.Event // Key and KV alias plain
	plain []byte     // the field "events" of a response, without prev_kv
	// withPrev is the same with prev_kv, once a watcher needed it and it was
	// found.
	withPrev atomic.Pointer[[]byte]
}

func (e *entry) main() int64 { return e.event.Rev.Main }

// entryOverhead is about what an entry needs beside its bytes.
const entryOverhead = 256

// newEntries encodes events into memory of their own, so that what the store
// keeps them in is not held by us.
func newEntries(events []mvcc.Event) []entry {
	entries := make([]entry, len(events))
	buf := make([]byte, 0, fieldsSize(events))
	for i := range events {
		start := len(buf)
		buf = appendEventField(buf, &events[i], nil)
		entries[i].init(events[i], buf[start:len(buf):len(buf)])
	}
	return entries
}

// entriesSize is what newEntries would occupy, in bytes.
func entriesSize(events []mvcc.Event) int { return fieldsSize(events) + len(events)*entryOverhead }

func fieldsSize(events []mvcc.Event) (bytes int) {
	for i := range events {
		bytes += eventFieldSize(&events[i], nil)
	}
	return bytes
}

func (e *entry) init(ev mvcc.Event, plain []byte) {
	kv := plain[len(plain)-len(ev.KV):]
	var key []byte
	if at := 1 + protowire.SizeVarint(uint64(len(ev.Key))); at+len(ev.Key) <= len(kv) && bytes.Equal(kv[at:at+len(ev.Key)], ev.Key) {
		key = kv[at : at+len(ev.Key) : at+len(ev.Key)]
	} else {
		key = bytes.Clone(ev.Key)
	}
	ev.Key, ev.KV = key, kv
	e.event, e.plain = ev, plain
}

// setPrev encodes the event with what its key held before.
func (e *entry) setPrev(prev []byte) {
	b := appendEventField(make([]byte, 0, eventFieldSize(&e.event, prev)), &e.event, prev)
	e.withPrev.Store(&b)
}

// encoded returns the field for a watcher that wants the previous value or not.
// Compacted is the compact revision: what was before an event at or below it is
// no longer told.
func (e *entry) encoded(prev bool, compacted int64) []byte {
	if prev && e.event.Rev.Main-1 >= compacted {
		if b := e.withPrev.Load(); b != nil {
			return *b
		}
	}
	return e.plain
}

// lacksPrev says that a previous value may exist and was not looked up.
func (e *entry) lacksPrev(compacted int64) bool {
	return e.event.Prev != (mvcc.Revision{}) && e.event.Rev.Main-1 >= compacted && e.withPrev.Load() == nil
}

func eventSize(e *mvcc.Event, prev []byte) int {
	n := 1 + protowire.SizeBytes(len(e.KV))
	if e.Delete {
		n += 2
	}
	if prev != nil {
		n += 1 + protowire.SizeBytes(len(prev))
	}
	return n
}

func eventFieldSize(e *mvcc.Event, prev []byte) int {
	return 1 + protowire.SizeBytes(eventSize(e, prev))
}

func appendEventField(dst []byte, e *mvcc.Event, prev []byte) []byte {
	dst = protowire.AppendTag(dst, responseEvents, protowire.BytesType)
	dst = protowire.AppendVarint(dst, uint64(eventSize(e, prev)))
	if e.Delete {
		dst = appendVarint(dst, eventType, 1)
	}
	dst = protowire.AppendTag(dst, eventKV, protowire.BytesType)
	dst = protowire.AppendBytes(dst, e.KV)
	if prev != nil {
		dst = protowire.AppendTag(dst, eventPrevKV, protowire.BytesType)
		dst = protowire.AppendBytes(dst, prev)
	}
	return dst
}

// header encodes the header field of a response. Revision 0 leaves it out.
func (h *Hub) header(revision int64) []byte {
	var b [4 * 11]byte
	body := appendVarint(b[:0], headerCluster, h.opts.ClusterID)
	body = appendVarint(body, headerMember, h.opts.MemberID)
	body = appendVarint(body, headerRevision, uint64(revision))
	body = appendVarint(body, headerTerm, h.opts.Term())
	out := make([]byte, 0, 2+len(body))
	out = protowire.AppendTag(out, responseHeader, protowire.BytesType)
	return protowire.AppendBytes(out, body)
}

// control is a response without events.
type control struct {
	revision int64 // of the header
	watchID  int64
	created  bool
	canceled bool
	compact  int64
	reason   string
}

func (h *Hub) encodeControl(c control) Response {
	b := h.header(c.revision)
	b = appendVarint(b, responseWatchID, uint64(c.watchID))
	b = appendBool(b, responseCreated, c.created)
	b = appendBool(b, responseCanceled, c.canceled)
	b = appendVarint(b, responseCompact, uint64(c.compact))
	if c.reason != "" {
		b = protowire.AppendTag(b, responseReason, protowire.BytesType)
		b = protowire.AppendString(b, c.reason)
	}
	kind := KindProgress
	if c.created || c.canceled {
		kind = KindControl
	}
	return Response{Kind: kind, Prefix: b}
}

// appendVarint appends a varint field unless it is 0.
func appendVarint(dst []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return dst
	}
	dst = protowire.AppendTag(dst, field, protowire.VarintType)
	return protowire.AppendVarint(dst, v)
}

// appendBool appends a bool field unless it is false.
func appendBool(dst []byte, field protowire.Number, v bool) []byte {
	if !v {
		return dst
	}
	return appendVarint(dst, field, 1)
}
