package rpc

import (
	"context"
	"strings"
	"time"
	"unicode/utf8"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// Handler serves a unary method. Raw is the request's message and belongs to
// the handler. Reply is called exactly once, from any goroutine, with the
// encoded response or an error of errors.go's kind; the response then belongs
// to the transport. A Handler never blocks.
type Handler func(call *Call, raw []byte, reply func(raw []byte, err error))

// Send sends one message of a stream. It blocks while the client's flow control
// asks for it and returns the call's error once the call is over. Sent, if not
// nil, is called once in any case, when raw is no longer in memory.
type Send func(raw []byte, sent func()) error

// SenderHandler serves a method that answers one request with many messages.
// It runs on a goroutine of its own.
type SenderHandler func(call *Call, raw []byte, send Send) error

// Metadata is what a client sent along with a call. Keys are lower case.
type Metadata map[string][]string

// first returns the first value of a key.
func (m Metadata) first(key string) string {
	if v := m[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// Call is one call of a method, or one stream.
type Call struct {
	// Method is the full name, "/etcdserverpb.KV/Put".
	Method   string
	Metadata Metadata
	// CommonName is that of the leaf of a verified client certificate, if any.
	CommonName string

	ctx  context.Context
	sent func()
}

// NewCall returns a call that ends with ctx.
func NewCall(ctx context.Context, method string, md Metadata) *Call {
	return &Call{Method: method, Metadata: md, ctx: ctx}
}

// Context ends when the client gives up or the deadline passes.
func (c *Call) Context() context.Context { return c.ctx }

// deadline is the earlier of the client's deadline and now+limit.
func (c *Call) deadline(now time.Time, limit time.Duration) time.Time {
	d := now.Add(limit)
	if own, ok := c.ctx.Deadline(); ok && own.Before(d) {
		return own
	}
	return d
}

// onSent has fn run once the response's bytes are out of this process' memory.
// It is called before reply, at most once.
func (c *Call) onSent(fn func()) { c.sent = fn }

// Sent is called by the transport, once, after it was given a response and has
// no more need of its bytes, be it because they are sent or dropped.
func (c *Call) Sent() {
	if c.sent != nil {
		c.sent()
	}
}

// requiresLeader says that the client wants no answer from a member that knows
// no leader.
func (m Metadata) requiresLeader() bool {
	return m.first(rpctypes.MetadataRequireLeaderKey) == rpctypes.MetadataHasLeader
}

// clientVersion returns the API version that the client states.
func (m Metadata) clientVersion() (string, error) {
	v := m.first(rpctypes.MetadataClientAPIVersionKey)
	if v == "" {
		return "unknown", nil
	}
	if !utf8.ValidString(v) {
		return "", rpctypes.ErrGRPCInvalidClientAPIVersion
	}
	return v, nil
}

// token returns the auth token, "" if there is none.
func (m Metadata) token() string {
	t := m.first(rpctypes.TokenFieldNameGRPC)
	if t == "" {
		t = m.first(rpctypes.TokenFieldNameSwagger)
	}
	return strings.TrimPrefix(t, "Bearer ")
}

// fromGateway says that the JSON gateway made the call, whose certificate is
// not the client's.
func (m Metadata) fromGateway() bool { return len(m["grpcgateway-accept"]) > 0 }
