package web

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// fakeMember answers as its fields say.
type fakeMember struct {
	leader       uint64
	learner      bool
	alarms       []pb.AlarmType
	local        error
	linearizable error
	hang         bool // reads end with their context only
}

func (m *fakeMember) Leader() uint64 { return m.leader }
func (m *fakeMember) Learner() bool  { return m.learner }

func (m *fakeMember) Alarms() (out []*pb.AlarmMember) {
	for _, a := range m.alarms {
		out = append(out, &pb.AlarmMember{MemberID: 7, Alarm: a})
	}
	return out
}

func (m *fakeMember) Read(ctx context.Context, linearizable bool) error {
	if m.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if linearizable {
		return m.linearizable
	}
	return m.local
}

func (m *fakeMember) Versions() Versions {
	return Versions{Server: "3.7.3", Cluster: "3.7.0", Storage: "3.7.0", Engram: "0.1.0"}
}

func options(m Member) Options {
	r := prometheus.NewRegistry()
	o := Options{Member: m, Metrics: NewMetrics(), Gatherer: r, Registerer: r}
	if err := o.Metrics.Register(r); err != nil {
		panic(err)
	}
	return o
}

func do(h http.Handler, method, target string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, target, nil)
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
			continue
		}
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func expect(t *testing.T, w *httptest.ResponseRecorder, code int, body string) {
	t.Helper()
	if w.Code != code || w.Body.String() != body {
		t.Fatalf("got %d %q, want %d %q", w.Code, w.Body, code, body)
	}
}

const healthy = `{"health":"true","reason":""}`

func unhealthyBody(reason string) string {
	return `{"health":"false","reason":"` + reason + `"}` + "\n"
}

func TestHealth(t *testing.T) {
	nospace, corrupt := pb.AlarmType_NOSPACE, pb.AlarmType_CORRUPT
	timedOut := rpctypes.ErrGRPCTimeout
	for _, c := range []struct {
		name   string
		m      fakeMember
		target string
		code   int
		body   string
	}{
		{"healthy", fakeMember{leader: 1}, "/health", 200, healthy},
		{"no space", fakeMember{leader: 1, alarms: []pb.AlarmType{nospace}}, "/health", 503, unhealthyBody("ALARM NOSPACE")},
		{"corrupt", fakeMember{leader: 1, alarms: []pb.AlarmType{corrupt}}, "/health", 503, unhealthyBody("ALARM CORRUPT")},
		{"alarm of a later version", fakeMember{leader: 1, alarms: []pb.AlarmType{9}}, "/health", 503, unhealthyBody("ALARM UNKNOWN")},
		{"excluded", fakeMember{leader: 1, alarms: []pb.AlarmType{nospace}}, "/health?exclude=NOSPACE", 200, healthy},
		{"another excluded", fakeMember{leader: 1, alarms: []pb.AlarmType{corrupt}}, "/health?exclude=NOSPACE", 503, unhealthyBody("ALARM CORRUPT")},
		{"both excluded", fakeMember{leader: 1, alarms: []pb.AlarmType{corrupt, nospace}}, "/health?exclude=NOSPACE&exclude=CORRUPT", 200, healthy},
		{"no leader", fakeMember{}, "/health", 503, unhealthyBody("RAFT NO LEADER")},
		{"no leader does not wait", fakeMember{hang: true}, "/health", 503, unhealthyBody("RAFT NO LEADER")},
		{"alarm before leader", fakeMember{alarms: []pb.AlarmType{nospace}}, "/health", 503, unhealthyBody("ALARM NOSPACE")},
		{"serializable without leader", fakeMember{linearizable: timedOut}, "/health?serializable=true", 200, healthy},
		{"serializable=false", fakeMember{}, "/health?serializable=false", 503, unhealthyBody("RAFT NO LEADER")},
		{"read fails", fakeMember{leader: 1, linearizable: timedOut}, "/health", 503, unhealthyBody("RANGE ERROR:etcdserver: request timed out")},
		{"local read fails", fakeMember{local: errors.New("disk gone")}, "/health?serializable=true", 503, unhealthyBody("RANGE ERROR:disk gone")},
		{"learner", fakeMember{leader: 1, learner: true}, "/health", 200, healthy},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := options(&c.m)
			w := do(Handler(o), "GET", c.target)
			expect(t, w, c.code, c.body)
			if got := w.Header().Get("Content-Type"); !strings.HasPrefix(got, "text/plain") {
				t.Fatalf("content type %q", got)
			}
			got, want := samples(t, o, "etcd_server_health_"), "etcd_server_health_failures 1\netcd_server_health_success 0\n"
			if c.code == 200 {
				want = "etcd_server_health_failures 0\netcd_server_health_success 1\n"
			}
			if got != want {
				t.Fatalf("counted\n%s", got)
			}
		})
	}
}

