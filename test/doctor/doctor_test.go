// Package doctor lets `ctl doctor`, `du` and `top` look at clusters of real processes, well ones and broken ones. With
// CLUSTER_PROGRAM=etcd the cluster is etcd's, which the tool examines, too.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/ctl"
	"github.com/engram-kv/engram/test/internal/cluster"
)

var program = sync.OnceValues(func() (cluster.Program, error) { return cluster.Build(cluster.Chosen()) })

// engram says that the members are Engrams.
func engram() bool { return cluster.Chosen() == cluster.DefaultProgram }

// start starts a cluster of so many members, with flags.
func start(t *testing.T, members int, flags ...string) (context.Context, *cluster.Cluster) {
	t.Helper()
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	c := cluster.New(t.TempDir())
	c.Flags = flags
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := c.Start(ctx, slices.Repeat([]cluster.Program{p}, members)...); err != nil {
		t.Fatal(err)
	}
	return ctx, c
}

// tool runs a command line. A member has as long to say its first word as the doctor ever waits, for the machine may be busy.
func tool(t *testing.T, endpoint string, args ...string) (out, told string, code int) {
	t.Helper()
	var o, e strings.Builder
	args = append([]string{"--endpoints=" + endpoint, "--command-timeout=5s", "--dial-timeout=3s"}, args...)
	code = ctl.Run(t.Context(), "engram ctl", args, ctl.Streams{In: strings.NewReader(""), Out: &o, Err: &e})
	return o.String(), e.String(), code
}

type finding struct{ Severity, Check, Where, What, Cause, Cure string }

type answer struct {
	Severity string
	Findings []finding
	Skipped  []string
	Members  []struct {
		Name           string
		Answers        bool
		Leader         bool
		Engram         string
		ClockAhead     float64 `json:"clock_ahead_seconds"`
		ClockPrecision float64 `json:"clock_precision_seconds"`
	}
}

// found returns what a check found, the zero value if it found nothing.
func (a answer) found(check string) finding {
	for _, f := range a.Findings {
		if f.Check == check {
			return f
		}
	}
	return finding{}
}

// examine has doctor look, and compares the checks that found more than notes; want is "severity check ...", sorted. Findings on the
// speed of this machine's disk are left out, for it is what it is. Members of a busy machine may elect another leader meanwhile, or have something
// to say for themselves for a moment; what is found then is not of what the test has made, and they are looked at again.
func examine(t *testing.T, ctx context.Context, c *cluster.Cluster, endpoint string, code int, want ...string) (a answer) {
	t.Helper()
	eventually(t, ctx, "what the doctor finds", func() (err error) {
		a, err = look(t, ctx, c, endpoint, code, want...)
		return err
	})
	return a
}

// look is one look of examine.
func look(t *testing.T, ctx context.Context, c *cluster.Cluster, endpoint string, code int, want ...string) (answer, error) {
	t.Helper()
	var a answer
	before := leadership(ctx, c)
	out, told, got := tool(t, endpoint, "doctor", "-w", "json")
	if after := leadership(ctx, c); after != before {
		return a, fmt.Errorf("there was %s before, and is %s after it", before, after)
	}
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		t.Fatalf("%v\n%s%s", err, out, told)
	}
	var found []string
	slow := false
	for _, f := range a.Findings {
		switch {
		case f.Check == "fsync" || f.Check == "apply" || f.Check == "round-trip":
			slow = true
		case f.Severity != "note":
			found = append(found, f.Severity+" "+f.Check)
		}
	}
	slices.Sort(found)
	if !slices.Equal(found, want) || got != code && !slow {
		return a, fmt.Errorf("exit code %d, %q; want %d, %q\n%s", got, found, code, want, out)
	}
	return a, nil
}

// leadership is what the running members say of their leader.
func leadership(ctx context.Context, c *cluster.Cluster) string {
	var said []string
	for _, m := range c.Running() {
		if s, err := m.Status(ctx); err != nil {
			said = append(said, fmt.Sprintf("%v: no status", m))
		} else {
			said = append(said, fmt.Sprintf("%v: leader %x in term %d", m, s.Leader, s.RaftTerm))
		}
	}
	return strings.Join(said, ", ")
}

