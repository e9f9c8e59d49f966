package peer

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// stallConn ends a connection whose single reads or writes take too long. A timeout of 0 does not.
type stallConn struct {
	net.Conn
	read, write time.Duration
}

func (c *stallConn) Read(b []byte) (int, error) {
	if c.read > 0 {
		if err := c.SetReadDeadline(time.Now().Add(c.read)); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(b)
}

func (c *stallConn) Write(b []byte) (int, error) {
	if c.write > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(c.write)); err != nil {
			return 0, err
		}
	}
	return c.Conn.Write(b)
}

// dialing says how connections are made.
type dialing struct {
	tls         *tls.Config
	dial        time.Duration
	read, write time.Duration // of single calls, see stallConn
	keep        int           // idle connections kept for each host; negative: none
}

// httpClient returns a client that speaks HTTP/1.1 only, offers no ALPN, takes nothing compressed, follows no redirects and
// goes through no proxy: peers name each other's addresses.
func (d dialing) httpClient() *http.Client {
	dialer := &net.Dialer{Timeout: d.dial, KeepAlive: 30 * time.Second}
	rt := &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if path, ok := socketPath(address); ok {
				network, address = "unix", path
			}
			conn, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &stallConn{conn, d.read, d.write}, nil
		},
		TLSHandshakeTimeout:    10 * time.Second,
		DisableKeepAlives:      d.keep < 0,
		MaxIdleConnsPerHost:    max(d.keep, 0),
		IdleConnTimeout:        4 * time.Second, // listeners of etcd hang up after 5s of silence
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		WriteBufferSize:        64 << 10,
		ReadBufferSize:         64 << 10,
		Protocols:              new(http.Protocols),
	}
	rt.Protocols.SetHTTP1(true)
	if d.tls != nil {
		rt.TLSClientConfig = d.tls.Clone()
		rt.TLSClientConfig.NextProtos = nil
	}
	return &http.Client{
		Transport:     rt,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// socketSuffix marks the host of a request that goes to a unix socket: net/http knows only http and https.
const socketSuffix = ".socket.invalid"

// target returns the URL to ask for path at a member's base URL.
func target(base, path string) string {
	scheme, rest, _ := strings.Cut(strings.TrimSuffix(base, "/"), "://")
	switch scheme {
	case "unix":
		return "http://" + hex.EncodeToString([]byte(rest)) + socketSuffix + path
	case "unixs":
		return "https://" + hex.EncodeToString([]byte(rest)) + socketSuffix + path
	}
	return scheme + "://" + rest + path
}

func socketPath(address string) (string, bool) {
	host, _, _ := net.SplitHostPort(address)
	encoded, ok := strings.CutSuffix(host, socketSuffix)
	if !ok {
		return "", false
	}
	path, err := hex.DecodeString(encoded)
	return string(path), err == nil
}

// urlPicker chooses among a member's URLs: one that works is kept, after a failure the next is tried.
type urlPicker struct {
	mu     sync.Mutex
	urls   []string
	picked int
}

// pick returns the URL in use, "" if the member has none.
func (p *urlPicker) pick() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.urls) == 0 {
		return ""
	}
	return p.urls[p.picked]
}

// failed moves on from u, unless another has done so already.
func (p *urlPicker) failed(u string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.urls) > 0 && p.urls[p.picked] == u {
		p.picked = (p.picked + 1) % len(p.urls)
	}
}

func (p *urlPicker) set(urls []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.urls, p.picked = urls, 0
}
