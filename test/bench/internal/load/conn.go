package load

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/engram-kv/engram/bench/wire"
)

const dialWithin = time.Second

// Conn is a connection whose calls end in functions. Callbacks of one Conn run one after another, on its reader, and must
// not close it.
type Conn struct{ c *wire.Conn }

// Dial connects to a server at host:port.
func Dial(address string) (*Conn, error) {
	c, err := wire.Dial(context.Background(), "tcp", address, wire.Options{Within: dialWithin})
	if err != nil {
		return nil, err
	}
	return &Conn{c}, nil
}

// Close ends the connection and every open call.
func (c *Conn) Close() { c.c.Close() }

// unary is a call that ends in a function.
type unary struct {
	call wire.Call
	body []byte
	done func(body []byte, err error)
}

var unaries = sync.Pool{New: func() any {
	u := &unary{}
	u.call.Handler = u
	return u
}}

func (u *unary) Message(_ *wire.Call, m []byte)  { u.body = append(u.body[:0], m...) }
func (u *unary) Piece(*wire.Call, []byte, bool)  {}
func (u *unary) End(_ *wire.Call, e *wire.Error) { u.end(e) }

func (u *unary) end(e *wire.Error) {
	done, body := u.done, u.body
	if e != nil {
		done(nil, e)
	} else {
		done(body, nil)
	}
	u.done = nil
	unaries.Put(u) // only now: the body is valid during the callback
}

// Call sends a unary request and returns; done is called once with the answer, which is valid only during the callback.
// The request is copied.
func (c *Conn) Call(path string, request []byte, done func(body []byte, err error)) {
	u := unaries.Get().(*unary)
	u.done, u.body = done, u.body[:0]
	if err := c.c.Start(&u.call, path, request, true); err != nil {
		u.end(err)
	}
}

// Do is Call that waits. The answer is the caller's.
func (c *Conn) Do(path string, request []byte, within time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	answer, err := c.c.Do(ctx, path, request)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return answer, nil
}

// Stream is an open call that sends and receives many messages.
type Stream struct {
	c       *Conn
	call    wire.Call
	message func([]byte)
	done    func(error)
}

func (s *Stream) Message(_ *wire.Call, m []byte) { s.message(m) }
func (s *Stream) Piece(*wire.Call, []byte, bool) {}

func (s *Stream) End(_ *wire.Call, e *wire.Error) {
	if e != nil {
		s.done(e)
		return
	}
	s.done(errors.New("the server ended the stream"))
}

// Open starts a stream. message is called with each message, valid only during the callback; done once, at the end.
func (c *Conn) Open(path string, first []byte, message func([]byte), done func(error)) *Stream {
	s := &Stream{c: c, message: message, done: done}
	s.call.Handler = s
	if err := c.c.Start(&s.call, path, first, false); err != nil {
		done(err)
	}
	return s
}

// Send sends one more message. If that fails, done tells.
func (s *Stream) Send(message []byte) { _ = s.c.c.Send(&s.call, message) }
