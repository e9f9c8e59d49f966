package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
)

const (
	readBytes = 256 << 10
	// maxMessage is the longest message that is sent, or taken whole.
	maxMessage = 1 << 30
)

// reader is what the reading goroutine owns.
type reader struct {
	c       *Conn
	buf     []byte
	end     int // of what was read and is not yet taken
	headers *headerReader
	block   []byte // header block that goes on in CONTINUATION frames
	blockID uint32 // its stream; 0: none is open
	blockES bool   // it ends the stream
	taken   int    // bytes since the connection's last window update
	begun   bool   // the server's first settings have come
}

// read takes frames until the connection ends, and then ends every call.
func (c *Conn) read() {
	r := &reader{c: c, buf: make([]byte, readBytes), headers: newHeaderReader()}
	err := r.loop()
	c.mu.Lock()
	if c.err == nil {
		c.err = err
		if c.draining != nil {
			c.err = errors.New(c.draining.Message)
		}
	}
	err = c.err
	var open []*Call
	for _, k := range c.ring {
		if k != nil {
			open = append(open, k)
		}
	}
	for _, k := range c.others {
		open = append(open, k)
	}
	// In the order in which they began: a user that makes them again makes them in the same order.
	slices.SortFunc(open, func(a, b *Call) int { return int(a.id) - int(b.id) })
	open = append(open, c.waiting...)
	c.ring, c.others, c.waiting, c.blocked, c.posted, c.buf = [ringSize]*Call{}, nil, nil, nil, nil, nil
	for _, k := range open {
		k.conn, k.id = nil, 0
	}
	c.mu.Unlock()
	c.nc.Close()
	if !r.begun {
		close(c.ready)
	}
	for _, k := range open {
		k.Handler.End(k, unavailable("%v", err))
	}
	if c.onClose != nil {
		c.onClose(err)
	}
	close(c.closed)
}

