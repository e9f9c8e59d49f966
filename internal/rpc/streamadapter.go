package rpc

import (
	"context"
	"errors"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errUnread ends a stream whose client does not read while memory is short.
var errUnread = status.Error(codes.ResourceExhausted, "etcdserver: the stream was not read for too long while the memory for streams was used up")

// errOver says that a stream has ended.
var errOver = errors.New("rpc: the stream is over")

// adaptedStream lets grpc-go serve a StreamHandler: one goroutine reads, one
// writes, and the one that grpc-go gave the call waits, so that it can leave
// whenever the stream is cut off.
type adaptedStream struct {
	s        *Server
	api      string // in metrics
	stream   grpc.ServerStream
	out      *outbox
	receiver StreamReceiver
	over     chan error // capacity 1; why the stream ends
	inTurn   bool       // the goroutine that reads may write

	writing sync.Mutex // held by who writes, and calls Ready or Sent

	gate   sync.RWMutex // held for reading by calls of the receiver
	closed bool         // no more calls
}

// bidirectional returns what serves h to grpc-go.
func (s *Server) bidirectional(api string, h StreamHandler) grpc.StreamHandler {
	return func(_ any, stream grpc.ServerStream) error {
		a := &adaptedStream{
			s: s, api: api, stream: stream,
			over: make(chan error, 1),
		}
		a.out = newOutbox(s.o.StreamMessages, s.o.StreamBytes, s.streams, func() { a.end(errUnread) })
		ctx := stream.Context()
		a.receiver = h(callFrom(ctx), a.out)
		_, a.inTurn = a.receiver.(inTurn)
		go a.read(ctx)
		go a.write(ctx)
		var err error
		select {
		case err = <-a.over:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		a.out.close()
		a.gate.Lock()
		a.closed = true
		a.gate.Unlock()
		a.receiver.Close()
		return err
	}
}

// streamAPIs are the names of streams in etcd_network_server_stream_failures_total.
var streamAPIs = map[string]string{
	"/etcdserverpb.Watch/Watch":          "watch",
	"/etcdserverpb.Lease/LeaseKeepAlive": "lease-keepalive",
}

// inTurn marks a receiver that takes no request before the one before is
// answered. Its answers may be written by the goroutine that reads, which spares
// waking another.
type inTurn interface{ inTurn() }

// call runs fn unless the stream is over.
func (a *adaptedStream) call(fn func()) bool {
	a.gate.RLock()
	defer a.gate.RUnlock()
	if !a.closed {
		fn()
	}
	return !a.closed
}

// end ends the stream; the first reason counts.
func (a *adaptedStream) end(err error) {
	select {
	case a.over <- err:
	default:
	}
}

func (a *adaptedStream) read(ctx context.Context) {
	conn := connOf(ctx)
	for a.out.awaitRoom() {
		var in frame
		err := a.stream.RecvMsg(&in)
		var over bool
		switch {
		case errors.Is(err, io.EOF):
			if a.call(func() { over = a.receiver.HalfClose() }) && over {
				a.end(nil)
			}
			return
		case err != nil:
			a.failed("receive", err)
			return
		}
		if a.inTurn {
			a.out.setInline(true)
		}
		if !a.call(func() { err = a.receiver.Message(in.data) }) {
			return
		}
		if err != nil {
			a.end(err)
			return
		}
		if a.inTurn {
			for more := true; more; {
				if more, err = a.writeNext(ctx, conn); err != nil {
					return
				}
			}
			a.out.setInline(false)
		}
	}
}

func (a *adaptedStream) write(ctx context.Context) {
	// Who waits for the bytes of others looks now and then if those move.
	conn := connOf(ctx)
	again := a.s.o.Clock.NewTimer(a.s.o.StreamStall)
	defer again.Stop()
	for {
		if !a.out.isRefused() {
			again.Stop()
		} else {
			again.Reset(a.s.o.StreamStall / 2)
		}
		select {
		case <-ctx.Done():
			return
		case <-a.out.wake:
		case <-again.C():
		}
		for {
			if !a.ready() {
				return
			}
			more, err := a.writeNext(ctx, conn)
			if err != nil {
				return
			}
			if more {
				continue
			}
			if why, now := a.out.ended(); now {
				a.end(why)
				return
			}
			a.out.idle()
			break
		}
	}
}

// ready tells the receiver of room, if it is to be told. It returns false if the
// stream is over.
func (a *adaptedStream) ready() bool {
	a.writing.Lock()
	defer a.writing.Unlock()
	if a.out.owesReady() {
		if !a.call(a.receiver.Ready) {
			return false
		}
		a.out.told()
	}
	return true
}

// writeNext writes the next message and returns whether there was one. After an
// error the stream is over.
func (a *adaptedStream) writeNext(ctx context.Context, conn *unsent) (more bool, err error) {
	a.writing.Lock()
	defer a.writing.Unlock()
	m, ok := a.out.peek()
	if !ok {
		return false, nil
	}
	began := a.s.o.Clock.Now()
	if err := a.send(ctx, conn, m.join()); err != nil {
		a.failed("send", err)
		return false, err
	}
	took := a.s.o.Clock.Now().Sub(began)
	a.out.wrote()
	if !a.call(func() { a.receiver.Sent(m, took) }) {
		return false, errOver
	}
	return true, nil
}

// waitedFor is the size from which on a message is waited for till it has left
// memory.
const waitedFor = 64 << 10

// send sends one message. Grpc-go takes one of any size, to keep till the client
// reads; of a large one that memory must stay counted.
func (a *adaptedStream) send(ctx context.Context, conn *unsent, data []byte) error {
	if len(data) < waitedFor {
		return a.stream.SendMsg(&frame{data: data})
	}
	left := make(chan struct{})
	if err := a.stream.SendMsg(&frame{data: data, sent: func() { close(left) }, conn: conn}); err != nil {
		return err
	}
	select {
	case <-left:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// failed ends the stream for a failure of the connection. That the client left
// is none.
func (a *adaptedStream) failed(what string, err error) {
	if status.Code(err) != codes.Canceled && a.stream.Context().Err() == nil {
		a.s.metrics.streamFailed(what, a.api)
	}
	a.end(err)
}
