// Package web answers HTTP: health, version, metrics and what helps debugging.
//
// It serves what etcd serves on its client and metrics listeners, to the letter
// where probes and scripts look. It knows nothing of keys; what it asks of the
// member stands in Member. Handler and MetricsHandler are the entry points.
// Invariants:
//
//	H1: a request reads at most one key, and ends with the client or after
//	    Options.ReadTimeout.
//	H2: a probe needs no credentials, also while auth is on.
package web

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Member is what is asked of the member. Safe for concurrent use.
type Member interface {
	// Leader returns the member that leads, 0 if none is known.
	Leader() uint64
	// Learner says that this member has no vote.
	Learner() bool
	// Alarms returns the alarms that are on.
	Alarms() []*pb.AlarmMember
	// Read reads one key with root's rights: from this member alone, or one
	// that is linearizable. The text of its error is shown as it is, that of a
	// gRPC status without its code. It returns when ctx ends.
	Read(ctx context.Context, linearizable bool) error
	// Versions returns what /version tells.
	Versions() Versions
}

// Versions are the versions that /version tells.
type Versions struct {
	Server  string `json:"etcdserver"`  // etcd's, that we are compatible with
	Cluster string `json:"etcdcluster"` // "not_decided" at first
	Storage string `json:"storage"`     // "unknown" at first
	Engram  string `json:"engram"`      // our own; real members have none
}

// Options configure the handlers. Member, Metrics and Gatherer are needed.
type Options struct {
	Member  Member
	Metrics *Metrics
	// Gatherer is what /metrics shows, and Registerer, which may be nil, where
	// that page counts its own requests.
	Gatherer   prometheus.Gatherer
	Registerer prometheus.Registerer
	// ReadTimeout bounds the read of a probe; default 7 s.
	ReadTimeout time.Duration
	// Profiling serves /debug/pprof.
	Profiling bool
	// Vars are shown by /debug/vars beside its own. They must marshal to JSON.
	Vars map[string]func() any
	// Origins are the origins that browsers may call from; "*" or empty means
	// all.
	Origins []string
	// Hosts are the host names that may be asked for without TLS; "*" or empty
	// means all.
	Hosts  []string
	Logger *slog.Logger // nil means discard
}

func (o *Options) setDefaults() {
	if o.ReadTimeout == 0 {
		o.ReadTimeout = 7 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Handler serves a client listener: everything, behind the access rules for
// origins and hosts.
func Handler(o Options) http.Handler {
	o.setDefaults()
	mux := http.NewServeMux()
	o.addCommon(mux)
	mux.Handle("/version", onlyGet(o.version))
	mux.HandleFunc("/debug/vars", o.vars)
	if o.Profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return newAccess(o.Origins, o.Hosts, mux)
}

// MetricsHandler serves a metrics listener: metrics and probes, to anybody.
func MetricsHandler(o Options) http.Handler {
	o.setDefaults()
	mux := http.NewServeMux()
	o.addCommon(mux)
	return mux
}

func (o *Options) addCommon(mux *http.ServeMux) {
	mux.Handle("/metrics", o.metrics())
	mux.Handle("/health", onlyGet(o.health))
	for _, p := range o.probes() {
		mux.Handle("/"+p.name, onlyGet(p.serve))
		mux.Handle("/"+p.name+"/{check}", onlyGet(p.serveOne))
	}
}

func (o *Options) metrics() http.Handler {
	h := promhttp.HandlerFor(o.Gatherer, promhttp.HandlerOpts{})
	if o.Registerer != nil {
		h = promhttp.InstrumentMetricHandler(o.Registerer, h)
	}
	return h
}

func (o *Options) version(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, o.Logger, o.Member.Versions())
}

// onlyGet refuses all methods but GET, HEAD included, as etcd does.
func onlyGet(h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			w.Header().Set("Allow", http.MethodGet)
			http.Error(w, "Method Not Allowed", http.StatusMethodNotAllowed)
			return
		}
		h(w, r)
	})
}

func writeJSON(w http.ResponseWriter, log *slog.Logger, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		log.Error("cannot marshal an HTTP answer", "error", err)
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "application/json")
	}
	if _, err := w.Write(b); err != nil {
		log.Debug("HTTP client left", "error", err)
	}
}