func (r *reader) loop() error {
	for {
		n, err := r.c.nc.Read(r.buf[r.end:])
		r.c.received.Add(int64(n))
		r.end += n
		if n > 0 {
			if err := r.burst(); err != nil {
				return err
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) { // somebody posted
			r.runPosted()
			continue
		}
		if err != nil {
			return fmt.Errorf("reading from %s: %w", r.c.address, err)
		}
	}
}

func (r *reader) runPosted() {
	c := r.c
	c.mu.Lock()
	posted := c.posted
	c.posted = nil
	c.nc.SetReadDeadline(time.Time{}) // should it fail, the next Read does
	c.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// burst takes all whole frames that are there. What their callbacks send is written once, at the end.
func (r *reader) burst() error {
	r.c.Hold()
	defer r.c.Release()
	b := r.buf[:r.end]
	for len(b) >= frameHeader {
		n := int(b[0])<<16 | int(b[1])<<8 | int(b[2])
		if n > frameMax {
			if !r.begun && string(b[:5]) == "HTTP/" {
				return errors.New("the server speaks HTTP/1, not gRPC")
			}
			return fmt.Errorf("a frame of %d bytes, where at most %d were allowed: this is no gRPC server, or one that breaks the protocol", n, frameMax)
		}
		if len(b) < frameHeader+n {
			break
		}
		f := frame{
			kind: http2.FrameType(b[3]), flags: http2.Flags(b[4]),
			stream: binary.BigEndian.Uint32(b[5:]) & (1<<31 - 1), payload: b[frameHeader : frameHeader+n],
		}
		if err := r.frame(f); err != nil {
			return err
		}
		b = b[frameHeader+n:]
	}
	r.end = copy(r.buf, b)
	return nil
}

type frame struct {
	kind    http2.FrameType
	flags   http2.Flags
	stream  uint32
	payload []byte
}

func (f frame) wrong(what string) error {
	return fmt.Errorf("the server breaks the protocol: %v frame of stream %d: %s", f.kind, f.stream, what)
}

func (r *reader) frame(f frame) error {
	if r.blockID != 0 && (f.kind != http2.FrameContinuation || f.stream != r.blockID) {
		return f.wrong("headers are not complete")
	}
	if !r.begun && f.kind != http2.FrameSettings {
		return f.wrong("settings must come first")
	}
	switch f.kind {
	case http2.FrameData:
		return r.data(f)
	case http2.FrameHeaders:
		return r.beginBlock(f)
	case http2.FrameContinuation:
		if r.blockID == 0 {
			return f.wrong("no headers are open")
		}
		return r.addBlock(f, f.payload)
	case http2.FrameRSTStream:
		return r.reset(f)
	case http2.FrameSettings:
		return r.settings(f)
	case http2.FramePing:
		return r.ping(f)
	case http2.FrameGoAway:
		return r.goAway(f)
	case http2.FrameWindowUpdate:
		return r.windowUpdate(f)
	case http2.FramePushPromise:
		return f.wrong("push was not allowed")
	}
	return nil // unknown kinds are to be ignored
}

// padded takes away padding.
func (f frame) padded() ([]byte, error) {
	if f.flags&http2.FlagDataPadded == 0 {
		return f.payload, nil
	}
	if len(f.payload) == 0 || int(f.payload[0]) >= len(f.payload) {
		return nil, f.wrong("more padding than there is")
	}
	return f.payload[1 : len(f.payload)-int(f.payload[0])], nil
}

func (r *reader) data(f frame) error {
	data, err := f.padded()
	if err != nil {
		return err
	}
	n := len(f.payload)
	c := r.c
	c.mu.Lock()
	if r.taken += n; r.taken > connWindow/2 {
		c.buf = appendWindow(c.buf, 0, r.taken)
		r.taken = 0
	}
	k := c.lookup(f.stream)
	if k == nil {
		if f.stream == 0 || f.stream >= c.nextID || f.stream%2 == 0 {
			err = f.wrong("there was no such stream")
		}
		c.mu.Unlock()
		return err // or closed by us
	}
	end := f.flags.Has(http2.FlagDataEndStream)
	if k.taken += n; k.taken > streamWindow/2 && !end {
		c.buf = appendWindow(c.buf, k.id, k.taken)
		k.taken = 0
	}
	c.mu.Unlock()
	if !k.answered {
		return r.finish(k, &Error{Code: codes.Internal, Message: "data before headers"})
	}
	if wrong := k.take(data); wrong != nil {
		return r.finish(k, wrong)
	}
	if end {
		return r.finish(k, &Error{Code: codes.Internal, Message: "the response ends without trailers"})
	}
	return nil
}

// take cuts messages out of a stream's bytes. A whole message at hand is not copied.
func (k *Call) take(b []byte) *Error {
	for len(b) > 0 {
		if k.prefixed < prefixBytes {
			n := copy(k.prefix[k.prefixed:], b)
			b = b[n:]
			if k.prefixed += n; k.prefixed < prefixBytes {
				return nil
			}
			if k.prefix[0] != 0 {
				return &Error{Code: codes.Internal, Message: fmt.Sprintf("message with flags %#x: compression was not offered", k.prefix[0])}
			}
			size := binary.BigEndian.Uint32(k.prefix[1:])
			if size > maxMessage && !k.Pieces {
				return &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("message of %d bytes: at most %d are taken", size, maxMessage)}
			}
			k.left = int(size)
			if k.left == 0 {
				k.prefixed = 0
				if k.Pieces {
					k.Handler.Piece(k, nil, true)
				} else {
					k.Handler.Message(k, nil)
				}
				continue
			}
		}
		n := min(k.left, len(b))
		p := b[:n]
		b = b[n:]
		k.left -= n
		if k.left == 0 {
			k.prefixed = 0
		}
		switch {
		case k.Pieces:
			k.Handler.Piece(k, p, k.left == 0)
		case k.left == 0 && len(k.part) == 0:
			k.Handler.Message(k, p)
		default:
			k.part = append(k.part, p...)
			if k.left == 0 {
				k.Handler.Message(k, k.part)
				if k.part = k.part[:0]; cap(k.part) > keepBytes {
					k.part = nil
				}
			}
		}
	}
	return nil
}

func (r *reader) beginBlock(f frame) error {
	b, err := f.padded()
	if err != nil {
		return err
	}
	if f.flags.Has(http2.FlagHeadersPriority) {
		if len(b) < 5 {
			return f.wrong("too short")
		}
		b = b[5:]
	}
	r.blockID, r.blockES = f.stream, f.flags.Has(http2.FlagHeadersEndStream)
	if f.flags.Has(http2.FlagHeadersEndHeaders) {
		r.blockID = 0
		return r.response(f, b)
	}
	return r.addBlock(f, b)
}

func (r *reader) addBlock(f frame, b []byte) error {
	if len(r.block)+len(b) > maxBlock {
		return f.wrong(fmt.Sprintf("headers of more than %d bytes", maxBlock))
	}
	r.block = append(r.block, b...)
	if !f.flags.Has(http2.FlagContinuationEndHeaders) {
		return nil
	}
	r.blockID = 0
	err := r.response(f, r.block)
	r.block = r.block[:0]
	return err
}

func (r *reader) response(f frame, block []byte) error {
	h, err := r.headers.read(block)
	if err != nil {
		return f.wrong(err.Error())
	}
	r.c.mu.Lock()
	k := r.c.lookup(f.stream)
	r.c.mu.Unlock()
	if k == nil {
		return nil // closed by us; a stream that never was does no harm here
	}
	if !k.answered {
		if len(h.http) == 3 && h.http[0] == '1' && !r.blockES {
			return nil // informational
		}
		if wrong := h.wrong(); wrong != nil {
			return r.finish(k, wrong)
		}
		k.answered = true
	}
	if !r.blockES {
		return nil
	}
	if k.prefixed != 0 && h.code == 0 {
		return r.finish(k, &Error{Code: codes.Internal, Message: "the response ends within a message"})
	}
	return r.finish(k, h.status())
}

// finish ends a call and its stream.
func (r *reader) finish(k *Call, end *Error) error {
	c := r.c
	c.mu.Lock()
	r.close(k)
	var drained error
	if c.draining != nil && c.open == 0 {
		drained = errors.New(c.draining.Message)
	}
	c.mu.Unlock()
	k.Handler.End(k, end)
	return drained
}

// close takes a call off the books. c.mu is held. A stream that we had not ended, or that the server may go on with, is
// reset; at worst that crosses the server's own end of it.
func (r *reader) close(k *Call) {
	if !k.ended || k.prefixed != 0 {
		r.c.buf = appendReset(r.c.buf, k.id, http2.ErrCodeCancel)
	}
	r.c.remove(k)
}

func (r *reader) reset(f frame) error {
	if len(f.payload) != 4 || f.stream == 0 {
		return f.wrong("not as it must be")
	}
	r.c.mu.Lock()
	k := r.c.lookup(f.stream)
	if k == nil {
		r.c.mu.Unlock()
		return nil
	}
	k.ended, k.prefixed = true, 0 // or it would be reset back
	r.c.mu.Unlock()
	reason := http2.ErrCode(binary.BigEndian.Uint32(f.payload))
	code := codes.Internal
	switch reason { // as gRPC's table has it
	case http2.ErrCodeRefusedStream:
		code = codes.Unavailable
	case http2.ErrCodeCancel:
		code = codes.Canceled
	case http2.ErrCodeEnhanceYourCalm:
		code = codes.ResourceExhausted
	case http2.ErrCodeInadequateSecurity:
		code = codes.PermissionDenied
	}
	return r.finish(k, &Error{Code: code, Message: "the server reset the stream: " + reason.String()})
}

func (r *reader) settings(f frame) error {
	if f.flags.Has(http2.FlagSettingsAck) {
		return nil
	}
	if len(f.payload)%6 != 0 || f.stream != 0 {
		return f.wrong("not as it must be")
	}
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for b := f.payload; len(b) > 0; b = b[6:] {
		value := binary.BigEndian.Uint32(b[2:])
		switch id := http2.SettingID(binary.BigEndian.Uint16(b)); id {
		case http2.SettingHeaderTableSize:
			c.header.limitTable(value)
		case http2.SettingMaxConcurrentStreams:
			c.streamsMost = value
		case http2.SettingInitialWindowSize:
			if value > maxWindow {
				return f.wrong(fmt.Sprintf("initial window of %d", value))
			}
			c.moveWindows(int64(value) - c.streamFirst)
			c.streamFirst = int64(value)
		case http2.SettingMaxFrameSize:
			if value < frameMax || value > 1<<24-1 {
				return f.wrong(fmt.Sprintf("largest frame of %d", value))
			}
			c.frameMost = int(value)
		}
	}
	c.buf = appendFrameHeader(c.buf, 0, http2.FrameSettings, http2.FlagSettingsAck, 0)
	if !r.begun {
		r.begun = true
		close(c.ready)
	}
	c.unblock()
	return nil
}

// moveWindows moves those of open streams; they may fall below zero.
func (c *Conn) moveWindows(by int64) {
	for _, k := range c.ring {
		if k != nil {
			k.window += by
		}
	}
	for _, k := range c.others {
		k.window += by
	}
}

func (r *reader) ping(f frame) error {
	if len(f.payload) != 8 || f.stream != 0 {
		return f.wrong("not as it must be")
	}
	if f.flags.Has(http2.FlagPingAck) {
		return nil
	}
	r.c.mu.Lock()
	r.c.buf = appendFrameHeader(r.c.buf, 8, http2.FramePing, http2.FlagPingAck, 0)
	r.c.buf = append(r.c.buf, f.payload...)
	r.c.mu.Unlock()
	return nil
}

// goAway lets calls that the server will still answer go on, and ends the others.
func (r *reader) goAway(f frame) error {
	if len(f.payload) < 8 || f.stream != 0 {
		return f.wrong("not as it must be")
	}
	c := r.c
	last := binary.BigEndian.Uint32(f.payload) & (1<<31 - 1)
	reason := http2.ErrCode(binary.BigEndian.Uint32(f.payload[4:]))
	why := unavailable("the server says goodbye: %v %s", reason, f.payload[8:min(len(f.payload), 8+256)])
	c.mu.Lock()
	c.draining = why
	lost := c.waiting
	c.waiting = nil
	for _, k := range lost {
		k.conn = nil
	}
	var open []*Call
	for _, k := range c.ring {
		open = append(open, k)
	}
	for _, k := range c.others {
		open = append(open, k)
	}
	for _, k := range open {
		if k != nil && k.id > last {
			k.ended, k.prefixed = true, 0 // the server does not know the stream
			r.close(k)
			lost = append(lost, k)
		}
	}
	none := c.open == 0
	c.mu.Unlock()
	for _, k := range lost {
		k.Handler.End(k, why)
	}
	if none {
		return errors.New(why.Message)
	}
	return nil
}

func (r *reader) windowUpdate(f frame) error {
	if len(f.payload) != 4 {
		return f.wrong("not as it must be")
	}
	by := int64(binary.BigEndian.Uint32(f.payload) & (1<<31 - 1))
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if f.stream == 0 {
		if c.window += by; c.window > maxWindow {
			return f.wrong("the window overflows")
		}
	} else if k := c.lookup(f.stream); k != nil {
		k.window += by
	}
	if len(c.blocked) > 0 {
		c.unblock()
	}
	return nil
}
