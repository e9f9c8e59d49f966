package compat

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// The listeners of a member that httpRequests are sent to.
const (
	onClient     = "client"
	onPlain      = "plain"   // --listen-client-http-urls
	onMetrics    = "metrics" // --listen-metrics-urls
	onPeer       = "peer"
	withAlarm    = "alarm"     // client, while NOSPACE is on
	withCorrupt  = "corrupt"   // client, while CORRUPT is on
	afterSplit   = "split"     // client, once there is a plain listener
	onLimited    = "limited"   // client, with lists of origins and hosts
	onProfiling  = "profiling" // client, with --enable-pprof
	limitedHost  = "known.example"
	limitedSites = "http://a.example:80,http://b.example:80"
)

// httpRequest is sent to both programs, which must answer alike.
type httpRequest struct {
	where, method, path string
	origin, host        string
	statusOnly          bool   // bodies are each program's own
	apart               string // why the answers differ; they must
}

var httpRequests = []httpRequest{
	{where: onClient, path: "/health"},
	{where: onClient, path: "/health", method: "POST"},
	{where: onClient, path: "/health", method: "HEAD"},
	{where: onClient, path: "/health?serializable=true"},
	{where: onClient, path: "/health?exclude=NOSPACE"},
	{where: onClient, path: "/livez"},
	{where: onClient, path: "/livez", method: "POST"},
	{where: onClient, path: "/livez?verbose"},
	{where: onClient, path: "/livez?verbose=false"},
	{where: onClient, path: "/livez/serializable_read"},
	{where: onClient, path: "/livez/serializable_read?verbose"},
	{where: onClient, path: "/livez?exclude=serializable_read&verbose"},
	{where: onClient, path: "/livez?exclude=nope&verbose"},
	{where: onClient, path: "/livez/nope"},
	{where: onClient, path: "/livez/"},
	{where: onClient, path: "/readyz"},
	{where: onClient, path: "/readyz?verbose"},
	{where: onClient, path: "/readyz?exclude=linearizable_read&exclude=non_learner&verbose"},
	{where: onClient, path: "/readyz/data_corruption"},
	{where: onClient, path: "/readyz/linearizable_read"},
	{where: onClient, path: "/readyz/serializable_read"},
	{where: onClient, path: "/readyz/non_learner?verbose"},
	{where: onClient, path: "/readyz/nope"},
	{where: onClient, path: "/version", apart: "our own version stands beside etcd's"},
	{where: onClient, path: "/version", method: "POST"},
	{where: onClient, path: "/metrics", statusOnly: true},
	{where: onClient, path: "/metrics", method: "POST", statusOnly: true},
	{where: onClient, path: "/debug/vars", statusOnly: true},
	{where: onClient, path: "/debug/pprof/"},
	{where: onClient, path: "/debug/requests"},
	{where: onClient, path: "/v2/keys"},
	{where: onClient, path: "/"},
	{where: onClient, path: "/nope", method: "OPTIONS"},
	{where: onClient, path: "/health", origin: "http://any.example"},
	{where: onClient, path: "/health", host: "any.example"},
	{where: onClient, path: "/v3/kv/range", apart: "no gateway"},

	{where: onMetrics, path: "/health"},
	{where: onMetrics, path: "/livez?verbose"},
	{where: onMetrics, path: "/readyz?verbose"},
	{where: onMetrics, path: "/readyz/non_learner"},
	{where: onMetrics, path: "/metrics", statusOnly: true},
	{where: onMetrics, path: "/version"},
	{where: onMetrics, path: "/debug/vars"},
	{where: onMetrics, path: "/v3/kv/range"},
	{where: onMetrics, path: "/health", method: "OPTIONS"},
	{where: onMetrics, path: "/health", host: "other.example"},

	{where: onPlain, path: "/health", host: limitedHost},
	{where: onPlain, path: "/metrics", host: limitedHost, statusOnly: true},
	{where: afterSplit, path: "/health"},

	{where: onPeer, path: "/version", apart: "our own version stands beside etcd's"},
	{where: onPeer, path: "/members"},
	{where: onPeer, path: "/members", method: "POST"},
	{where: onPeer, path: "/health"},
	{where: onPeer, path: "/metrics"},
	{where: onPeer, path: "/raft/probing", statusOnly: true},

	{where: onLimited, path: "/health", host: limitedHost},
	{where: onLimited, path: "/health", host: limitedHost + ":2379"},
	{where: onLimited, path: "/health", host: "other.example", statusOnly: true},
	{where: onLimited, path: "/nope", host: "other.example", statusOnly: true, method: "OPTIONS"},
	{where: onLimited, path: "/health", host: limitedHost, origin: "http://b.example:80"},
	{where: onLimited, path: "/health", host: limitedHost, origin: "http://c.example:80"},
	{where: onLimited, path: "/health", host: limitedHost, origin: "http://b.example:80", method: "OPTIONS"},
	{where: onProfiling, path: "/debug/pprof/", host: limitedHost, statusOnly: true},
	{where: onProfiling, path: "/debug/pprof/cmdline", host: limitedHost, statusOnly: true},
	{where: onProfiling, path: "/debug/requests", host: limitedHost},

	{where: withAlarm, path: "/health"},
	{where: withAlarm, path: "/health?exclude=NOSPACE"},
	{where: withAlarm, path: "/health?exclude=CORRUPT"},
	{where: withAlarm, path: "/readyz?verbose"},
	{where: withAlarm, path: "/livez?verbose"},
	{where: withCorrupt, path: "/health"},
	{where: withCorrupt, path: "/health?exclude=CORRUPT"},
	{where: withCorrupt, path: "/readyz"},
	{where: withCorrupt, path: "/readyz/data_corruption"},
	{where: withCorrupt, path: "/readyz?exclude=data_corruption"},
	{where: withCorrupt, path: "/livez"},
}

