package edge

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/race"
)

// slowWatchersMetric is how many watchers do not take their events.
const slowWatchersMetric = "etcd_debugging_mvcc_slow_watcher_total"

const (
	perByte       = 100 * time.Microsecond // that comes alone
	perUnread     = 10 * time.Millisecond  // a list of 8 MiB
	perEvent      = 60 * time.Microsecond  // of 64 KiB, for a watcher that may not be sent it
	perIdle       = 24 << 10               // bytes for a connection that says nothing
	idleShare     = 0.05                   // of a core, for all of these together
	handshakeWait = 45 * time.Second       // until those are gone at the latest
	greetWithin   = 2 * time.Second        // a new client, while they are there
	silentWithin  = 60 * time.Second       // until a client that answers no pings is gone at the latest
)

// TestNeverReads has clients ask for much and read nothing of it: first lists, then watches.
func TestNeverReads(t *testing.T) {
	t.Parallel()                            // it waits more than it works
	const responses, streams = 64 << 20, 20 // of each connection
	var flags []string
	if member.Engram() {
		flags = append(flags, fmt.Sprintf("--response-bytes=%d", responses))
	}
	b := begin(t, flags...)
	client := b.Dial(t, func(c *clientv3.Config) { c.MaxCallRecvMsgSize = 64 << 20 })
	value := string(make([]byte, 64<<10))
	for i := range 128 { // 8 MiB
		_, err := client.Put(t.Context(), fmt.Sprintf("big/%03d", i), value)
		check(t, err)
	}
	conns, hold := 4, time.Second
	if member.Long() {
		conns, hold = 20, 12*time.Second // clients that do not read may do so for ten seconds
	}
	attack := func(t *testing.T, tls *tls.Config, address, method string, request []byte, streams int) (stop func()) {
		var all []*rough
		for range conns {
			r, err := roughly(t.Context(), address, tls, greedy...)
			check(t, err)
			all = append(all, r)
			check(t, r.WriteWindowUpdate(0, 1<<31-1-65535))
			for range streams {
				if method == watchMethod {
					stream, err := r.Open(method)
					check(t, err)
					check(t, r.WriteData(stream, false, framed(request)))
				} else {
					_, err := r.Call(method, request)
					check(t, err)
				}
			}
			check(t, r.Flush())
		}
		return func() {
			for _, r := range all {
				r.Close()
			}
		}
	}
	list := must(proto.Marshal(&pb.RangeRequest{Key: []byte("big/"), RangeEnd: []byte("big0")}))
	watch := must(proto.Marshal(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("big/"), RangeEnd: []byte("big0")}}}))
	reason := ""
	if member.Long() {
		reason = "stalled"
	}
	for name, secure := range map[string]*tls.Config{"cleartext": nil, "TLS": b.tls} {
		address := b.Clear
		if secure != nil {
			address = b.TLS
		}
		t.Run("lists/"+name, func(t *testing.T) {
			w := b.watch(t)
			defer attack(t, secure, address, rangeMethod, list, streams)()
			if !member.Long() {
				<-time.After(hold) // the measure is what the member holds meanwhile
			} else {
				// Good lists, which wait and are refused for want of room, are served once those that do not move have lost theirs.
				ctx, cancel := context.WithTimeout(t.Context(), 4*hold)
				defer cancel()
				began, before := time.Now(), b.limits(t)[reason]
				got, err := client.Get(ctx, "big/", clientv3.WithPrefix())
				for status.Code(err) == codes.ResourceExhausted || err == nil && member.Engram() && b.limits(t)[reason] == before {
					got, err = client.Get(ctx, "big/", clientv3.WithPrefix())
				}
				check(t, err)
				t.Logf("a list of %d keys was served after %v", len(got.Kvs), time.Since(began).Round(time.Millisecond))
			}
			if !member.Long() { // or some have been ended
				w.counted(t, "engram_grpc_streams", float64(conns*streams/2))
			}
			w.judge(t, 2*responses, reason, perThing(t, int64(conns*streams), perUnread))
		})
	}
	t.Run("watches", func(t *testing.T) {
		w := b.watch(t)
		defer attack(t, nil, b.Clear, watchMethod, watch, streams)()
		puts := 200
		if member.Long() {
			puts = 1000
		}
		for i := range puts {
			_, err := client.Put(t.Context(), fmt.Sprintf("big/%03d", i%128), value)
			check(t, err)
		}
		w.counted(t, slowWatchersMetric, float64(conns*streams)) // as long as they are there
		w.judge(t, 128<<20+int64(puts)*int64(len(value))*2, "", perThing(t, int64(puts*conns*streams), perEvent))
	})
}

