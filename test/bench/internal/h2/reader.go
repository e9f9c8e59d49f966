package h2

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// reader is what the reading goroutine of a Conn owns.
type reader struct {
	c        *Conn
	framer   *http2.Framer
	headers  *hpack.Decoder
	code     string // of the header block being decoded
	message  string
	received int // bytes since the connection's last window update
}

func (r *reader) field(f hpack.HeaderField) {
	switch f.Name {
	case "grpc-status":
		r.code = f.Value
	case "grpc-message":
		r.message = f.Value
	case ":status":
		if f.Value != "200" {
			r.code, r.message = "http", f.Value
		}
	}
}

func (r *reader) frame(f http2.Frame) error {
	id := f.Header().StreamID
	switch f := f.(type) {
	case *http2.DataFrame:
		return r.data(id, f)
	case *http2.HeadersFrame:
		if !f.HeadersEnded() {
			return fmt.Errorf("headers of stream %d go on in another frame, which this client does not take", id)
		}
		r.code, r.message = "", ""
		if _, err := r.headers.Write(f.HeaderBlockFragment()); err != nil {
			return err
		}
		if err := r.headers.Close(); err != nil {
			return err
		}
		if f.StreamEnded() || r.code != "" {
			r.end(id, r.code, r.message)
		}
	case *http2.RSTStreamFrame:
		r.end(id, "reset", f.ErrCode.String())
	case *http2.WindowUpdateFrame:
		if id == 0 {
			r.c.mu.Lock()
			r.c.window += int64(f.Increment)
			r.c.mu.Unlock()
			r.c.wakeWriter()
		}
	case *http2.SettingsFrame:
		if !f.IsAck() {
			r.control(appendFrame(nil, http2.FrameSettings, http2.FlagSettingsAck, 0, nil))
		}
	case *http2.PingFrame:
		if !f.IsAck() {
			r.control(appendFrame(nil, http2.FramePing, http2.FlagPingAck, 0, f.Data[:]))
		}
	case *http2.GoAwayFrame:
		return fmt.Errorf("server says goaway: %v %q", f.ErrCode, f.DebugData())
	}
	return nil
}

// control queues a frame that needs no window.
func (r *reader) control(frame []byte) {
	r.c.mu.Lock()
	r.c.control = append(r.c.control, frame...)
	r.c.mu.Unlock()
	r.c.wakeWriter()
}

func (r *reader) data(id uint32, f *http2.DataFrame) error {
	n := int(f.Length)
	if r.received += n; r.received > connWindow/2 {
		r.control(appendWindow(nil, 0, r.received))
		r.received = 0
	}
	r.c.mu.Lock()
	k := r.c.streams[id]
	r.c.mu.Unlock()
	if k == nil {
		return nil // closed by us
	}
	if k.received += n; k.received > streamWindow/2 && !f.StreamEnded() {
		r.control(appendWindow(nil, id, k.received))
		k.received = 0
	}
	if err := k.take(f.Data()); err != nil {
		return fmt.Errorf("stream %d: %w", id, err)
	}
	return nil
}

// take cuts messages out of a stream's bytes. A whole message at hand is not copied, unless a unary call must keep it
// until its trailers.
func (k *call) take(data []byte) error {
	for len(data) > 0 {
		if len(k.buf) == 0 {
			m, rest, ok := cut(data)
			if ok {
				k.deliver(m)
				data = rest
				continue
			}
		}
		if len(k.buf) < prefixBytes {
			n := min(prefixBytes-len(k.buf), len(data))
			k.buf, data = append(k.buf, data[:n]...), data[n:]
			if len(k.buf) < prefixBytes {
				return nil
			}
		}
		if k.buf[0] != 0 {
			return fmt.Errorf("message is compressed, which was not offered")
		}
		want := prefixBytes + int(binary.BigEndian.Uint32(k.buf[1:])) - len(k.buf)
		n := min(want, len(data))
		k.buf, data = append(k.buf, data[:n]...), data[n:]
		if n == want {
			k.deliver(k.buf[prefixBytes:])
			k.buf = k.buf[:0]
		}
	}
	return nil
}

func cut(data []byte) (message, rest []byte, ok bool) {
	if len(data) < prefixBytes || data[0] != 0 {
		return nil, nil, false
	}
	n := int(binary.BigEndian.Uint32(data[1:]))
	if len(data)-prefixBytes < n {
		return nil, nil, false
	}
	return data[prefixBytes : prefixBytes+n], data[prefixBytes+n:], true
}

func (k *call) deliver(message []byte) {
	if k.message != nil {
		k.message(message)
		return
	}
	k.body, k.have = append(k.body, message...), true
}

func (r *reader) end(id uint32, code, message string) {
	r.c.mu.Lock()
	k := r.c.streams[id]
	delete(r.c.streams, id)
	r.c.mu.Unlock()
	if k == nil {
		return
	}
	switch {
	case code != "0":
		k.done(nil, &StatusError{Code: code, Message: message})
	case k.message == nil && !k.have:
		k.done(nil, &StatusError{Code: code, Message: "no message"})
	default:
		k.done(k.body, nil)
	}
}