// TestHTTP sends the same requests to both programs' listeners.
func TestHTTP(t *testing.T) {
	ctx := surfaceContext(t)
	var sides [2]map[string]string // listener to URL
	var conns [2]*process.Server
	for i, program := range []string{programs.Etcd, subject} {
		sides[i] = map[string]string{onMetrics: freeURL(t)}
		plain, err := process.Start(process.Options{Program: program, Dir: t.TempDir(), Name: "m", Flags: []string{"--listen-metrics-urls=" + sides[i][onMetrics]}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(plain.Close)
		conns[i] = plain
		sides[i][onClient], sides[i][onPeer] = plain.ClientURL, plain.PeerURL
		sides[i][withAlarm], sides[i][withCorrupt] = plain.ClientURL, plain.ClientURL
		limits := []string{"--cors=" + limitedSites, "--host-whitelist=" + limitedHost, "--enable-pprof"}
		limited, err := process.Start(process.Options{Program: program, Dir: t.TempDir(), Name: "m", Flags: limits})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(limited.Close)
		sides[i][onLimited], sides[i][onProfiling] = limited.ClientURL, limited.ClientURL
		sides[i][onPlain] = freeURL(t)
		split, err := process.Start(process.Options{Program: program, Dir: t.TempDir(), Name: "m",
			Flags: append(limits, "--listen-client-http-urls="+sides[i][onPlain])})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(split.Close)
		sides[i][afterSplit] = split.ClientURL
	}
	for _, where := range []string{onClient, onMetrics, onPlain, afterSplit, onPeer, onLimited, onProfiling, withAlarm, withCorrupt} {
		alarm := map[string]etcdserverpb.AlarmType{withAlarm: etcdserverpb.AlarmType_NOSPACE, withCorrupt: etcdserverpb.AlarmType_CORRUPT}[where]
		for i := range sides {
			setAlarm(ctx, t, conns[i], etcdserverpb.AlarmRequest_ACTIVATE, alarm)
		}
		for _, r := range httpRequests {
			if r.where != where {
				continue
			}
			var answers [2]string
			for i := range sides {
				text := r.send(ctx, sides[i][where])
				text = strings.NewReplacer(sides[i][onClient], "$client", sides[i][onPeer], "$peer", decimalID(ctx, t, conns[i]), "$member").Replace(text)
				answers[i] = text
			}
			what := fmt.Sprintf("%s: %s %s, host %q, origin %q", r.where, r.method, r.path, r.host, r.origin)
			if r.apart == "" || programs.Engram == "" {
				equal(t, what, answers)
			} else if answers[0] == answers[1] {
				t.Errorf("%s: the answers are equal, and are said to differ: %s", what, r.apart)
			}
		}
		for i := range sides {
			setAlarm(ctx, t, conns[i], etcdserverpb.AlarmRequest_DEACTIVATE, alarm)
		}
	}
}

// setAlarm raises or clears an alarm, none for NONE.
func setAlarm(ctx context.Context, t *testing.T, s *process.Server, action etcdserverpb.AlarmRequest_AlarmAction, alarm etcdserverpb.AlarmType) {
	t.Helper()
	if alarm == etcdserverpb.AlarmType_NONE {
		return
	}
	if _, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Alarm(ctx, &etcdserverpb.AlarmRequest{Action: action, Alarm: alarm}); err != nil {
		t.Fatal(err)
	}
}

func decimalID(ctx context.Context, t *testing.T, s *process.Server) string {
	t.Helper()
	r, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Status(ctx, &etcdserverpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(r.Header.MemberId)
}

// send prints the answer: status, headers, body. The lines of a probe, which come in no order, are sorted.
func (r httpRequest) send(ctx context.Context, url string) string {
	method := r.method
	if method == "" {
		method = "GET"
	}
	request, err := http.NewRequestWithContext(ctx, method, url+r.path, nil)
	if err != nil {
		return err.Error()
	}
	request.Host = r.host
	if r.origin != "" {
		request.Header.Set("Origin", r.origin)
	}
	answer, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		return "no answer"
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err.Error()
	}
	var lines []string
	for name, values := range answer.Header {
		switch name {
		case "Date", "Content-Length", "Vary", "X-Etcd-Cluster-Id", "X-Engram-Version", "X-Engram-Snapshot-Version": // the last two by design: peers know each other by it
			continue // of the moment, of the body, of the library, of the cluster
		}
		lines = append(lines, name+": "+strings.Join(values, ", "))
	}
	slices.Sort(lines)
	text := answer.Status + "\n" + strings.Join(lines, "\n") + "\n"
	if r.statusOnly {
		return text
	}
	content := strings.SplitAfter(string(body), "\n")
	slices.Sort(content)
	return text + strings.Join(content, "")
}

// freeURL returns a URL on which nobody listens.
func freeURL(t *testing.T) string {
	t.Helper()
	port, err := cluster.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	return "http://127.0.0.1:" + port
}

// TestUnixSocket asks over a socket file.
func TestUnixSocket(t *testing.T) {
	var answers [2]string
	for i, program := range []string{programs.Etcd, subject} {
		socket := filepath.Join(t.TempDir(), "s")
		s, err := process.Start(process.Options{Program: program, Dir: t.TempDir(), Name: "m", Flags: []string{"--listen-client-http-urls=unix://" + socket}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
		r, err := client.Get("http://member/health")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		answers[i] = fmt.Sprintf("%s %s %v", r.Status, body, err)
	}
	equal(t, "health over a socket file", answers)
}
