package wire

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/grpcserver"
)

const (
	within    = 20 * time.Second
	putPath   = "/etcdserverpb.KV/Put"
	rangePath = "/etcdserverpb.KV/Range"
	watchPath = "/etcdserverpb.Watch/Watch"
)

// server answers a Range with as many bytes as its limit says, after waiting for its end if it is serializable, a Put with
// the error its key names, and a Watch with what it was sent.
type server struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	open    chan struct{} // a serializable Range has come
	release chan struct{} // and may go
}

func (s *server) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if r.Serializable {
		s.open <- struct{}{}
		select {
		case <-s.release:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	md, _ := metadata.FromIncomingContext(ctx)
	return &pb.RangeResponse{Count: int64(len(r.Key)), Kvs: []*mvccpb.KeyValue{{
		Key: []byte(strings.Join(md.Get("token"), ",")), Value: make([]byte, r.Limit)}}}, nil
}

func (s *server) Put(_ context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	return nil, status.Error(codes.ResourceExhausted, string(r.Key))
}

func (s *server) Watch(w pb.Watch_WatchServer) error {
	for {
		r, err := w.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := w.Send(&pb.WatchResponse{WatchId: r.GetCreateRequest().GetWatchId()}); err != nil {
			return err
		}
	}
}

// limits are what a server is told to keep to.
type limits struct {
	streams          uint32
	message, headers int
	tls              *tls.Config
}

// edge is a kind of server.
type edge struct {
	name string
	// serve runs one until the test ends or stop is called; drain lets open calls end first.
	serve func(t *testing.T, l limits) (s *server, address string, stop, drain func())
}

// each runs a test against grpc-go's server, which etcd uses, and our own.
func each(t *testing.T, test func(*testing.T, edge)) {
	for _, e := range []edge{{"grpc-go", serveGRPC}, {"grpcserver", serveOwn}} {
		t.Run(e.name, func(t *testing.T) { test(t, e) })
	}
}

func listen(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func newServer(to grpc.ServiceRegistrar) *server {
	s := &server{open: make(chan struct{}, 100), release: make(chan struct{})}
	pb.RegisterKVServer(to, s)
	pb.RegisterWatchServer(to, s)
	return s
}

func serveGRPC(t *testing.T, limit limits) (s *server, address string, stop, drain func()) {
	var opts []grpc.ServerOption
	if limit.streams > 0 {
		opts = append(opts, grpc.MaxConcurrentStreams(limit.streams))
	}
	if limit.message > 0 {
		opts = append(opts, grpc.MaxRecvMsgSize(limit.message))
	}
	if limit.headers > 0 {
		opts = append(opts, grpc.MaxHeaderListSize(uint32(limit.headers)))
	}
	if limit.tls != nil {
		opts = append(opts, grpc.Creds(credentials.NewTLS(limit.tls)))
	}
	g := grpc.NewServer(opts...)
	s = newServer(g)
	l := listen(t)
	go g.Serve(l)
	t.Cleanup(g.Stop)
	return s, l.Addr().String(), g.Stop, g.GracefulStop
}

func serveOwn(t *testing.T, limit limits) (s *server, address string, stop, drain func()) {
	g := grpcserver.New(grpcserver.Options{MaxStreams: limit.streams, MaxReceiveBytes: limit.message, MaxHeaderBytes: uint32(limit.headers), TLS: limit.tls})
	s = newServer(g)
	l := listen(t)
	if limit.tls != nil {
		go g.ServeTLS(l)
	} else {
		go g.Serve(l)
	}
	t.Cleanup(g.Stop)
	return s, l.Addr().String(), g.Stop, g.GracefulStop
}

func dial(t *testing.T, address string, o Options) *Conn {
	o.Within = within
	c, err := Dial(t.Context(), "tcp", address, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func marshal(t *testing.T, m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// recorder is a handler that keeps everything.
type recorder struct {
	Call
	messages chan string
	pieces   bytes.Buffer
	ended    chan *Error
}

func record() *recorder {
	r := &recorder{messages: make(chan string, 100), ended: make(chan *Error, 2)}
	r.Handler = r
	return r
}

func (r *recorder) Message(_ *Call, m []byte) { r.messages <- string(m) }
func (r *recorder) Piece(_ *Call, p []byte, last bool) {
	r.pieces.Write(p)
	if last {
		r.messages <- r.pieces.String()
		r.pieces.Reset()
	}
}
func (r *recorder) End(_ *Call, err *Error) { r.ended <- err }

func wantRange(m string, count, value int) error {
	var r pb.RangeResponse
	if err := proto.Unmarshal([]byte(m), &r); err != nil {
		return err
	}
	if r.Count != int64(count) || len(r.Kvs[0].Value) != value {
		return fmt.Errorf("count %d and %d bytes, want %d and %d", r.Count, len(r.Kvs[0].Value), count, value)
	}
	return nil
}

// TestCalls sends more than the first windows hold, both ways, with more calls open at once than the server takes; some
// answers come whole and some in pieces. Each call is made three times with the same Call.
func TestCalls(t *testing.T) { each(t, testCalls) }

func testCalls(t *testing.T, e edge) {
	for _, most := range []uint32{0, 3} {
		t.Run(fmt.Sprintf("streams=%d", most), func(t *testing.T) {
			_, address, _, _ := e.serve(t, limits{streams: most, message: 8 << 20})
			c := dial(t, address, Options{})
			var wg sync.WaitGroup
			for i := range 100 {
				size, answer := 3_000+i, i*1000
				if i%50 == 7 {
					size, answer = 3<<20, 3<<20
				}
				request := marshal(t, &pb.RangeRequest{Key: make([]byte, size), Limit: int64(answer)})
				wg.Go(func() {
					r := record()
					r.Pieces = i%2 == 1
					for range 3 {
						if err := c.Start(&r.Call, rangePath, request, true); err != nil {
							t.Error(err)
							return
						}
						if err := <-r.ended; err != nil {
							t.Errorf("call %d: %v", i, err)
							return
						}
						if err := wantRange(<-r.messages, size, answer); err != nil {
							t.Errorf("call %d: %v", i, err)
						}
					}
				})
			}
			wg.Wait()
			if sent, received := c.Bytes(); sent < 6*(3<<20) || received < 6*(3<<20) {
				t.Errorf("counted %d bytes sent and %d received", sent, received)
			}
		})
	}
}

func TestStatus(t *testing.T) { each(t, testStatus) }

func testStatus(t *testing.T, e edge) {
	_, address, _, _ := e.serve(t, limits{})
	c := dial(t, address, Options{})
	for _, text := range []string{"", "full", "größer als 100%\n"} {
		_, err := c.Do(t.Context(), putPath, marshal(t, &pb.PutRequest{Key: []byte(text)}))
		if got, ok := err.(*Error); !ok || got.Code != codes.ResourceExhausted || got.Message != text {
			t.Errorf("got %v, want ResourceExhausted %q", err, text)
		}
	}
	if _, err := c.Do(t.Context(), "/etcdserverpb.KV/Nothing", nil); err == nil || err.(*Error).Code != codes.Unimplemented {
		t.Errorf("a method that is not: %v", err)
	}
	if _, err := c.Do(t.Context(), rangePath, []byte{0xff}); err == nil || err.(*Error).Code != codes.Internal {
		t.Errorf("a message that is none: %v", err)
	}
}

func TestStream(t *testing.T) { each(t, testStream) }

func testStream(t *testing.T, e edge) {
	_, address, stop, _ := e.serve(t, limits{})
	c := dial(t, address, Options{})
	create := func(id int64) []byte {
		return marshal(t, &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{WatchId: id, Key: make([]byte, 100_000)}}})
	}
	w := record()
	if err := c.Start(&w.Call, watchPath, create(1), false); err != nil {
		t.Fatal(err)
	}
	for id := int64(1); id <= 5; id++ {
		var r pb.WatchResponse
		if err := proto.Unmarshal([]byte(<-w.messages), &r); err != nil || r.WatchId != id {
			t.Errorf("got %v %v, want %d", &r, err, id)
		}
		if err := c.Send(&w.Call, create(id+1)); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := <-w.ended; err == nil || err.Code != codes.Unavailable {
		t.Errorf("the server went away: %v", err)
	}
	if _, err := c.Do(t.Context(), rangePath, nil); err == nil || err.(*Error).Code != codes.Unavailable {
		t.Errorf("a call on a dead connection: %v", err)
	}
}

func TestCancel(t *testing.T) { each(t, testCancel) }

func testCancel(t *testing.T, e edge) {
	s, address, _, _ := e.serve(t, limits{streams: 2})
	c := dial(t, address, Options{})
	request := marshal(t, &pb.RangeRequest{Serializable: true})
	calls := make([]*recorder, 4) // two of which wait for a stream
	for i := range calls {
		calls[i] = record()
		if err := c.Start(&calls[i].Call, rangePath, request, true); err != nil {
			t.Fatal(err)
		}
	}
	<-s.open
	<-s.open
	for _, i := range []int{3, 0} {
		c.Cancel(&calls[i].Call, codes.DeadlineExceeded, "late")
		c.Cancel(&calls[i].Call, codes.DeadlineExceeded, "later")
		if err := <-calls[i].ended; err == nil || err.Code != codes.DeadlineExceeded || err.Message != "late" {
			t.Errorf("call %d: %v", i, err)
		}
	}
	<-s.open // the third has the stream of the first
	ctx, cancel := context.WithCancel(t.Context())
	stop := time.AfterFunc(10*time.Millisecond, cancel)
	defer stop.Stop()
	if _, err := c.Do(ctx, rangePath, request); err == nil { // none is free for it
		t.Error("Do outlived its context")
	}
	if _, err := c.Do(ctx, rangePath, request); err == nil {
		t.Error("Do began after its context's end")
	}
	close(s.release)
	for _, i := range []int{1, 2} {
		if err := <-calls[i].ended; err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	for i, r := range calls {
		select {
		case err := <-r.ended:
			t.Errorf("call %d ended a second time: %v", i, err)
		default:
		}
	}
}

// TestGoAway: what the server still answers comes, and the connection ends after it.
func TestGoAway(t *testing.T) { each(t, testGoAway) }

func testGoAway(t *testing.T, e edge) {
	s, address, _, drain := e.serve(t, limits{})
	closed := make(chan error, 1)
	c := dial(t, address, Options{OnClose: func(err error) { closed <- err }})
	r := record()
	if err := c.Start(&r.Call, rangePath, marshal(t, &pb.RangeRequest{Serializable: true}), true); err != nil {
		t.Fatal(err)
	}
	<-s.open
	stopped := make(chan struct{})
	go func() { drain(); close(stopped) }()
	for refused := false; !refused; {
		_, err := c.Do(t.Context(), rangePath, nil)
		refused = err != nil && err.(*Error).Code == codes.Unavailable
	}
	close(s.release)
	if err := <-r.ended; err != nil {
		t.Error(err)
	}
	if err := <-closed; err == nil {
		t.Error("closed without a reason")
	}
	<-stopped
}

func TestMetadata(t *testing.T) { each(t, testMetadata) }

func testMetadata(t *testing.T, e edge) {
	_, address, _, _ := e.serve(t, limits{headers: 1 << 20})
	c := dial(t, address, Options{})
	for _, token := range []string{"", "a", "a", "b", strings.Repeat("long", 10_000), "c"} {
		if token != "" {
			c.SetField("token", token)
		}
		for range 3 {
			answer, err := c.Do(t.Context(), rangePath, nil)
			var r pb.RangeResponse
			if err == nil {
				err = proto.Unmarshal(answer, &r)
			}
			if err != nil || string(r.Kvs[0].Key) != token {
				t.Errorf("token %.10q arrived as %.10q, %v", token, r.Kvs, err)
			}
		}
	}
}

func TestTLS(t *testing.T) { each(t, testTLS) }

func testTLS(t *testing.T, e edge) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	s, address, _, _ := e.serve(t, limits{message: 8 << 20, tls: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}})
	c := dial(t, address, Options{TLS: &tls.Config{RootCAs: roots}})
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			answer, err := c.Do(t.Context(), rangePath, marshal(t, &pb.RangeRequest{Key: make([]byte, i*10_000), Limit: int64(i * 10_000)}))
			if err == nil {
				err = wantRange(string(answer), i*10_000, i*10_000)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r := record() // a cancel wakes the reader in the middle of a TLS record or not
	if err := c.Start(&r.Call, rangePath, marshal(t, &pb.RangeRequest{Serializable: true}), true); err != nil {
		t.Fatal(err)
	}
	<-s.open
	c.Cancel(&r.Call, codes.Canceled, "enough")
	if err := <-r.ended; err == nil || err.Code != codes.Canceled {
		t.Error(err)
	}
	if _, err := c.Do(t.Context(), rangePath, nil); err != nil {
		t.Errorf("after a cancel: %v", err)
	}

	if _, err := Dial(t.Context(), "tcp", address, Options{TLS: &tls.Config{}, Within: within}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown authority: %v", err)
	}
	if _, err := Dial(t.Context(), "tcp", address, Options{Within: 300 * time.Millisecond}); err == nil {
		t.Error("cleartext at a TLS port is no error")
	}
}

// TestNotGRPC: what is no gRPC server is named as such.
func TestNotGRPC(t *testing.T) {
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	if _, err := Dial(t.Context(), "tcp", web.Listener.Addr().String(), Options{Within: within}); err == nil || !strings.Contains(err.Error(), "HTTP/1") {
		t.Errorf("an HTTP/1 server: %v", err)
	}
	web2 := httptest.NewUnstartedServer(http.NotFoundHandler())
	web2.EnableHTTP2 = true
	web2.StartTLS()
	defer web2.Close()
	c := dial(t, web2.Listener.Addr().String(), Options{TLS: web2.Client().Transport.(*http.Transport).TLSClientConfig})
	if _, err := c.Do(t.Context(), rangePath, nil); err == nil || err.(*Error).Code != codes.Unimplemented {
		t.Errorf("a server of pages: %v", err)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if _, err := Dial(t.Context(), "tcp", silent.Addr().String(), Options{Within: time.Second}); err == nil || !strings.Contains(err.Error(), "says nothing") {
		t.Errorf("a silent server: %v", err)
	}
}

// TestNeverReads: a server that takes no more bytes makes neither Start block nor memory grow without bound.
func TestNeverReads(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	defer close(done)
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		// Settings with a window without end, which is then not read into.
		nc.Write([]byte{0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff})
		nc.Write([]byte{0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0})
		<-done
	}()
	c := dial(t, l.Addr().String(), Options{})
	message := make([]byte, 1<<20)
	r := record()
	if err := c.Start(&r.Call, watchPath, message, false); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		if err := c.Send(&r.Call, message); err != nil {
			break
		}
		if i > 200 {
			t.Fatal("200 MiB were taken for a server that does not read")
		}
	}
	if err := <-r.ended; err == nil || !strings.Contains(err.Message, "does not read") {
		t.Error(err)
	}
}

// TestTake cuts messages out of bytes that arrive in every possible piece.
func TestTake(t *testing.T) {
	all := appendMessage(appendMessage(appendMessage(nil, []byte("one")), nil), []byte("three"))
	for _, pieces := range []bool{false, true} {
		for size := 1; size <= len(all); size++ {
			r := record()
			r.Pieces = pieces
			for rest := all; len(rest) > 0; {
				n := min(size, len(rest))
				if err := r.take(rest[:n]); err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			close(r.messages)
			var got []string
			for m := range r.messages {
				got = append(got, m)
			}
			if strings.Join(got, ",") != "one,,three" {
				t.Errorf("in pieces of %d: %q", size, got)
			}
		}
	}
	r := record()
	if err := r.take([]byte{1, 0, 0, 0, 0}); err == nil || err.Code != codes.Internal {
		t.Errorf("a compressed message: %v", err)
	}
	if err := record().take([]byte{0, 0xff, 0, 0, 0}); err == nil || err.Code != codes.ResourceExhausted {
		t.Errorf("a giant: %v", err)
	}
}

// FuzzReader plays a server that sends anything: whatever it is, each call ends once and nothing panics.
func FuzzReader(f *testing.F) {
	settings := []byte{0, 0, 0, 4, 0, 0, 0, 0, 0}
	f.Add(settings)
	f.Add(append(bytes.Clone(settings), 0, 0, 1, 1, 4, 0, 0, 0, 1, 0x88))
	f.Add(append(bytes.Clone(settings), 0, 0, 4, 3, 0, 0, 0, 0, 1, 0, 0, 0, 8))
	f.Add(append(bytes.Clone(settings), 0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0))
	f.Add(append(bytes.Clone(settings), "\x00\x00\x19\x01\x05\x00\x00\x00\x01\x88\x40\x0bgrpc-status\x02\x31\x32"...))
	f.Add(append(bytes.Clone(settings), 0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 6, 0, 8, 0, 0, 0, 3, 0, 3, 1, 2, 3))
	f.Fuzz(func(t *testing.T, sent []byte) {
		c := &Conn{
			nc: &replay{}, out: io.Discard, ready: make(chan struct{}), closed: make(chan struct{}),
			window: firstWindow, streamFirst: firstWindow, frameMost: frameMax, streamsMost: 100, nextID: 1, others: make(map[uint32]*Call),
			header: newHeaderWriter("http", "a"),
		}
		calls := []*recorder{record(), record(), record()}
		calls[2].Pieces = true
		for i, r := range calls {
			r.messages = make(chan string, len(sent)+1)
			if err := c.Start(&r.Call, rangePath, make([]byte, i*100_000), i != 1); err != nil {
				t.Fatal(err)
			}
		}
		c.nc = &replay{rest: sent}
		c.read()
		for i, r := range calls {
			if n := len(r.ended); n != 1 {
				t.Errorf("call %d ended %d times", i, n)
			}
		}
	})
}

// replay is a connection that reads what is given.
type replay struct {
	net.Conn
	rest []byte
}

func (r *replay) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), 100)], r.rest)
	r.rest = r.rest[n:]
	return n, nil
}
func (r *replay) Close() error                    { return nil }
func (r *replay) SetReadDeadline(time.Time) error { return nil }
