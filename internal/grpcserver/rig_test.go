package grpcserver

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"fmt"
	"io"
	"math/big"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/mem"
)

// rawCodec has grpc-go leave *[]byte alone.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// served is a server that tests talk to.
type served struct {
	*Server
	addr  net.Addr
	roots *x509.CertPool
	cert  tls.Certificate
}

// rig describes one.
type rig struct {
	Options
	methods  []Method
	register func(grpc.ServiceRegistrar)
	tls      bool
	unix     bool
}

// echo answers with the request, at once.
func echo(call *Call, raw []byte, reply func([]byte, error)) { reply(raw, nil) }

// start serves r until the test ends.
func start(t testing.TB, r rig) *served {
	t.Helper()
	out := &served{}
	if r.tls {
		out.cert, out.roots = selfSigned(t)
		r.TLS = &tls.Config{Certificates: []tls.Certificate{out.cert}, ClientCAs: out.roots, ClientAuth: tls.VerifyClientCertIfGiven}
	}
	if r.Metrics == nil {
		r.Metrics = NewMetrics()
	}
	out.Server = New(r.Options)
	for _, m := range r.methods {
		out.Handle(m)
	}
	if r.register != nil {
		r.register(out.Server)
	}
	network, address := "tcp", "127.0.0.1:0"
	if r.unix {
		network, address = "unix", filepath.Join(t.TempDir(), "s")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	out.addr = l.Addr()
	serve := out.Serve
	if r.tls {
		serve = out.ServeTLS
	}
	done := make(chan error, 1)
	go func() { done <- serve(l) }()
	t.Cleanup(func() {
		out.Stop()
		if err := <-done; err != grpc.ErrServerStopped {
			t.Errorf("Serve returned %v", err)
		}
	})
	return out
}

func selfSigned(t testing.TB) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "somebody"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IsCA:        true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pool
}

// dial connects grpc-go's client.
func (s *served) dial(t testing.TB, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	creds := insecure.NewCredentials()
	if s.roots != nil {
		creds = credentials.NewTLS(&tls.Config{RootCAs: s.roots, Certificates: []tls.Certificate{s.cert}})
	}
	target := "passthrough:///" + s.addr.String()
	if s.addr.Network() == "unix" {
		target = "unix:" + s.addr.String()
	}
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{grpc.WithTransportCredentials(creds)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// invoke makes a unary call with raw bytes.
func invoke(ctx context.Context, conn *grpc.ClientConn, method string, in []byte, o ...grpc.CallOption) ([]byte, error) {
	var out []byte
	err := conn.Invoke(ctx, method, &in, &out, append(o, grpc.ForceCodecV2(rawCodec{}))...)
	return out, err
}

// open opens a stream of raw bytes.
func open(ctx context.Context, conn *grpc.ClientConn, method string, o ...grpc.CallOption) (grpc.ClientStream, error) {
	return conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method, append(o, grpc.ForceCodecV2(rawCodec{}))...)
}

func send(t testing.TB, s grpc.ClientStream, m string) {
	t.Helper()
	b := []byte(m)
	if err := s.SendMsg(&b); err != nil {
		t.Fatal(err)
	}
}

func receive(t testing.TB, s grpc.ClientStream) string {
	t.Helper()
	var b []byte
	if err := s.RecvMsg(&b); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// eventually polls for what another goroutine brings about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come about", what)
		}
	}
}

// frames is a client that speaks in frames.
type frames struct {
	t    testing.TB
	nc   net.Conn
	fr   *http2.Framer
	enc  *hpack.Encoder
	buf  bytes.Buffer
	mu   sync.Mutex
	dec  *hpack.Decoder
	next uint32
	sent int
}

// patient is a connection that waits long for each read and write, however long
// all of them take.
type patient struct{ net.Conn }

const patience = 20 * time.Second

func (p patient) Read(b []byte) (int, error) {
	_ = p.SetReadDeadline(time.Now().Add(patience))
	return p.Conn.Read(b)
}

func (p patient) Write(b []byte) (int, error) {
	_ = p.SetWriteDeadline(time.Now().Add(patience))
	return p.Conn.Write(b)
}

// raw connects without a word.
func (s *served) raw(t testing.TB) net.Conn {
	t.Helper()
	nc, err := net.Dial(s.addr.Network(), s.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	return patient{nc}
}

// speak connects and begins to speak HTTP/2.
func (s *served) speak(t testing.TB, settings ...http2.Setting) *frames {
	t.Helper()
	return speakOn(t, s.raw(t), settings...)
}

func speakOn(t testing.TB, nc net.Conn, settings ...http2.Setting) *frames {
	t.Helper()
	f := &frames{t: t, nc: nc, fr: http2.NewFramer(nc, nc), next: 1}
	f.fr.AllowIllegalWrites = true
	f.enc = hpack.NewEncoder(&f.buf)
	f.dec = hpack.NewDecoder(4096, nil)
	f.write(io.WriteString(nc, preface))
	f.ok(f.fr.WriteSettings(settings...))
	return f
}

func (f *frames) ok(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *frames) write(_ int, err error) { f.t.Helper(); f.ok(err) }

// block encodes a header block.
func (f *frames) block(fields ...string) []byte {
	f.buf.Reset()
	for i := 0; i < len(fields); i += 2 {
		f.ok(f.enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}))
	}
	return bytes.Clone(f.buf.Bytes())
}

