package edge

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const dialWithin = 10 * time.Second

// rough is an HTTP/2 client that sends what its user likes. What it writes waits until Flush or until there is much of it.
type rough struct {
	net.Conn
	*http2.Framer // writes to out and reads from the connection
	out           *bufio.Writer

	next   uint32 // stream
	fields bytes.Buffer
	packer *hpack.Encoder
	unpack *hpack.Decoder
}

// roughly connects, in cleartext if c is nil, and introduces itself.
func roughly(ctx context.Context, address string, c *tls.Config, settings ...http2.Setting) (*rough, error) {
	ctx, cancel := context.WithTimeout(ctx, dialWithin)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	if c != nil {
		c = c.Clone()
		c.ServerName = "localhost"
		conn = tls.Client(conn, c)
	}
	r := newRough(conn)
	if _, err := r.out.WriteString(http2.ClientPreface); err != nil {
		conn.Close()
		return nil, err
	}
	if err := r.WriteSettings(settings...); err != nil {
		conn.Close()
		return nil, err
	}
	return r, nil
}

func newRough(conn net.Conn) *rough {
	r := &rough{Conn: conn, out: bufio.NewWriterSize(conn, 64<<10), next: 1}
	r.Framer = http2.NewFramer(r.out, conn)
	r.AllowIllegalWrites = true
	r.SetMaxReadFrameSize(1 << 20)
	r.packer = hpack.NewEncoder(&r.fields)
	r.unpack = hpack.NewDecoder(4096, nil)
	return r
}

// Flush writes what waits.
func (r *rough) Flush() error { return r.out.Flush() }

// Deaf reads and forgets all that comes, and gives no flow control back, until the connection ends.
func (r *rough) Deaf() { io.Copy(io.Discard, r.Conn) }

// lastPing marks the end of what a client has sent.
var lastPing = [8]byte{'l', 'a', 's', 't'}

// Until reads and forgets what comes until a ping is answered.
func (r *rough) Until(ping [8]byte) error {
	for {
		frame, err := r.ReadFrame()
		if err != nil {
			return err
		}
		if f, ok := frame.(*http2.PingFrame); ok && f.IsAck() && f.Data == ping {
			return nil
		}
	}
}

// Widen lets the other side send what it likes.
func (r *rough) Widen() error { return r.WriteWindowUpdate(0, math.MaxInt32-65535) }

// Block is the header block of a call, with more headers.
func (r *rough) Block(method string, more ...hpack.HeaderField) []byte {
	r.fields.Reset()
	for _, f := range append([]hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method}, {Name: ":authority", Value: "localhost"},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	}, more...) {
		r.packer.WriteField(f) // into a buffer, which takes it
	}
	return bytes.Clone(r.fields.Bytes())
}

// Open begins a call and returns its stream.
func (r *rough) Open(method string, more ...hpack.HeaderField) (stream uint32, err error) {
	stream = r.next
	r.next += 2
	return stream, r.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: r.Block(method, more...), EndHeaders: true})
}

// Call begins a call with its whole request.
func (r *rough) Call(method string, request []byte) (stream uint32, err error) {
	if stream, err = r.Open(method); err != nil {
		return stream, err
	}
	return stream, r.WriteData(stream, true, framed(request))
}

// framed is a gRPC message.
func framed(request []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(request)))
	return append(b, request...)
}

// ending is how a call ended.
type ending struct {
	body    []byte
	status  string // grpc-status, or empty
	message string
	reset   http2.ErrCode // if the stream was reset
	http    string        // :status
}

func (e ending) String() string {
	return fmt.Sprintf("HTTP %s, grpc-status %q %q, reset %v, %d bytes", e.http, e.status, e.message, e.reset, len(e.body))
}

// Answer reads until a stream ends.
func (r *rough) Answer(stream uint32) (ending, error) {
	b := r.Body(stream)
	var err error
	b.end.body, err = io.ReadAll(b)
	return b.end, err
}

// body is what comes on one stream. It gives flow control back for what it reads, of all streams.
type body struct {
	r      *rough
	stream uint32
	end    ending // once there is no more
	over   bool
	left   []byte // of the last frame
}

// Body sends what waits and returns what comes.
func (r *rough) Body(stream uint32) *body { return &body{r: r, stream: stream} }

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	for len(b.left) == 0 {
		if b.over {
			return 0, io.EOF
		}
		if err := b.r.Flush(); err != nil {
			return 0, err
		}
		frame, err := b.r.ReadFrame()
		if err == nil {
			err = b.take(frame)
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return 0, err
		}
	}
	n := copy(p, b.left)
	b.left = b.left[n:]
	return n, nil
}

func (b *body) take(frame http2.Frame) error {
	switch f := frame.(type) {
	case *http2.SettingsFrame:
		if !f.IsAck() {
			return b.r.WriteSettingsAck()
		}
	case *http2.PingFrame:
		if !f.IsAck() {
			return b.r.WritePing(true, f.Data)
		}
	case *http2.GoAwayFrame:
		return fmt.Errorf("the connection ends: %v %q", f.ErrCode, f.DebugData())
	case *http2.RSTStreamFrame:
		if f.StreamID == b.stream {
			b.end.reset, b.over = f.ErrCode, true
		}
	case *http2.DataFrame:
		if f.StreamID == b.stream {
			b.left, b.over = f.Data(), f.StreamEnded()
		}
		n := f.Length
		if n == 0 {
			return nil
		}
		if err := b.r.WriteWindowUpdate(0, n); err != nil || f.StreamEnded() {
			return err
		}
		return b.r.WriteWindowUpdate(f.StreamID, n)
	case *http2.HeadersFrame:
		// The table of the connection is one for all streams.
		b.r.unpack.SetEmitFunc(func(h hpack.HeaderField) {
			if f.StreamID != b.stream {
				return
			}
			switch h.Name {
			case ":status":
				b.end.http = h.Value
			case "grpc-status":
				b.end.status = h.Value
			case "grpc-message":
				b.end.message = h.Value
			}
		})
		_, err := b.r.unpack.Write(f.HeaderBlockFragment())
		b.over = b.over || f.StreamID == b.stream && f.StreamEnded()
		return err
	}
	return nil
}

// greedy are the settings of a client that seems to be ready for everything.
var greedy = []http2.Setting{{ID: http2.SettingInitialWindowSize, Val: math.MaxInt32}}

// refused says that an error is the other side's having ended the connection.
func refused(err error) bool {
	return err == io.EOF || err != nil && (strings.Contains(err.Error(), "reset by peer") || strings.Contains(err.Error(), "broken pipe") ||
		strings.Contains(err.Error(), "closed"))
}