// drip is a connection that writes each byte alone.
type drip struct {
	net.Conn
	bytes *atomic.Int64
	pause time.Duration
}

func (d drip) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := d.Conn.Write(b[i : i+1]); err != nil {
			return i, err
		}
		d.bytes.Add(1)
		time.Sleep(d.pause) // that is what this client is like
	}
	return len(b), nil
}

// TestOneByteAtATime has clients whose bytes come one by one: they are served, and cost little.
func TestOneByteAtATime(t *testing.T) {
	b := begin(t)
	clients := 20
	if member.Long() {
		clients = 200
	}
	put := framed(must(proto.Marshal(&pb.PutRequest{Key: []byte("slow"), Value: []byte("v")})))
	for name, secure := range map[string]*tls.Config{"cleartext": nil, "TLS": b.tls} {
		t.Run(name, func(t *testing.T) {
			w := b.watch(t)
			var bytes atomic.Int64
			var work sync.WaitGroup
			for range clients {
				work.Go(func() {
					conn, err := net.Dial("tcp", map[bool]string{true: b.Clear, false: b.TLS}[secure == nil])
					if err != nil {
						t.Error(err)
						return
					}
					defer conn.Close()
					if secure != nil {
						c := secure.Clone()
						c.ServerName = "localhost"
						conn = tls.Client(conn, c)
					}
					r := newRough(drip{conn, &bytes, time.Millisecond})
					r.SetDeadline(time.Now().Add(30 * time.Second))
					_, err = r.out.WriteString(http2.ClientPreface)
					if err == nil {
						err = r.WriteSettings()
					}
					var stream uint32
					if err == nil {
						stream, err = r.Open(putMethod)
					}
					if err == nil {
						err = r.WriteData(stream, true, put)
					}
					if err != nil {
						t.Error(err)
						return
					}
					if e, err := r.Answer(stream); err != nil || e.status != "0" {
						t.Errorf("%v, %v", e, err)
					}
				})
			}
			work.Wait()
			w.judge(t, 0, "", perThing(t, bytes.Load(), perByte))
			w.counted(t, "engram_grpc_connections_total", float64(clients))
			if secure == nil { // with TLS a read is a record
				w.counted(t, "engram_grpc_reads_total", float64(bytes.Load()/10)) // many come together on a busy machine
			}
		})
	}
}

// TestIdle opens very many connections that say nothing, or begin to say something and stop, in cleartext and where TLS is
// spoken. They cost next to nothing, keep nobody out, and are ended.
func TestIdle(t *testing.T) {
	t.Parallel() // it waits more than it works
	b := begin(t)
	part := 1 // in a hundred
	if member.Long() {
		part = 100
	}
	hello := clientHello(t)
	w := b.watch(t)
	alone := b.quiet()
	var all []net.Conn
	var ending int64
	var ended atomic.Int64
	began := time.Now()
	for _, c := range []struct {
		name, address string
		number        int
		said          []byte
		ends          bool // soon: HTTP/1.1 leaves a client minutes for its headers, as real members do
	}{
		{"cleartext", b.Clear, 5000, nil, true},
		{"cleartext, half a preface", b.Clear, 1000, []byte(http2.ClientPreface[:12]), true},
		{"cleartext, half a request", b.Clear, 500, []byte("GET /health HTT"), false},
		{"TLS", b.TLS, 5000, nil, true},
		{"TLS, half a hello", b.TLS, 1000, hello[:len(hello)/2], true},
		{"TLS, a hello and no more", b.TLS, 1000, hello, true},
	} {
		before, number := b.memory(), c.number*part/100
		for range number {
			conn, err := net.Dial("tcp", c.address)
			check(t, err)
			defer conn.Close()
			all = append(all, conn)
			_, err = conn.Write(c.said)
			check(t, err)
			if c.ends {
				ending++
			}
			go func() {
				io.Copy(io.Discard, conn)
				ended.Add(1)
			}()
		}
		t.Logf("%s: %d connections, %d KiB each", c.name, number, (b.memory()-before)>>10/int64(number))
	}
	t.Logf("%d connections were opened in %v", len(all), time.Since(began).Round(time.Millisecond))
	for name, dial := range map[string]func() *clientv3.Client{
		"cleartext": func() *clientv3.Client { return b.Dial(t) }, "TLS": func() *clientv3.Client { return b.DialTLS(t, "") },
	} {
		began, client := time.Now(), dial()
		_, err := client.Get(t.Context(), "a")
		check(t, err)
		took := time.Since(began)
		t.Logf("a new client over %s was served after %v", name, took.Round(time.Millisecond))
		if stood := b.stalls.Longest(began); took > greetWithin+stood && !race.On() {
			t.Errorf("a new client over %s was served after %v, at most %v is in order, and %v were the machine's", name, took, greetWithin, stood)
		}
	}
	share := b.quiet() - alone
	t.Logf("while they are idle they cost %.3f cores", share)
	reason := ""
	if member.Long() && member.Engram() {
		if share > idleShare {
			t.Errorf("idle connections cost %.3f cores, at most %.3f are in order", share, idleShare)
		}
		reason = "handshake"
		for deadline := time.Now().Add(handshakeWait); ended.Load() < ending && time.Now().Before(deadline); {
			time.Sleep(poll)
		}
		t.Logf("%d of them were ended after %v", ended.Load(), time.Since(began).Round(time.Second))
		if ended.Load() < ending {
			t.Errorf("%d connections are still there", ending-ended.Load())
		}
	}
	w.judge(t, int64(len(all))*perIdle, reason, func(time.Duration) {})
}

