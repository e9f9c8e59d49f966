package grpcserver

import (
	"context"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// This file serves what needs a goroutine for each call: generated services, and
// methods with a SenderHandler.

// goServe runs serve on a goroutine of its own, if there may be one more.
func (srv *Server) goServe(s *stream, serve func()) {
	c := s.conn
	own, all := c.goroutines.Add(1), srv.goroutines.Add(1)
	over := func() {
		c.goroutines.Add(-1)
		srv.goroutines.Add(-1)
	}
	if own > maxGoroutines/heldShare || all > maxGoroutines {
		over()
		srv.limited(limitGoroutines, "remote", c.remote)
		s.endGo(status.Errorf(codes.ResourceExhausted, "grpc: the server is serving %d calls of this kind already, %d of this connection; try again later", all-1, own-1), nil)
		return
	}
	srv.handlers.Go(func() {
		defer over()
		serve()
	})
}

// serveSender serves a call of a method with a SenderHandler.
func (s *stream) serveSender(raw []byte) {
	s.endGo(s.m.sender(&s.Call, raw, s.send), nil)
}

// send is Send for one call.
func (s *stream) send(raw []byte, sent func()) error {
	err := s.sendMessage(raw, sent)
	if err == nil && s.m.stats != nil {
		s.m.stats.Sent(len(raw))
	}
	return err
}

// sendMessage queues a message once there is room for it. Sent is called in any
// case.
func (s *stream) sendMessage(raw []byte, sent func()) error {
	c := s.conn
	if len(raw) > c.s.o.MaxSendBytes {
		if sent != nil {
			sent()
		}
		return status.Errorf(codes.ResourceExhausted, "grpc: trying to send message larger than max (%d vs. %d)", len(raw), c.s.o.MaxSendBytes)
	}
	compressed := false
	if s.packs(len(raw)) {
		raw, compressed = pack(raw), true
	}
	it := newItem(Message{Head: raw}, nil, compressed)
	it.fn = sent
	if !s.push(it) {
		return s.callError(s.Err())
	}
	return nil
}

// push waits for room and queues an item. It returns false if the call is over, or
// its connection is to end; then the item's sender is told.
func (s *stream) push(it outItem) bool {
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.telling++
	defer c.toldOne()
	if s.sender == nil {
		s.sender = sync.NewCond(&c.mu)
	}
	for s.q != nil && s.q.bytes > streamAhead && !s.gone.Load() && s.Err() == nil {
		s.sender.Wait()
	}
	if s.gone.Load() || s.Err() != nil || c.failure != nil {
		if it.fn != nil {
			c.mu.Unlock()
			it.fn()
			c.mu.Lock()
		}
		return false
	}
	c.enqueue(s, it)
	c.kick()
	if c.overfull() {
		full := calm(limitOutput, "answers are not read")
		c.doom(full) // or others would add to it till this goroutine runs again
		c.mu.Unlock()
		c.fail(full)
		c.mu.Lock()
	}
	return true
}

// callError is what a call that is over returns to who goes on with it.
func (s *stream) callError(err error) error {
	if err == nil { // the stream is gone, and over is about to say so
		s.Call.finish(endCanceled)
	}
	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	switch {
	case s.cut != nil:
		return s.cut
	case err == nil:
		err = context.Canceled
	}
	return status.FromContextError(err).Err()
}

// endGo ends a call that a goroutine served.
func (s *stream) endGo(err error, trailer metadata.MD) {
	c := s.conn
	c.mu.Lock()
	if s.cut != nil {
		err = s.cut
	}
	st := statusOf(err)
	if !s.gone.Load() {
		c.conclude(s, appendTrailer(nil, st, trailer))
		c.kick()
	}
	c.mu.Unlock()
	if s.m != nil && s.m.goUnary != nil {
		c.answeredOne()
	}
	s.forgotten()
	s.release()
	s.settle(st.Code())
}

// transportStream is a call as the functions of package grpc know it: SetHeader,
// SendHeader, SetTrailer, Method.
type transportStream struct {
	s *stream

	mu              sync.Mutex
	header, trailer metadata.MD
	sent            bool
}

// Method implements grpc.ServerTransportStream.
func (t *transportStream) Method() string { return t.s.Method }

// SetHeader implements grpc.ServerTransportStream.
func (t *transportStream) SetHeader(md metadata.MD) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(md) == 0 {
		return nil
	}
	if err := validMetadata(md); err != nil {
		return err
	}
	if t.sent {
		return errHeaderSent
	}
	t.header = metadata.Join(t.header, md)
	return nil
}

var errHeaderSent = status.Error(codes.Internal, "transport: SendHeader called multiple times")

// SendHeader implements grpc.ServerTransportStream.
func (t *transportStream) SendHeader(md metadata.MD) error {
	if err := validMetadata(md); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.sent {
		return errHeaderSent
	}
	t.header = metadata.Join(t.header, md)
	t.begin(true)
	return nil
}

// begin fixes the header block, and sends it if now is set. The lock is held.
func (t *transportStream) begin(now bool) {
	if t.sent {
		return
	}
	t.sent = true
	c := t.s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.s.gone.Load() {
		return
	}
	if len(t.header) > 0 {
		t.s.head = appendMetadata(append([]byte(nil), t.s.req.head...), t.header, false)
	}
	if now {
		c.sendHead(t.s)
		c.kick()
	}
}