// grpcFields are the headers of a call.
func grpcFields(method string, more ...string) []string {
	return append([]string{":method", "POST", ":scheme", "http", ":path", method, ":authority", "localhost",
		"content-type", "application/grpc", "te", "trailers"}, more...)
}

// headers sends a header block on the next stream.
func (f *frames) headers(end bool, fields ...string) (id uint32) {
	f.t.Helper()
	id = f.next
	f.next += 2
	f.ok(f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(fields...), EndStream: end, EndHeaders: true}))
	return id
}

func prefixed(m string) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m)))
	return append(b, m...)
}

// call makes a unary call.
func (f *frames) call(method, message string, more ...string) (id uint32) {
	f.t.Helper()
	id = f.headers(false, grpcFields(method, more...)...)
	f.ok(f.fr.WriteData(id, true, prefixed(message)))
	return id
}

// seen is what came for one stream.
type seen struct {
	headers []map[string]string
	data    []byte
	ended   bool
	reset   *http2.ErrCode
}

func (s *seen) message() string {
	if len(s.data) < 5 {
		return ""
	}
	return string(s.data[5:])
}

// trailer returns the last value of a header.
func (s *seen) last(name string) string {
	for i := len(s.headers) - 1; i >= 0; i-- {
		if v, ok := s.headers[i][name]; ok {
			return v
		}
	}
	return ""
}

func (s *seen) String() string {
	var b strings.Builder
	for _, h := range s.headers {
		fmt.Fprintf(&b, "headers %v\n", h)
	}
	fmt.Fprintf(&b, "data %q\n", s.data)
	if s.ended {
		b.WriteString("end of stream\n")
	}
	if s.reset != nil {
		fmt.Fprintf(&b, "reset %v\n", *s.reset)
	}
	return b.String()
}

// read reads the next frame that is not SETTINGS, WINDOW_UPDATE or PING.
func (f *frames) read() (http2.Frame, error) {
	for {
		fr, err := f.fr.ReadFrame()
		if err != nil {
			return nil, err
		}
		switch fr := fr.(type) {
		case *http2.SettingsFrame:
			if !fr.IsAck() {
				f.mu.Lock()
				_ = f.fr.WriteSettingsAck()
				f.mu.Unlock()
			}
		case *http2.WindowUpdateFrame, *http2.PingFrame:
		default:
			return fr, nil
		}
	}
}

// await collects what comes for a stream until it ended.
func (f *frames) await(id uint32) *seen {
	f.t.Helper()
	s := &seen{}
	for !s.ended && s.reset == nil {
		fr, err := f.read()
		if err != nil {
			f.t.Fatalf("while waiting for stream %d: %v; so far:\n%v", id, err, s)
		}
		f.note(s, fr, id)
	}
	return s
}

// fields decodes a header block.
func (f *frames) fields(h *http2.HeadersFrame) map[string]string {
	f.t.Helper()
	fields, err := f.dec.DecodeFull(h.HeaderBlockFragment())
	f.ok(err)
	m := map[string]string{}
	for _, hf := range fields {
		m[hf.Name] = hf.Value
	}
	return m
}

func (f *frames) note(s *seen, fr http2.Frame, id uint32) {
	f.t.Helper()
	if g, ok := fr.(*http2.GoAwayFrame); ok && g.ErrCode != http2.ErrCodeNo {
		f.t.Fatalf("GOAWAY %v %q", g.ErrCode, g.DebugData())
	}
	if h, ok := fr.(*http2.HeadersFrame); ok {
		m := f.fields(h) // of any stream, as it may change the table
		if h.StreamID == id {
			s.headers = append(s.headers, m)
			s.ended = h.StreamEnded()
		}
		return
	}
	if fr.Header().StreamID != id {
		return
	}
	switch fr := fr.(type) {
	case *http2.DataFrame:
		s.data = append(s.data, fr.Data()...)
		s.ended = fr.StreamEnded()
	case *http2.RSTStreamFrame:
		code := fr.ErrCode
		s.reset = &code
	}
}

// goneAway reads until the connection ends and returns the last GOAWAY.
func (f *frames) goneAway() *http2.GoAwayFrame {
	f.t.Helper()
	var last *http2.GoAwayFrame
	for {
		fr, err := f.read()
		if err != nil {
			if ne, ok := err.(net.Error); ok && ne.Timeout() {
				f.t.Fatal("the connection did not end")
			}
			return last
		}
		if g, ok := fr.(*http2.GoAwayFrame); ok {
			copied := *g
			last = &copied
			last.ErrCode, last.LastStreamID = g.ErrCode, g.LastStreamID
		}
	}
}

func gzipOption() grpc.CallOption { return grpc.UseCompressor(gzip.Name) }

func newEncoder(b *bytes.Buffer) *hpack.Encoder { return hpack.NewEncoder(b) }

// readerOf reads what comes on a connection that something else writes to.
func readerOf(t testing.TB, nc net.Conn) *frames {
	return &frames{t: t, nc: nc, fr: http2.NewFramer(nc, nc), dec: hpack.NewDecoder(4096, nil)}
}
