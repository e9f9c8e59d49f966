package grpcgo

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// stream is one bidirectional call: a goroutine reads, one writes, and the one
// that grpc-go gave the call waits. It is the call's grpcserver.StreamOut.
type stream struct {
	m        *grpcserver.Method
	wire     grpc.ServerStream
	receiver grpcserver.StreamReceiver
	over     chan error // capacity 1; why the stream ends

	maxMessages, maxBytes int

	gate   sync.RWMutex // held for reading by calls of the receiver
	closed bool         // no more calls

	mu      sync.Mutex
	changed sync.Cond // of all that follows
	queue   []grpcserver.Message
	bytes   int
	refused bool // the receiver is owed a Ready
	held    bool // the receiver wants no request now
	ending  bool // with endErr, once the queue is empty
	endErr  error
	gone    bool
}

func (s *Server) bidirectional(m *grpcserver.Method) grpc.StreamHandler {
	return func(_ any, wire grpc.ServerStream) (err error) {
		ctx, call, forget := watched(m, wire)
		defer forget()
		began := time.Now()
		if m.Stats != nil {
			m.Stats.Started()
		}
		defer func() { finished(m, call, began, err) }()
		b := &stream{m: m, wire: wire, over: make(chan error, 1), maxMessages: s.o.StreamMessages, maxBytes: s.o.StreamBytes}
		b.changed.L = &b.mu
		b.receiver = m.Stream(call, b)
		go b.read()
		go b.write()
		select {
		case err = <-b.over:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		b.mu.Lock()
		b.gone, b.queue = true, nil
		b.changed.Broadcast()
		b.mu.Unlock()
		b.gate.Lock()
		b.closed = true
		b.gate.Unlock()
		b.receiver.Close()
		return err
	}
}

// call runs fn unless the stream is over.
func (b *stream) call(fn func()) bool {
	b.gate.RLock()
	defer b.gate.RUnlock()
	if !b.closed {
		fn()
	}
	return !b.closed
}

// end ends the stream; the first reason counts.
func (b *stream) end(err error) {
	select {
	case b.over <- err:
	default:
	}
}

func (b *stream) read() {
	for b.mayRead() {
		in := frame{stats: b.m.Stats}
		err := b.wire.RecvMsg(&in)
		var over bool
		switch {
		case errors.Is(err, io.EOF):
			if b.call(func() { over = b.receiver.HalfClose() }) && over {
				b.end(nil)
			}
			return
		case err != nil:
			b.end(err)
			return
		}
		if !b.call(func() { err = b.receiver.Message(in.data) }) {
			return
		}
		if err != nil {
			b.end(err)
			return
		}
	}
}

// mayRead waits until a request is wanted. It returns false when none is any more.
func (b *stream) mayRead() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for (b.refused || b.held) && !b.ending && !b.gone {
		b.changed.Wait()
	}
	return !b.ending && !b.gone
}

func (b *stream) write() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.gone {
		switch {
		case len(b.queue) > 0:
			m := b.queue[0]
			b.mu.Unlock()
			began := time.Now()
			data := append([]byte(nil), m.Head...)
			for _, part := range m.Rest {
				data = append(data, part...)
			}
			err := b.wire.SendMsg(&frame{data: data, stats: b.m.Stats})
			if err != nil {
				b.end(err)
			} else {
				b.call(func() { b.receiver.Sent(m, time.Since(began)) })
			}
			b.mu.Lock()
			if err != nil || b.gone {
				return
			}
			b.queue, b.bytes = b.queue[1:], b.bytes-m.Size()
		case b.refused:
			b.refused = false
			b.mu.Unlock()
			b.call(b.receiver.Ready)
			b.mu.Lock()
			b.changed.Broadcast()
		case b.ending:
			b.end(b.endErr)
			return
		default:
			b.changed.Wait()
		}
	}
}

// Send implements grpcserver.StreamOut.
func (b *stream) Send(ms []grpcserver.Message) bool {
	size := 0
	for _, m := range ms {
		size += m.Size()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.changed.Broadcast()
	if b.gone {
		return false
	}
	if len(b.queue) > 0 && (len(b.queue)+len(ms) > b.maxMessages || b.bytes+size > b.maxBytes) {
		b.refused = true
		return false
	}
	b.queue, b.bytes = append(b.queue, ms...), b.bytes+size
	return true
}

// Hold implements grpcserver.StreamOut.
func (b *stream) Hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held = true
}

// Resume implements grpcserver.StreamOut.
func (b *stream) Resume() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held = false
	b.changed.Broadcast()
}

// End implements grpcserver.StreamOut.
func (b *stream) End(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ending || b.gone {
		return
	}
	b.ending, b.endErr = true, err
	b.changed.Broadcast()
}
