package operations

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/cluster"
)

// program is built once for all tests.
var program = sync.OnceValues(func() (cluster.Program, error) { return cluster.Build("engram") })

// rig is a cluster, and a terminal.
type rig struct {
	*testing.T
	ctx context.Context
	c   *cluster.Cluster
	p   cluster.Program
	ctl string // the program as etcdctl
}

// begin starts so many members with flags.
func begin(t *testing.T, members int, flags ...string) *rig {
	t.Helper()
	t.Parallel() // it waits more than it works
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	r := &rig{T: t, ctx: ctx, c: cluster.New(t.TempDir()), p: p, ctl: filepath.Join(t.TempDir(), "etcdctl")}
	r.must(os.Symlink(p.Path, r.ctl))
	r.c.Flags = flags
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(r.c.Logs())
		}
		if err := r.c.Close(); err != nil {
			t.Error(err)
		}
	})
	all := make([]cluster.Program, members)
	for i := range all {
		all[i] = p
	}
	r.must(r.c.Start(ctx, all...))
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// within is how long is waited at most for what shall come.
const within = 2 * time.Minute

// until waits until f is content.
func (r *rig) until(what string, f func() error) {
	r.Helper()
	began := time.Now()
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Since(began) > within || r.ctx.Err() != nil {
			r.Fatalf("%s: not within %v: %v", what, within, err)
		}
		time.Sleep(50 * time.Millisecond) // of other processes: there is no event to wait for
	}
}

// try types a command line and returns what it printed.
func (r *rig) try(args ...string) (stdout, stderr string, err error) {
	r.Helper()
	return r.run(r.ctl, append([]string{"--endpoints=" + strings.Join(r.endpoints(), ",")}, args...)...)
}

func (r *rig) run(name string, args ...string) (stdout, stderr string, err error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(r.ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// typed is try of a command that must succeed.
func (r *rig) typed(args ...string) string {
	r.Helper()
	out, errs, err := r.try(args...)
	if err != nil {
		r.Fatalf("etcdctl %s: %v\n%s%s", strings.Join(args, " "), err, out, errs)
	}
	return out
}

func (r *rig) endpoints() (out []string) {
	for _, m := range r.c.Running() {
		out = append(out, m.Endpoint())
	}
	return out
}

// status is what `endpoint status -w json` has of each member.
type status struct {
	Endpoint string
	Status   struct {
		Header struct {
			Revision int64  `json:"revision"`
			MemberID uint64 `json:"member_id"`
		} `json:"header"`
		DBSize      int64    `json:"dbSize"`
		DBSizeInUse int64    `json:"dbSizeInUse"`
		Errors      []string `json:"errors"`
	}
}

func (r *rig) status() (out []status) {
	r.Helper()
	text := r.typed("endpoint", "status", "-w", "json")
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		r.Fatalf("%v in %s", err, text)
	}
	return out
}

func (r *rig) client() *clientv3.Client {
	r.Helper()
	c, err := r.c.Dial(r.c.Endpoints()...)
	r.must(err)
	r.Cleanup(func() { _ = c.Close() })
	return c
}

// alarms waits until an alarm of that text stands, or none does.
func (r *rig) alarms(want string) {
	r.Helper()
	r.until("alarm "+want, func() error {
		got := strings.TrimSpace(r.typed("alarm", "list"))
		if want == "" && got == "" || want != "" && strings.Contains(got, want) {
			return nil
		}
		return errors.New("alarm list says: " + got)
	})
}

// metric compares a figure of a member's /metrics.
func (r *rig) metric(m *cluster.Member, name string, want float64) error {
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, m.ClientURL+"/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(string(body), "\n") {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			if got, err := strconv.ParseFloat(rest, 64); err != nil || got != want {
				return fmt.Errorf("%s of %s is %s, want %v", name, m, rest, want)
			}
			return nil
		}
	}
	return fmt.Errorf("%s has no metric %s", m, name)
}
