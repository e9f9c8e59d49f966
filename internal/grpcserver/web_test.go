package grpcserver

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// webHandler says what it was asked.
func webHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("X-Proto", r.Proto)
		w.Header().Set("X-TLS", fmt.Sprint(r.TLS != nil))
		w.Header().Set("X-Host", r.Host)
		w.Header().Set("Connection", "keep-alive") // of HTTP/1.1 only
		w.WriteHeader(http.StatusAccepted)
		_, _ = w.Write(b)
	})
	mux.HandleFunc("/large", func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(bytes.Repeat([]byte("x"), 3<<20)) })
	mux.HandleFunc("/none", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("/flush", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "first\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	return mux
}

func TestHTTP(t *testing.T) {
	for name, c := range map[string]struct {
		tls   bool
		http2 bool
		alpn  []string
	}{
		"plain":        {},
		"tls http/1.1": {tls: true, alpn: []string{"http/1.1"}},
		"tls no alpn":  {tls: true, alpn: nil},
		"tls h2":       {tls: true, http2: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, rig{tls: c.tls, Options: Options{HTTP: webHandler()}, methods: []Method{{Name: "/s/echo", Unary: echo}}})
			tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: s.roots, NextProtos: c.alpn}, ForceAttemptHTTP2: c.http2}
			if !c.http2 {
				tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
			}
			defer tr.CloseIdleConnections()
			client := &http.Client{Transport: tr, Timeout: 10 * time.Second}
			base := map[bool]string{true: "https://", false: "http://"}[c.tls] + s.addr.String()
			for _, n := range []int{0, 5, 1 << 20} {
				res, err := client.Post(base+"/echo", "text/plain", strings.NewReader(strings.Repeat("b", n)))
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(res.Body)
				if err != nil || len(b) != n || res.StatusCode != http.StatusAccepted {
					t.Errorf("%d bytes, %v, %v", len(b), res.Status, err)
				}
				want := map[bool]string{true: "HTTP/2.0", false: "HTTP/1.1"}[c.http2]
				if res.Header.Get("X-Proto") != want || res.Header.Get("X-TLS") != fmt.Sprint(c.tls) || res.Header.Get("X-Host") != s.addr.String() {
					t.Errorf("%v", res.Header)
				}
			}
			for path, want := range map[string]int{"/large": 3 << 20, "/none": 0, "/nobody": 19} {
				res, err := client.Get(base + path)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(res.Body)
				if err != nil || len(b) != want {
					t.Errorf("%s: %d bytes, %v", path, len(b), err)
				}
			}
			res, err := client.Head(base + "/large")
			if err != nil || res.StatusCode != 200 {
				t.Errorf("HEAD: %v, %v", res, err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			req, _ := http.NewRequestWithContext(ctx, "GET", base+"/flush", nil)
			if res, err = client.Do(req); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(res.Body).ReadString('\n')
			if line != "first\n" {
				t.Errorf("%q, %v", line, err)
			}
			cancel()
			if c.http2 {
				eventually(t, "the handler's end", func() bool { return s.goroutines.Load() == 0 })
			}
			// gRPC on the same port.
			if _, err := invoke(t.Context(), s.dial(t), "/s/echo", nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// In cleartext HTTP/2 is gRPC's.
func TestHTTP2WithoutTLS(t *testing.T) {
	s := start(t, rig{Options: Options{HTTP: webHandler()}})
	f := s.speak(t)
	got := f.await(f.headers(true, ":method", "GET", ":scheme", "http", ":path", "/echo", ":authority", "x"))
	if got.headers[0][":status"] != "415" || got.last("grpc-message") != `invalid gRPC request content-type ""` {
		t.Error(got)
	}
}

// A client that negotiates nothing and speaks HTTP/2 all the same is served.
func TestPrefaceWithoutALPN(t *testing.T) {
	s := start(t, rig{tls: true, methods: []Method{{Name: "/s/echo", Unary: echo}}})
	nc := tls.Client(s.raw(t), &tls.Config{RootCAs: s.roots, ServerName: "localhost"})
	if err := nc.Handshake(); err != nil {
		t.Fatal(err)
	}
	f := speakOn(t, nc)
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
}

// Without a handler an HTTP/1.1 client is hung up on.
func TestNoHTTP(t *testing.T) {
	s := start(t, rig{})
	nc := s.raw(t)
	_, _ = io.WriteString(nc, "GET / HTTP/1.1\r\n\r\n")
	if b, _ := io.ReadAll(nc); len(b) != 0 {
		t.Errorf("answered %q", b)
	}
}

// A connection that is no file descriptor, and a listener that does TLS itself,
// are served as well.
func TestOtherListeners(t *testing.T) {
	s := start(t, rig{tls: true, methods: []Method{{Name: "/s/echo", Unary: echo}}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = s.ServeTLS(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{s.cert}, NextProtos: []string{"h2"}}))
	}()
	other := *s
	other.addr = l.Addr()
	big := bytes.Repeat([]byte("x"), 1<<20)
	out, err := invoke(t.Context(), other.dial(t), "/s/echo", big)
	if err != nil || !bytes.Equal(out, big) {
		t.Error(err)
	}
}

// deadlines counts how often its deadline was set.
type deadlines struct {
	net.Conn
	set atomic.Int64
}

func (d *deadlines) SetDeadline(t time.Time) error {
	d.set.Add(1)
	return d.Conn.SetDeadline(t)
}

// A connection that package http has got is that package's: its deadlines stay.
func TestHandOver(t *testing.T) {
	s := New(Options{})
	defer s.Stop()
	// This test takes the place of package http.
	given := &handedOver{conns: make(chan net.Conn), closed: make(chan struct{})}
	s.http, s.httpConns = &http.Server{}, given
	client, nc := net.Pipe()
	defer client.Close()
	d := &deadlines{Conn: nc}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.handle(d, false)
	}()
	go func() { _, _ = io.WriteString(client, "GET / HTTP/1.1\r\n\r\n") }()
	got, err := given.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	<-done
	if n := d.set.Load(); n != 2 { // that of the handshake, and its end
		t.Errorf("deadlines were set %d times", n)
	}
}