// SetTrailer implements grpc.ServerTransportStream.
func (t *transportStream) SetTrailer(md metadata.MD) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trailer = metadata.Join(t.trailer, md)
	return nil
}

// end ends the call with what the handler returned.
func (t *transportStream) end(err error) {
	t.mu.Lock()
	t.begin(len(t.header) > 0)
	trailer := t.trailer
	t.mu.Unlock()
	t.s.endGo(err, trailer)
}

// validMetadata says why metadata cannot be sent.
func validMetadata(md metadata.MD) error {
	for k, vs := range md {
		if k == "" {
			return status.Error(codes.Internal, "there is an empty key in the header")
		}
		if k[0] == ':' {
			continue
		}
		for i := range len(k) {
			if c := k[i]; !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '.' || c == '-' || c == '_') {
				return status.Error(codes.Internal, fmt.Sprintf("header key %q contains illegal characters not in [0-9a-z-_.]", k))
			}
		}
		if kindOf(k, "") == kindBinary {
			continue
		}
		for _, v := range vs {
			for i := range len(v) {
				if v[i] < ' ' || v[i] > '~' {
					return status.Error(codes.Internal, fmt.Sprintf("header key %q contains value with non-printable ASCII characters", k))
				}
			}
		}
	}
	return nil
}

// context returns the context of a handler of a generated service.
func (t *transportStream) context() context.Context {
	s := t.s
	ctx := metadata.NewIncomingContext(s.Context(), s.md.values)
	ctx = peer.NewContext(ctx, s.conn.peer())
	return grpc.NewContextWithServerTransportStream(ctx, t)
}

// peer describes the client.
func (c *conn) peer() *peer.Peer {
	p := &peer.Peer{Addr: c.remote, LocalAddr: c.nc.LocalAddr()}
	if c.tls != nil {
		p.AuthInfo = credentials.TLSInfo{
			State:          *c.tls,
			CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
		}
	}
	return p
}

// serveUnary serves a unary call of a generated service.
func (s *stream) serveUnary(raw []byte) {
	srv := s.conn.s
	t := &transportStream{s: s}
	if srv.o.Bytes != nil {
		srv.o.Bytes(len(raw), 0)
	}
	decode := func(v any) error {
		if err := unmarshal(raw, v); err != nil {
			return status.Errorf(codes.Internal, "grpc: error unmarshalling request: %v", err)
		}
		return nil
	}
	out, err := s.m.goUnary(s.m.impl, t.context(), decode, srv.o.UnaryInterceptor)
	var answer []byte
	if err == nil {
		answer, err = marshal(out)
	}
	if err == nil {
		t.mu.Lock()
		t.begin(false)
		t.mu.Unlock()
		if err = s.sendMessage(answer, nil); err == nil && srv.o.Bytes != nil {
			srv.o.Bytes(0, len(answer))
		}
	}
	t.end(err)
}

// serveStream serves a stream of a generated service.
func (s *stream) serveStream() {
	srv := s.conn.s
	t := &transportStream{s: s}
	ss := &serverStream{transportStream: t, ctx: t.context()}
	var err error
	if d := s.m.goStream; srv.o.StreamInterceptor == nil {
		err = d.Handler(s.m.impl, ss)
	} else {
		info := &grpc.StreamServerInfo{FullMethod: s.Method, IsClientStream: d.ClientStreams, IsServerStream: d.ServerStreams}
		err = srv.o.StreamInterceptor(s.m.impl, ss, info, d.Handler)
	}
	t.end(err)
}

// serverStream is grpc.ServerStream.
type serverStream struct {
	*transportStream
	ctx context.Context
	got bool // a message
}

// Context implements grpc.ServerStream.
func (ss *serverStream) Context() context.Context { return ss.ctx }

// SetTrailer implements grpc.ServerStream.
func (ss *serverStream) SetTrailer(md metadata.MD) { _ = ss.transportStream.SetTrailer(md) }

// SendMsg implements grpc.ServerStream.
func (ss *serverStream) SendMsg(v any) error {
	raw, err := marshal(v)
	if err != nil {
		return err
	}
	ss.mu.Lock()
	ss.begin(false)
	ss.mu.Unlock()
	if err := ss.s.sendMessage(raw, nil); err != nil {
		return err
	}
	if count := ss.s.conn.s.o.Bytes; count != nil {
		count(0, len(raw))
	}
	return nil
}

// RecvMsg implements grpc.ServerStream.
func (ss *serverStream) RecvMsg(v any) error {
	single := !ss.s.m.goStream.ClientStreams
	raw, err := ss.s.inbox.message()
	switch {
	case err == io.EOF && single && !ss.got:
		return status.Error(codes.Internal, "cardinality violation: received no request message from non-client-streaming RPC")
	case err != nil:
		return err
	}
	ss.got = true
	if count := ss.s.conn.s.o.Bytes; count != nil {
		count(len(raw), 0)
	}
	if err := unmarshal(raw, v); err != nil {
		return status.Errorf(codes.Internal, "grpc: failed to unmarshal the received message: %v", err)
	}
	if !single {
		return nil
	}
	switch _, err := ss.s.inbox.message(); {
	case err == io.EOF:
		return nil
	case err != nil:
		return err
	}
	return status.Error(codes.Internal, "cardinality violation: received multiple request messages for non-client-streaming RPC")
}
