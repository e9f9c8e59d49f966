package rpc

import (
	"bytes"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// firstChunk is how many keys the first message of a RangeStream has at most.
const firstChunk = 10

var (
	errStreamSort   = status.Error(codes.Unimplemented, "RangeStream does not support custom sort orders")
	errStreamFilter = status.Error(codes.Unimplemented, "RangeStream does not support revision filters")
)

// rangeStream serves RangeStream: the answer to a Range, in chunks that are all
// read from one view.
func (s *Server) rangeStream(call *grpcserver.Call, raw []byte, send grpcserver.Send) error {
	began := s.o.Clock.Now()
	var r command.RangeRequest
	_, err := decode(command.KindRange, raw, func(b []byte) bool { return command.ParseRange(b, &r) })
	if err != nil {
		return undecoded(undecodedMessage, err)
	}
	err = s.admit(call, kindStream, false)
	if err == nil {
		err = checkRange(&r)
	}
	if err == nil {
		err = checkStreamable(&r)
	}
	if err != nil {
		return WireError(err)
	}
	size := 0
	err = s.streamRange(call, &r, func(raw []byte, sent func()) error { size += len(raw); return send(raw, sent) })
	s.tallyRead(call, r.Key, size)
	s.metrics.request(requestRangeStream, err, s.o.Clock.Now().Sub(began))
	return WireError(err)
}

// checkStreamable refuses what cannot be answered in key order as it is read.
func checkStreamable(r *command.RangeRequest) error {
	order, target := mvcc.SortOrder(r.SortOrder), mvcc.SortTarget(r.SortTarget)
	switch {
	case order != mvcc.OrderNone && (order != mvcc.OrderAscend || target != mvcc.TargetKey):
		return errStreamSort
	case r.MinMod != 0, r.MaxMod != 0, r.MinCreate != 0, r.MaxCreate != 0:
		return errStreamFilter
	}
	return nil
}

func (s *Server) streamRange(call *grpcserver.Call, r *command.RangeRequest, send grpcserver.Send) error {
	who, err := s.caller(call)
	if err != nil {
		return err
	}
	if !r.Serializable {
		if err := s.confirm(call); err != nil {
			return err
		}
	}
	v := s.view()
	defer v.Release()
	if err := v.MayRead(who, r.Key, r.RangeEnd); err != nil {
		return err
	}
	c := chunker{s: s, call: call, view: v.KV(), key: r.Key, end: r.RangeEnd, left: max(r.Limit, 0), keys: firstChunk}
	c.options = state.RangeOptionsOf(r)
	c.options.Order, c.options.Target = mvcc.OrderNone, mvcc.TargetKey
	for last := false; !last; {
		if last, err = c.next(send); err != nil {
			return err
		}
	}
	return nil
}

// confirm waits until this member has applied all that was committed.
func (s *Server) confirm(call *grpcserver.Call) error {
	confirmed := make(chan error, 1)
	s.o.Consensus.ReadIndex(deadlineOf(call, s.o.Clock.Now(), s.o.RequestTimeout), func(err error) { confirmed <- err })
	select {
	case err := <-confirmed:
		return err
	case <-call.Context().Done():
		return call.Context().Err()
	}
}

// chunker cuts the answer to one range into messages.
type chunker struct {
	s       *Server
	call    *grpcserver.Call
	view    *mvcc.View
	options mvcc.RangeOptions

	key, end []byte
	left     int64 // keys that the request's limit leaves; 0 means all
	keys     int64 // keys of the next chunk
	started  bool
	total    int64 // keys in the whole range, known after the first chunk
}

// next sends one chunk. Last says that it was the last one.
func (c *chunker) next(send grpcserver.Send) (last bool, err error) {
	res, room, err := c.read()
	if err != nil {
		return false, err
	}
	if !c.started {
		c.started, c.total = true, res.Count
	}
	got := int64(len(res.KVs))
	exhausted := !res.More || c.options.CountOnly
	satisfied := c.left > 0 && got >= c.left
	last = exhausted || satisfied

	a := answer{kind: state.OpRange, bare: !last, kvs: res.KVs}
	if last {
		a.header = c.s.header(c.view.Revision())
		a.count = c.total
		a.more = !exhausted
	} else {
		if c.left > 0 {
			c.left -= got
		}
		if c.key, err = keyAfter(res.KVs[got-1]); err != nil {
			c.s.room.release(room)
			return false, err
		}
		c.grow(res.Bytes)
	}
	return last, c.s.sendHolding(a.encodeChunk(), room, send)
}

// read reads one chunk, for which it takes room.
func (c *chunker) read() (res mvcc.RangeResult, room int64, err error) {
	room = min(4*int64(c.s.o.MaxRequestBytes), c.s.o.ResponseBytes)
	for {
		ctx := c.call.Context()
		if err := c.s.room.wait(ctx, room, deadlineOf(c.call, c.s.o.Clock.Now(), c.s.o.RequestTimeout)); err != nil {
			return mvcc.RangeResult{}, 0, err
		}
		o := c.options
		o.Limit, o.MaxBytes, o.NoCount = c.keys, room, c.started
		if c.left > 0 {
			o.Limit = min(o.Limit, c.left)
		}
		began := c.s.o.Clock.Now()
		res, err := c.view.Range(ctx, c.key, c.end, o)
		c.s.metrics.rangeTook(err, c.s.o.Clock.Now().Sub(began))
		if err == nil {
			return res, room, nil
		}
		c.s.room.release(room)
		switch {
		case !errors.Is(err, mvcc.ErrTooBig):
			return mvcc.RangeResult{}, 0, err
		case c.keys > 1:
			c.keys /= 2
		case room < c.s.o.ResponseBytes:
			room = min(2*room, c.s.o.ResponseBytes)
		default:
			return mvcc.RangeResult{}, 0, fmt.Errorf("%w: one key-value has more than %d bytes", errBusy, room)
		}
	}
}

// grow sizes the next chunk by what this one weighed.
func (c *chunker) grow(size int64) {
	target := int64(c.s.o.MaxRequestBytes)
	switch {
	case size < target/2:
		c.keys *= 2
	case size > 2*target:
		c.keys = max(1, c.keys/2)
	}
}

// sendHolding sends raw and gives room back once its bytes have left.
func (s *Server) sendHolding(raw []byte, room int64, send grpcserver.Send) error {
	if spare := room - int64(len(raw)); spare > 0 {
		s.room.release(spare)
		room -= spare
	}
	return send(raw, func() { s.room.release(room) })
}

// keyAfter returns the smallest key behind that of an encoded KeyValue.
func keyAfter(kv []byte) ([]byte, error) {
	field, typ, n := protowire.ConsumeTag(kv)
	if n > 0 && field == 1 && typ == protowire.BytesType {
		if key, m := protowire.ConsumeBytes(kv[n:]); m > 0 {
			return append(bytes.Clone(key), 0), nil
		}
	}
	return nil, fmt.Errorf("rpc: stored key-value of %d bytes does not begin with its key", len(kv))
}