// eventually repeats a look until its condition holds, for what other processes do takes its time.
func eventually(t *testing.T, ctx context.Context, what string, f func() error) {
	t.Helper()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func TestOneMember(t *testing.T) {
	ctx, c := start(t, 1)
	m := c.Members()[0]
	client, err := m.Client()
	if err != nil {
		t.Fatal(err)
	}
	watched := client.Watch(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	<-watched
	for i := range 20 {
		if _, err := client.Put(ctx, fmt.Sprintf("/registry/pods/ns%d/%d", i%3, i), strings.Repeat("v", 100*i)); err != nil {
			t.Fatal(err)
		}
	}
	for events := 0; events < 20; {
		r, ok := <-watched
		if events += len(r.Events); !ok {
			t.Fatal("the watch has ended")
		}
	}
	// An Engram's clock, this machine's, is told to a fraction of a second; etcd's to one.
	precision := 1.0
	if engram() {
		precision = 0.3
	}
	var a answer
	eventually(t, ctx, "a precise clock", func() (err error) { // as precise as the answer is quick
		if a, err = look(t, ctx, c, m.Endpoint(), 0); err == nil && len(a.Members) == 1 {
			if p := a.Members[0].ClockPrecision; p > precision {
				err = fmt.Errorf("it is known to %v s", p)
			}
		}
		return err
	})
	if len(a.Members) != 1 || !a.Members[0].Answers || !a.Members[0].Leader || (a.Members[0].Engram != "") != engram() {
		t.Errorf("%+v", a.Members)
	}
	if p := a.Members[0].ClockPrecision; p <= 0 || a.Members[0].ClockAhead > p+0.01 || a.Members[0].ClockAhead < -p-0.01 {
		t.Errorf("clock: %v ± %v s", a.Members[0].ClockAhead, p)
	}
	if engram() == slices.ContainsFunc(a.Skipped, func(s string) bool { return strings.HasPrefix(s, "large values") }) {
		t.Errorf("not looked at: %q", a.Skipped)
	}

	t.Run("peer port", func(t *testing.T) {
		peer := strings.TrimPrefix(m.PeerURL, "http://")
		a := examine(t, ctx, c, peer, 3, "error peer-port", "unreachable unreachable")
		if !strings.Contains(a.Findings[1].Cure, "--listen-client-urls") {
			t.Errorf("%+v", a.Findings)
		}
		_, told, code := tool(t, peer, "get", "a")
		if code != 1 || !strings.Contains(told, "Error: "+peer+" is a port for other members, not for clients (") {
			t.Errorf("exit code %d\n%s", code, told)
		}
	})
	t.Run("https", func(t *testing.T) {
		examine(t, ctx, c, "https://"+m.Endpoint(), 3, "error scheme", "unreachable unreachable")
	})
	t.Run("du", func(t *testing.T) {
		out, told, code := tool(t, m.Endpoint(), "du", "/registry/", "--depth=2", "--sort=path", "-w", "json")
		var u struct {
			Rows []struct {
				Path        string
				Keys, Bytes int64
			}
			Total    struct{ Keys, Bytes int64 }
			KeysOnly bool `json:"keys_only"`
		}
		if err := json.Unmarshal([]byte(out), &u); err != nil || code != 0 {
			t.Fatalf("%v\n%s%s", err, out, told)
		}
		if len(u.Rows) != 3 || u.Rows[0].Path != "/registry/pods/ns0/" || u.Rows[0].Keys != 7 || u.Rows[2].Keys != 6 || u.Total.Keys != 20 || u.KeysOnly == engram() {
			t.Errorf("%s", out)
		}
		if engram() && (u.Total.Bytes < 19_000 || u.Rows[0].Bytes+u.Rows[1].Bytes+u.Rows[2].Bytes != u.Total.Bytes) {
			t.Errorf("%s", out)
		}
	})
	t.Run("top", func(t *testing.T) {
		out, told, code := tool(t, m.Endpoint(), "top", "--once", "-w", "json")
		if !engram() {
			if code == 0 || !strings.Contains(told, "is no Engram") {
				t.Errorf("exit code %d\n%s%s", code, out, told)
			}
			return
		}
		var u struct {
			Members []struct {
				Prefixes, Clients []struct {
					Name           string
					Writes, Events float64
				}
			}
		}
		if err := json.Unmarshal([]byte(out), &u); err != nil || code != 0 {
			t.Fatalf("%v\n%s%s", err, out, told)
		}
		if p := u.Members[0].Prefixes; len(p) == 0 || p[0].Name != "/registry/pods/" || p[0].Writes <= 0 || p[0].Events < 0.9*p[0].Writes {
			t.Errorf("%s", out)
		}
		if p := u.Members[0].Clients; len(p) == 0 || p[0].Name != "127.0.0.1" {
			t.Errorf("%s", out)
		}
	})
	t.Run("alarm", func(t *testing.T) {
		status, err := m.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		maintenance := pb.NewMaintenanceClient(client.ActiveConnection())
		if _, err := maintenance.Alarm(ctx, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: status.Header.MemberId, Alarm: pb.AlarmType_NOSPACE}); err != nil {
			t.Fatal(err)
		}
		examine(t, ctx, c, m.Endpoint(), 2, "error nospace")
		_, told, code := tool(t, m.Endpoint(), "put", "a", "b")
		if code != 1 || !strings.Contains(told, "Error: etcdserver: mvcc: database space exceeded\nHint: the store is at its quota.") {
			t.Errorf("exit code %d\n%s", code, told)
		}
	})
}

func TestThreeMembers(t *testing.T) {
	ctx, c := start(t, 3)
	members := c.Members()
	if _, err := c.Settle(ctx); err != nil {
		t.Fatal(err)
	}
	// All are found by naming one.
	a := examine(t, ctx, c, members[0].Endpoint(), 0)
	if len(a.Members) != 3 || !a.Members[0].Answers || !a.Members[1].Answers || !a.Members[2].Answers {
		t.Fatalf("%+v", a)
	}
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	// A learner that was added and does not run is told as unstarted. When it has caught up that is a note.
	learner, err := c.Announce(ctx, p, true)
	if err != nil {
		t.Fatal(err)
	}
	examine(t, ctx, c, members[0].Endpoint(), 1, "warning unstarted")
	if err := learner.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, "the learner's name is known", func() error {
		if out, _, _ := tool(t, members[0].Endpoint(), "member", "list"); !strings.Contains(out, ", started, "+learner.Name+",") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	a = examine(t, ctx, c, members[0].Endpoint(), 0)
	if f := a.found("learner"); !strings.Contains(f.Where, learner.Name) {
		t.Errorf("%+v", a.Findings)
	}
	if err := c.Remove(ctx, learner); err != nil {
		t.Fatal(err)
	}

	// One away: endangered. Two away: lost.
	if err := members[2].Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.LeaderOf(ctx, members[:2]...); err != nil {
		t.Fatal(err)
	}
	a = examine(t, ctx, c, members[0].Endpoint(), 2, "error quorum", "error refused")
	if f := a.found("quorum"); !strings.HasPrefix(f.What, "2 of 3 voters answer") || !strings.Contains(f.Cause, members[2].Name) {
		t.Errorf("%+v", a.Findings)
	}
	if err := members[1].Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, ctx, "the last member gives its leader up", func() error {
		status, err := members[0].Status(ctx)
		if err == nil && status.Leader != 0 {
			err = fmt.Errorf("its leader is %x", status.Leader)
		}
		return err
	})
	examine(t, ctx, c, members[0].Endpoint(), 2, "error leader", "error quorum", "error refused", "error refused")
	_, told, code := tool(t, members[0].Endpoint(), "put", "a", "b")
	if code != 1 || !strings.Contains(told, "Hint: ") || !strings.Contains(told, "quorum") {
		t.Errorf("exit code %d\n%s", code, told)
	}

	// A member that is stopped in its tracks takes connections, and says nothing.
	if err := members[0].Pause(); err != nil {
		t.Fatal(err)
	}
	examine(t, ctx, c, members[0].Endpoint(), 3, "error silent", "unreachable unreachable")
	_, told, code = tool(t, members[0].Endpoint(), "get", "a")
	if code != 1 || !strings.Contains(told, "something takes connections and does not answer") {
		t.Errorf("exit code %d\n%s", code, told)
	}
	if err := members[0].Continue(); err != nil {
		t.Fatal(err)
	}
}
