package grpcserver

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// Call is one call of a method, or one stream. It may be kept after the call is
// over, and is then the same as ever.
type Call struct {
	// Method is the full name, "/etcdserverpb.KV/Put".
	Method string

	md       *Metadata
	conn     *conn           // nil if made by NewCall
	ctx      context.Context // made by NewCall; nil on a connection
	deadline time.Time       // zero for none

	sent  func()
	rest  Body
	ended atomic.Uint32 // see ending
	life  atomic.Pointer[life]
}

// Values of Call.ended.
const (
	endNot uint32 = iota
	endCanceled
	endDeadline
)

// life is what a call needs once somebody waits for its end.
type life struct {
	mu    sync.Mutex
	done  chan struct{}
	over  bool
	after map[*func()]struct{}
}

// NewCall returns a call that ends with ctx, for a transport that is not this
// package's. Such a transport calls Whole and Sent.
func NewCall(ctx context.Context, method string, md map[string][]string) *Call {
	c := &Call{Method: method, md: newMetadata(md)}
	c.deadline, _ = ctx.Deadline()
	c.ctx = WithCall(ctx, c)
	return c
}

// Metadata is what the client sent along. It is shared with other calls.
func (c *Call) Metadata() *Metadata { return c.md }

// CommonName is that of the leaf of a verified client certificate, "" if there
// is none.
func (c *Call) CommonName() string {
	if c.conn != nil {
		return c.conn.commonName
	}
	if p, ok := peer.FromContext(c.ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.VerifiedChains) > 0 {
			return info.State.VerifiedChains[0][0].Subject.CommonName
		}
	}
	return ""
}

// RemoteAddr is the client's address, nil if it is not known.
func (c *Call) RemoteAddr() net.Addr {
	if c.conn != nil {
		return c.conn.remote
	}
	if p, ok := peer.FromContext(c.ctx); ok {
		return p.Addr
	}
	return nil
}

// Deadline is the client's, and false if it has none.
func (c *Call) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

// Err is nil until the call is over, then context.Canceled or
// context.DeadlineExceeded.
func (c *Call) Err() error {
	if c.ctx != nil {
		return c.ctx.Err()
	}
	switch c.ended.Load() {
	case endNot:
		return nil
	case endDeadline:
		return context.DeadlineExceeded
	}
	return context.Canceled
}

// OnSent has fn run once the bytes of the response have left memory or were
// dropped. It is called before the reply, at most once. Fn must not block.
func (c *Call) OnSent(fn func()) { c.sent = fn }

// Body is a part of a response that is made as it is sent.
type Body interface {
	// Size is its length in bytes.
	Size() int
	// Fill writes the next bytes of it to p, as many as fit; p is never longer than
	// what is left. It does not block. Only one call is made at a time.
	Fill(p []byte)
}

// Follow has the response go on with b behind what is replied. It is called before
// the reply, at most once.
func (c *Call) Follow(b Body) { c.rest = b }

// Whole returns a response in one slice, for a transport that is not this
// package's: what was replied, and what follows it.
func (c *Call) Whole(raw []byte) []byte {
	if c.rest == nil {
		return raw
	}
	n := len(raw)
	whole := append(make([]byte, 0, n+c.rest.Size()), raw...)[:n+c.rest.Size()]
	c.rest.Fill(whole[n:])
	c.rest = nil
	return whole
}

// Sent is called by a transport, once, after it was given a response and has no
// more need of its bytes.
func (c *Call) Sent() {
	if fn := c.sent; fn != nil {
		c.sent = nil
		fn()
	}
}

// Context ends when the call does: with its reply, when the client gives up or
// goes, when its deadline passes. Who does not wait for that pays nothing for it.
func (c *Call) Context() context.Context {
	if c.ctx != nil {
		return c.ctx
	}
	return (*callContext)(c)
}

// finish ends the call; the first reason counts.
func (c *Call) finish(why uint32) {
	if !c.ended.CompareAndSwap(endNot, why) {
		return
	}
	if l := c.life.Load(); l != nil {
		l.end()
	}
}

func (l *life) end() {
	l.mu.Lock()
	if l.over {
		l.mu.Unlock()
		return
	}
	l.over = true
	close(l.done)
	after := l.after
	l.after = nil
	l.mu.Unlock()
	for fn := range after {
		go (*fn)()
	}
}

// alive returns the call's life, made at the first need.
func (c *Call) alive() *life {
	l := c.life.Load()
	if l == nil {
		l = &life{done: make(chan struct{})}
		if !c.life.CompareAndSwap(nil, l) {
			l = c.life.Load()
		}
	}
	if c.ended.Load() != endNot {
		l.end() // finish may have looked before it was there
	}
	return l
}

// callContext is a call as a context.
type callContext Call

// Deadline implements context.Context.
func (c *callContext) Deadline() (time.Time, bool) { return (*Call)(c).Deadline() }

// Done implements context.Context.
func (c *callContext) Done() <-chan struct{} { return (*Call)(c).alive().done }

// Err implements context.Context.
func (c *callContext) Err() error { return (*Call)(c).Err() }

// Value implements context.Context.
func (c *callContext) Value(key any) any {
	if key == (callKey{}) {
		return (*Call)(c)
	}
	return nil
}

// AfterFunc has fn run when the call is over. Package context looks for it, and
// then needs no goroutine to derive a context.
func (c *callContext) AfterFunc(fn func()) (stop func() bool) {
	l := (*Call)(c).alive()
	key := &fn
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		go fn()
		return func() bool { return false }
	}
	if l.after == nil {
		l.after = map[*func()]struct{}{}
	}
	l.after[key] = struct{}{}
	return func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		_, waits := l.after[key]
		delete(l.after, key)
		return waits
	}
}

type callKey struct{}

// WithCall returns a context from which CallFrom takes call.
func WithCall(ctx context.Context, call *Call) context.Context {
	return context.WithValue(ctx, callKey{}, call)
}

// CallFrom returns the call that a handler of a generated service is serving,
// nil if ctx is of none.
func CallFrom(ctx context.Context) *Call {
	c, _ := ctx.Value(callKey{}).(*Call)
	return c
}

// Metadata is what a client sent along with a call. It does not change.
type Metadata struct {
	values map[string][]string
	cached atomic.Pointer[any]
}

func newMetadata(values map[string][]string) *Metadata { return &Metadata{values: values} }

// First returns the first value of a key, which is in lower case, "" if there is
// none.
func (m *Metadata) First(key string) string {
	if v := m.values[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// Values returns all values of a key. They must not be changed.
func (m *Metadata) Values(key string) []string { return m.values[key] }

// Cache returns what made returned the first time that it was asked. Calls with
// the same header fields share it, so what is worked out from them can be had
// for a pointer.
func (m *Metadata) Cache(made func() any) any {
	if v := m.cached.Load(); v != nil {
		return *v
	}
	return m.fill(made())
}

func (m *Metadata) fill(v any) any {
	if m.cached.CompareAndSwap(nil, &v) {
		return v
	}
	return *m.cached.Load()
}