func TestOnlyGet(t *testing.T) {
	h := Handler(options(&fakeMember{leader: 1}))
	for _, target := range []string{"/health", "/livez", "/readyz", "/livez/serializable_read", "/version"} {
		for _, method := range []string{"POST", "HEAD", "PUT", "DELETE"} {
			w := do(h, method, target)
			if w.Code != 405 || w.Header().Get("Allow") != "GET" || strings.TrimSpace(w.Body.String()) != "Method Not Allowed" {
				t.Errorf("%s %s: %d %q, allow %q", method, target, w.Code, w.Body, w.Header().Get("Allow"))
			}
		}
	}
}

func TestProbes(t *testing.T) {
	timedOut := rpctypes.ErrGRPCTimeout
	readyLines := "[+]data_corruption ok\n[+]serializable_read ok\n[+]linearizable_read ok\n[+]non_learner ok\n"
	for _, c := range []struct {
		name   string
		m      fakeMember
		target string
		code   int
		body   string
	}{
		{"live", fakeMember{}, "/livez", 200, "ok\n"},
		{"live, verbose", fakeMember{}, "/livez?verbose", 200, "[+]serializable_read ok\nok\n"},
		{"live without quorum", fakeMember{linearizable: timedOut}, "/livez", 200, "ok\n"},
		{"live, one check", fakeMember{}, "/livez/serializable_read", 200, "ok\n"},
		{"not live", fakeMember{local: errors.New("disk gone")}, "/livez", 503, "[-]serializable_read failed: disk gone\n"},
		{"live has no such check", fakeMember{}, "/livez/linearizable_read", 404, "404 page not found\n"},
		{"ready", fakeMember{leader: 1}, "/readyz", 200, "ok\n"},
		{"ready, verbose", fakeMember{leader: 1}, "/readyz?verbose", 200, readyLines + "ok\n"},
		{"ready, verbose with a value", fakeMember{leader: 1}, "/readyz?verbose=true", 200, readyLines + "ok\n"},
		{"ready under NOSPACE", fakeMember{alarms: []pb.AlarmType{pb.AlarmType_NOSPACE}}, "/readyz", 200, "ok\n"},
		{"corrupt", fakeMember{alarms: []pb.AlarmType{pb.AlarmType_CORRUPT}}, "/readyz", 503,
			strings.Replace(readyLines, "[+]data_corruption ok", "[-]data_corruption failed: alarm activated: CORRUPT", 1)},
		{"no quorum", fakeMember{linearizable: timedOut}, "/readyz", 503,
			strings.Replace(readyLines, "[+]linearizable_read ok", "[-]linearizable_read failed: etcdserver: request timed out", 1)},
		{"learner", fakeMember{learner: true}, "/readyz", 503,
			strings.Replace(readyLines, "[+]non_learner ok", "[-]non_learner failed: not supported for learner", 1)},
		{"learner, excluded", fakeMember{learner: true}, "/readyz?exclude=non_learner", 200, "ok\n"},
		{"excluded and verbose", fakeMember{learner: true}, "/readyz?exclude=non_learner&exclude=data_corruption&verbose", 200,
			"[+]serializable_read ok\n[+]linearizable_read ok\nok\n"},
		{"unknown names are ignored", fakeMember{}, "/readyz?exclude=weather", 200, "ok\n"},
		{"one check", fakeMember{learner: true}, "/readyz/data_corruption", 200, "ok\n"},
		{"one check, verbose", fakeMember{}, "/readyz/linearizable_read?verbose", 200, "[+]linearizable_read ok\nok\n"},
		{"one check fails", fakeMember{learner: true}, "/readyz/non_learner", 503, "[-]non_learner failed: not supported for learner\n"},
		{"unknown check", fakeMember{}, "/readyz/weather", 404, "404 page not found\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := do(Handler(options(&c.m)), "GET", c.target)
			if c.code == 503 {
				c.body += "\n" // an empty line ends a failure
			}
			expect(t, w, c.code, c.body)
			if got := w.Header().Get("Content-Type"); got != "text/plain; charset=utf-8" {
				t.Errorf("content type %q", got)
			}
			if got := w.Header().Get("X-Content-Type-Options"); got != "nosniff" {
				t.Errorf("X-Content-Type-Options %q", got)
			}
		})
	}
}