// quiet is what the member costs while the good client is silent, in CPU seconds per second. What goes on all the time is in each moment's cost; what
// else does is not in the least of some.
func (b *battle) quiet() float64 {
	b.t.Helper()
	defer b.good.hush()()
	share := math.Inf(1)
	for range 5 {
		before, began := b.cpu(), time.Now()
		<-time.After(time.Second) // the measure is the time
		share = min(share, (b.cpu()-before).Seconds()/time.Since(began).Seconds())
	}
	return share
}

// clientHello is the first thing that a TLS client says.
func clientHello(t *testing.T) []byte {
	t.Helper()
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	go tls.Client(client, &tls.Config{ServerName: "localhost", NextProtos: []string{"h2"}}).Handshake()
	head := make([]byte, 5)
	_, err := io.ReadFull(server, head)
	check(t, err)
	rest := make([]byte, int(head[3])<<8|int(head[4]))
	_, err = io.ReadFull(server, rest)
	check(t, err)
	return append(head, rest...)
}

// TestSilent has a client that does not answer pings: it is taken for dead, and one that does answer is not.
func TestSilent(t *testing.T) {
	t.Parallel() // it waits more than it works
	// A client that does answer has five seconds for it on a busy machine.
	m := member.Start(t, 0, "--grpc-keepalive-interval=1s", "--grpc-keepalive-timeout=5s")
	lives := m.Dial(t)
	watch := lives.Watch(t.Context(), "k", clientv3.WithCreatedNotify())
	<-watch
	began := time.Now()
	r := connect(t, m.Clear)
	check(t, r.SetDeadline(began.Add(silentWithin)))
	check(t, r.Flush())
	r.Deaf()
	took := time.Since(began)
	t.Logf("the connection of a client that answers no pings was ended after %v", took.Round(time.Millisecond))
	if took < 5500*time.Millisecond || took >= silentWithin {
		t.Errorf("that is not after one second of silence and five of waiting")
	}
	if !member.Engram() {
		return
	}
	all, err := m.Metrics(t.Context())
	check(t, err)
	if all[`engram_grpc_limits_total{reason="keepalive"}`] != 1 {
		t.Errorf("keepalive counts %v, want 1: only one client was silent", all[`engram_grpc_limits_total{reason="keepalive"}`])
	}
	_, err = lives.Put(t.Context(), "k", "v")
	check(t, err)
	if got := <-watch; got.Err() != nil || len(got.Events) != 1 {
		t.Errorf("the watch of a quiet client that does answer: %v", got)
	}
}

// TestPings has clients ping as often as they may, and more often.
func TestPings(t *testing.T) {
	m := member.Start(t, 0, "--grpc-keepalive-min-time=100ms")
	ping := func(t *testing.T, every time.Duration, n int) error {
		r := connect(t, m.Clear)
		_, err := r.Open(watchMethod) // without a call a client may hardly ping at all
		check(t, err)
		for i := range n {
			check(t, r.WritePing(false, [8]byte{byte(i)}))
			check(t, r.Flush())
			for {
				f, err := r.ReadFrame()
				check(t, err)
				if g, ok := f.(*http2.GoAwayFrame); ok {
					return fmt.Errorf("%v %s", g.ErrCode, g.DebugData())
				}
				if p, ok := f.(*http2.PingFrame); ok && p.IsAck() {
					break
				}
			}
			time.Sleep(every) // it is a time that is tested
		}
		return nil
	}
	if err := ping(t, 150*time.Millisecond, 10); err != nil {
		t.Errorf("a client that pings less often than it may: %v", err)
	}
	err := ping(t, 5*time.Millisecond, 1000) // on a busy machine not each of them is too early
	if want := "ENHANCE_YOUR_CALM too_many_pings"; err == nil || err.Error() != want {
		t.Errorf("a client that pings too often: %v, want %s", err, want)
	}
}
