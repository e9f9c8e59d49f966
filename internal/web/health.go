package web

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/status"
)

// health serves /health: is this a member that clients should use?
func (o *Options) health(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	reason := o.unhealthy(r.Context(), q["exclude"], q.Get("serializable") == "true")
	body := struct {
		Health string `json:"health"`
		Reason string `json:"reason"`
	}{"true", reason}
	code := http.StatusOK
	if reason == "" {
		o.Metrics.healthOK.Inc()
	} else {
		o.Metrics.healthFailed.Inc()
		body.Health, code = "false", http.StatusServiceUnavailable
		o.Logger.Warn("health check failed", "reason", reason)
	}
	b, err := json.Marshal(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if code != http.StatusOK {
		http.Error(w, string(b), code) // with its newline and header, as etcd's
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if _, err := w.Write(b); err != nil {
		o.Logger.Debug("HTTP client left", "error", err)
	}
}

// unhealthy returns why the member is not healthy, or "".
func (o *Options) unhealthy(ctx context.Context, exclude []string, serializable bool) string {
	for _, a := range o.Member.Alarms() {
		if a.Alarm == pb.AlarmType_NONE || slices.Contains(exclude, a.Alarm.String()) {
			continue
		}
		switch a.Alarm {
		case pb.AlarmType_NOSPACE, pb.AlarmType_CORRUPT:
			return "ALARM " + a.Alarm.String()
		}
		return "ALARM UNKNOWN"
	}
	if !serializable && o.Member.Leader() == 0 {
		return "RAFT NO LEADER"
	}
	if err := o.read(ctx, !serializable); err != nil {
		return "RANGE ERROR:" + errorText(err)
	}
	return ""
}

func (o *Options) read(ctx context.Context, linearizable bool) error {
	ctx, cancel := context.WithTimeout(ctx, o.ReadTimeout)
	defer cancel()
	return o.Member.Read(ctx, linearizable)
}

// errorText is an error's text, without the code if it is a gRPC status.
func errorText(err error) string {
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}

// check is one of the questions that a probe asks.
type check struct {
	name string
	run  func(context.Context) error
}

// probe is /livez or /readyz.
type probe struct {
	o      *Options
	name   string
	checks []check
}

func (o *Options) probes() []*probe {
	serializable := check{"serializable_read", func(ctx context.Context) error { return o.read(ctx, false) }}
	return []*probe{
		{o, "livez", []check{serializable}},
		{o, "readyz", []check{
			{"data_corruption", o.corruption},
			serializable,
			{"linearizable_read", func(ctx context.Context) error { return o.read(ctx, true) }},
			{"non_learner", o.learner},
		}},
	}
}

func (o *Options) corruption(context.Context) error {
	for _, a := range o.Member.Alarms() {
		if a.Alarm == pb.AlarmType_CORRUPT {
			return fmt.Errorf("alarm activated: %s", a.Alarm)
		}
	}
	return nil
}

func (o *Options) learner(context.Context) error {
	if o.Member.Learner() {
		return fmt.Errorf("not supported for learner")
	}
	return nil
}

func (p *probe) serve(w http.ResponseWriter, r *http.Request) {
	exclude := r.URL.Query()["exclude"]
	checks := slices.DeleteFunc(slices.Clone(p.checks), func(c check) bool { return slices.Contains(exclude, c.name) })
	p.run(w, r, checks)
}

// serveOne serves the path of a single check.
func (p *probe) serveOne(w http.ResponseWriter, r *http.Request) {
	for _, c := range p.checks {
		if c.name == r.PathValue("check") {
			p.run(w, r, []check{c})
			return
		}
	}
	http.NotFound(w, r)
}

// run makes the checks one after the other. The lines are shown when asked for,
// and when a check failed.
func (p *probe) run(w http.ResponseWriter, r *http.Request, checks []check) {
	var lines strings.Builder
	var failed []string
	for _, c := range checks {
		err := c.run(r.Context())
		p.o.Metrics.checked(p.name, c.name, err)
		if err != nil {
			fmt.Fprintf(&lines, "[-]%s failed: %s\n", c.name, errorText(err))
			failed = append(failed, c.name)
			continue
		}
		fmt.Fprintf(&lines, "[+]%s ok\n", c.name)
	}
	if len(failed) > 0 {
		p.o.Logger.Warn("probe failed", "probe", p.name, "checks", failed)
		http.Error(w, lines.String(), http.StatusServiceUnavailable) // ends in an empty line, as etcd's
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	body := "ok\n"
	if r.URL.Query().Has("verbose") {
		body = lines.String() + body
	}
	if _, err := io.WriteString(w, body); err != nil {
		p.o.Logger.Debug("HTTP client left", "error", err)
	}
}
