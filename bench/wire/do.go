package wire

import (
	"bytes"
	"context"

	"google.golang.org/grpc/codes"
)

// Do makes a unary call and waits for its answer, which is the caller's. It is for calls that need not be cheap.
func (c *Conn) Do(ctx context.Context, method string, request []byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, &Error{Code: codes.DeadlineExceeded, Message: "not called: " + err.Error()}
	}
	d := &do{ended: make(chan *Error, 1)}
	d.call.Handler = d
	if err := c.Start(&d.call, method, request, true); err != nil {
		return nil, err
	}
	var err *Error
	select {
	case err = <-d.ended:
	case <-ctx.Done():
		c.Cancel(&d.call, codes.DeadlineExceeded, "no answer: "+ctx.Err().Error())
		err = <-d.ended
	}
	switch {
	case err != nil:
		return nil, err
	case !d.got:
		return nil, &Error{Code: codes.Internal, Message: "status OK, but no message"}
	}
	return d.answer, nil
}

// do is the handler of one such call.
type do struct {
	call   Call
	answer []byte
	got    bool
	ended  chan *Error
}

func (d *do) Message(_ *Call, m []byte) { d.answer, d.got = bytes.Clone(m), true }
func (d *do) Piece(*Call, []byte, bool) {}
func (d *do) End(_ *Call, err *Error)   { d.ended <- err }