func TestProbeMetrics(t *testing.T) {
	o := options(&fakeMember{learner: true})
	do(Handler(o), "GET", "/readyz")
	do(Handler(o), "GET", "/readyz/non_learner")
	do(Handler(o), "GET", "/livez")
	const want = `etcd_server_healthcheck{name="data_corruption",type="readyz"} 1
etcd_server_healthcheck{name="linearizable_read",type="readyz"} 1
etcd_server_healthcheck{name="non_learner",type="readyz"} 0
etcd_server_healthcheck{name="serializable_read",type="livez"} 1
etcd_server_healthcheck{name="serializable_read",type="readyz"} 1
etcd_server_healthchecks_total{name="data_corruption",status="success",type="readyz"} 1
etcd_server_healthchecks_total{name="linearizable_read",status="success",type="readyz"} 1
etcd_server_healthchecks_total{name="non_learner",status="error",type="readyz"} 2
etcd_server_healthchecks_total{name="serializable_read",status="success",type="livez"} 1
etcd_server_healthchecks_total{name="serializable_read",status="success",type="readyz"} 1
`
	if got := samples(t, o, "etcd_server_healthcheck"); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

// samples returns the lines of /metrics that begin with prefix.
func samples(t *testing.T, o Options, prefix string) string {
	t.Helper()
	var out strings.Builder
	o.Registerer = nil
	for line := range strings.Lines(do(MetricsHandler(o), "GET", "/metrics").Body.String()) {
		if strings.HasPrefix(line, prefix) {
			out.WriteString(line)
		}
	}
	return out.String()
}

func TestReadTimeout(t *testing.T) {
	o := options(&fakeMember{leader: 1, hang: true})
	o.ReadTimeout = 1
	expect(t, do(Handler(o), "GET", "/health"), 503, unhealthyBody("RANGE ERROR:context deadline exceeded"))
}

func TestPlainEndpoints(t *testing.T) {
	o := options(&fakeMember{leader: 1})
	o.Vars = map[string]func() any{"raft.status": func() any { return map[string]int{"term": 3} }}
	h := Handler(o)
	w := do(h, "GET", "/version")
	expect(t, w, 200, `{"etcdserver":"3.7.3","etcdcluster":"3.7.0","storage":"3.7.0","engram":"0.1.0"}`)
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		t.Errorf("/version: content type %q", got)
	}
	for range 2 { // the second shows the first
		w = do(h, "GET", "/metrics")
	}
	for _, want := range []string{"# TYPE etcd_server_health_success counter\n", "promhttp_metric_handler_requests_total{code=\"200\"} 1\n"} {
		if w.Code != 200 || !strings.Contains(w.Body.String(), want) {
			t.Errorf("/metrics: %d, no %q in\n%s", w.Code, want, w.Body)
		}
	}
	var vars struct {
		Limit    uint64          `json:"file_descriptor_limit"`
		CmdLine  []string        `json:"cmdline"`
		MemStats json.RawMessage `json:"memstats"`
		Raft     map[string]int  `json:"raft.status"`
	}
	w = do(h, "GET", "/debug/vars")
	if err := json.Unmarshal(w.Body.Bytes(), &vars); err != nil {
		t.Fatal(err)
	}
	if vars.Limit == 0 || len(vars.CmdLine) == 0 || len(vars.MemStats) == 0 || vars.Raft["term"] != 3 {
		t.Errorf("/debug/vars: %+v", vars)
	}
	for _, target := range []string{"/", "/v2/keys", "/v2/members", "/debug/pprof/", "/debug/requests", "/v3alpha/kv/range", "/healthz"} {
		expect(t, do(h, "GET", target), 404, "404 page not found\n")
	}
}

func TestProfiling(t *testing.T) {
	o := options(&fakeMember{})
	o.Profiling = true
	h := Handler(o)
	for _, target := range []string{"/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=1"} {
		if w := do(h, "GET", target); w.Code != 200 || w.Body.Len() == 0 {
			t.Errorf("%s: %d, %d bytes", target, w.Code, w.Body.Len())
		}
	}
}

func TestMetricsListener(t *testing.T) {
	o := options(&fakeMember{leader: 1})
	o.Profiling, o.Hosts, o.Origins = true, []string{"known.example"}, []string{"http://known.example"}
	h := MetricsHandler(o)
	for _, target := range []string{"/metrics", "/health", "/livez", "/readyz", "/readyz/non_learner"} {
		w := do(h, "GET", target, "Host", "10.0.0.1:2381")
		if w.Code != 200 {
			t.Errorf("%s: %d", target, w.Code)
		}
		if w.Header().Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s has CORS headers", target)
		}
	}
	for _, target := range []string{"/version", "/debug/vars", "/debug/pprof/", "/v3/kv/range"} {
		expect(t, do(h, "GET", target), 404, "404 page not found\n")
	}
}

func TestCORS(t *testing.T) {
	for _, c := range []struct {
		name    string
		allowed []string
		origin  string
		want    string
	}{
		{"default", nil, "", "*"},
		{"star", []string{"*"}, "http://a.example", "*"},
		{"listed", []string{"http://a.example", "http://b.example"}, "http://b.example", "http://b.example"},
		{"not listed", []string{"http://a.example"}, "http://b.example", ""},
		{"no browser", []string{"http://a.example"}, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := options(&fakeMember{leader: 1})
			o.Origins = c.allowed
			for _, target := range []string{"/health", "/nowhere"} {
				w := do(Handler(o), "GET", target, "Origin", c.origin)
				got := []string{w.Header().Get("Access-Control-Allow-Origin"), w.Header().Get("Access-Control-Allow-Methods"), w.Header().Get("Access-Control-Allow-Headers")}
				want := []string{c.want, "POST, GET, OPTIONS, PUT, DELETE", "accept, content-type, authorization"}
				if c.want == "" {
					want = []string{"", "", ""}
				}
				if !slices.Equal(got, want) {
					t.Errorf("%s: got %q, want %q", target, got, want)
				}
			}
			expect(t, do(Handler(o), "OPTIONS", "/anything/at/all", "Origin", c.origin), 200, "")
		})
	}
}

func TestHosts(t *testing.T) {
	for _, c := range []struct {
		hosts []string
		host  string
		ok    bool
	}{
		{nil, "anything.example", true},
		{[]string{"*"}, "anything.example:2379", true},
		{[]string{"known.example", "::1"}, "known.example", true},
		{[]string{"known.example", "::1"}, "known.example:2379", true},
		{[]string{"known.example", "::1"}, "[::1]:2379", true},
		{[]string{"known.example", "::1"}, "[::1]", true},
		{[]string{"known.example"}, "evil.example:2379", false},
		{[]string{"known.example"}, "sub.known.example", false},
		{[]string{"known.example"}, "127.0.0.1:2379", false},
	} {
		o := options(&fakeMember{leader: 1})
		o.Hosts = c.hosts
		w := do(Handler(o), "GET", "/health", "Host", c.host)
		if c.ok {
			expect(t, w, 200, healthy)
			continue
		}
		if body := w.Body.String(); w.Code != 421 || !strings.Contains(body, "--host-whitelist") || !strings.Contains(body, "CVE-2018-5702") {
			t.Errorf("%q at %q: %d %q", c.hosts, c.host, w.Code, body)
		}
	}
	o := options(&fakeMember{leader: 1})
	o.Hosts = []string{"known.example"}
	if w := do(Handler(o), "GET", "https://evil.example/health"); w.Code != 200 {
		t.Errorf("with TLS: %d", w.Code)
	}
}
