package compat

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/compat/internal/random"
	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
)

const (
	mixedWithin     = 4 * time.Minute // one test
	mixedOperations = 1500
	mixedEvery      = 300 // operations between two changes of the leader
)

// quick are flags for tests that lose no power and keep no secrets.
var quick = []string{"--unsafe-no-fsync", "--bcrypt-cost=4"}

// other is the program in the other seats, chosen by CLUSTER_PROGRAM.
func other(t *testing.T) cluster.Program {
	t.Helper()
	return seat(t, cluster.Chosen())
}

// builds has what TestMain does not build, by name. Each is built once: two builds at once could write what a member is started from.
var builds sync.Map

// seat is a program by its name.
func seat(t *testing.T, name string) cluster.Program {
	t.Helper()
	switch name {
	case "etcd":
		return cluster.Program{Name: "other", Path: programs.Etcd} // another name than the reference's, so that it can be told apart
	case "engram":
		if programs.Engram == "" {
			t.Fatal("CLUSTER_PROGRAM=engram with COMPAT_SUBJECT=etcd: there is no engram")
		}
		return cluster.Program{Name: "engram", Path: programs.Engram}
	}
	build, _ := builds.LoadOrStore(name, sync.OnceValues(func() (cluster.Program, error) { return cluster.Build(name) }))
	p, err := build.(func() (cluster.Program, error))()
	if err != nil {
		t.Fatalf("%s=%s: %v", cluster.ProgramVariable, name, err)
	}
	return p
}

// older tells if the other seats hold a release that a cluster of version 3.7 does not let in.
func older(p cluster.Program) bool { return p.Name == "etcd36" }

// referenceVariable names the environment variable that puts another release of etcd into the reference's seats: etcd36.
const referenceVariable = "CLUSTER_REFERENCE"

// reference is the program in the first seats.
func reference(t *testing.T) cluster.Program {
	t.Helper()
	if name := os.Getenv(referenceVariable); name != "" {
		return seat(t, name)
	}
	return cluster.Program{Name: "etcd", Path: programs.Etcd}
}

// compositions are the clusters of three that are tried.
func compositions(t *testing.T) map[string][]cluster.Program {
	e, o := reference(t), other(t)
	return map[string][]cluster.Program{"2 etcd, 1 " + o.Name: {e, e, o}, "1 etcd, 2 " + o.Name: {e, o, o}}
}

// newCluster is ended with the test. A failure prints the members' logs.
func newCluster(t *testing.T, flags ...string) *cluster.Cluster {
	t.Helper()
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
	return c
}

func mixedContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), mixedWithin)
	t.Cleanup(cancel)
	return ctx
}

// check fails the test at an error.
func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestMixedOperations sends random operations to the members of one cluster in turn and compares what they answer, while
// leadership goes round; with auth, users and permissions change too.
func TestMixedOperations(t *testing.T) {
	t.Parallel() // it waits more than it works
	for name, programs := range compositions(t) {
		for _, auth := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, auth %t", name, auth), func(t *testing.T) {
				t.Parallel()
				ctx := mixedContext(t)
				c := newCluster(t, quick...)
				check(t, c.Start(ctx, programs...))
				if auth {
					check(t, enableAuth(ctx, c))
				}
				seed := rand.Uint64()
				turn := 0
				err := random.RunMembers(random.MembersOptions{
					Seed: seed, Operations: mixedOperations, Methods: methods, Every: mixedEvery, Older: older(programs[0]) || older(programs[2]),
					Seats: func() ([]random.Seat, error) { return seats(ctx, c) },
					Between: func() error {
						if err := checkpoint(ctx, c); err != nil {
							return fmt.Errorf("seed %d: %w", seed, err)
						}
						turn++
						if auth {
							if err := changeAuth(ctx, c, turn); err != nil {
								return err
							}
						}
						return lead(ctx, c, c.Members()[turn%3])
					},
				})
				check(t, err)
			})
		}
	}
}

// seats are the members with connections that are fit for random operations.
func seats(ctx context.Context, c *cluster.Cluster) (all []random.Seat, err error) {
	for _, m := range c.Members() {
		client, err := m.Client()
		if err != nil {
			return nil, err
		}
		status, err := m.Status(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, random.Seat{Name: m.Name, Conn: client.ActiveConnection(), Names: &wire.Names{
			Cluster: status.Header.ClusterId, Member: status.Header.MemberId, Numbers: map[uint64]string{}}})
	}
	return all, nil
}

// lead moves leadership and waits until every member answers a linearizable read again.
func lead(ctx context.Context, c *cluster.Cluster, m *cluster.Member) error {
	if err := c.MoveLeader(ctx, m); err != nil {
		return err
	}
	for _, m := range c.Serving() {
		if err := eventually(ctx, "read through "+m.Name, func() error {
			client, err := m.Client()
			if err == nil {
				_, err = client.Get(ctx, "lead")
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// checkpoint compares the hashes at the last revision and at one before. There is a key, since the hash of nothing depends
// on how far a compaction has come.
func checkpoint(ctx context.Context, c *cluster.Cluster) error {
	client, err := c.Serving()[0].Client()
	if err != nil {
		return err
	}
	if _, err := client.Put(ctx, "checkpoint", time.Now().String()); err != nil {
		return err
	}
	hash, err := c.CheckHash(ctx)
	if err != nil {
		return err
	}
	if middle := (hash.HashRevision + max(hash.CompactedRev, 1)) / 2; middle > max(hash.CompactedRev, 1) {
		r, err := client.Get(ctx, "\x00", clientv3.WithRange("\x00"), clientv3.WithCountOnly(), clientv3.WithRev(middle))
		if err != nil || r.Count == 0 {
			return err
		}
		_, err = c.CheckHashAt(ctx, middle)
		return err
	}
	return nil
}

// eventually asks again until there is no error, for a minute.
func eventually(ctx context.Context, what string, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, err)
		case <-time.After(20 * time.Millisecond): // another process: there is no event to wait for
		}
	}
}

// TestMixedLoad has many clients at once while leadership goes round, members are killed and paused, and history is
// compacted.
func TestMixedLoad(t *testing.T) {
	for name, programs := range compositions(t) {
		t.Run(name, func(t *testing.T) {
			ctx := mixedContext(t)
			c := newCluster(t)
			check(t, c.Start(ctx, programs...))
			l, err := history.Start(c, history.Options{Seed: rand.Uint64(), Compact: true})
			check(t, err)
			defer l.Abandon()
			for _, m := range c.Members() {
				check(t, l.Answers(ctx, 200))
				check(t, l.Disturb(func() error { return c.MoveLeader(ctx, m) }))
				check(t, l.Answers(ctx, 200))
				check(t, l.Disturb(func() error { // the leader is killed
					if err := m.Kill(); err != nil {
						return err
					}
					if err := l.Answers(ctx, 100); err != nil {
						return err
					}
					return m.Restart(ctx)
				}))
				_, err := c.CheckHashBefore(ctx)
				check(t, err)
			}
			m := c.Of(programs[2].Name)
			check(t, l.Disturb(func() error { // one that stands still does not hold the others up
				if err := m.Pause(); err != nil {
					return err
				}
				if err := l.Answers(ctx, 300); err != nil {
					return err
				}
				if err := m.Continue(); err != nil {
					return err
				}
				_, err := c.Leader(ctx)
				return err
			}))
			report(t, ctx, l)
		})
	}
}

func report(t *testing.T, ctx context.Context, l *history.Load) history.Report {
	t.Helper()
	r, err := l.Judge(ctx)
	t.Logf("%+v", r)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestMixedSnapshot lets members join whose log entries are gone, so that a snapshot goes from one program to the other:
// first from a single member to a learner, which then leads and sends one to a second of the first kind. There is load, and
// compaction, meanwhile. With auth, which a learner cannot be asked under, members join as voters, and users come with the snapshot.
func TestMixedSnapshot(t *testing.T) {
	t.Parallel() // it waits more than it works
	o := other(t)
	for _, pair := range [][2]cluster.Program{{reference(t), o}, {o, reference(t)}} {
		if older(pair[1]) {
			continue // a cluster of version 3.7 does not let it in
		}
		for _, auth := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s first, auth %t", pair[0].Name, auth), func(t *testing.T) {
				t.Parallel()
				mixedSnapshot(t, pair, auth)
			})
		}
	}
}

func mixedSnapshot(t *testing.T, pair [2]cluster.Program, auth bool) {
	ctx := mixedContext(t)
	c := newCluster(t, "--snapshot-count=100", "--snapshot-catchup-entries=50", "--unsafe-no-fsync")
	check(t, c.Start(ctx, pair[0]))
	first := c.Members()[0]
	if auth {
		check(t, enableAuth(ctx, c))
	}
	l, err := history.Start(c, history.Options{Seed: rand.Uint64(), Compact: true, Padding: 5000, Every: 2 * time.Millisecond})
	check(t, err)
	defer l.Abandon()
	same := func() {
		t.Helper()
		_, err := c.CheckHashBefore(ctx)
		check(t, err)
	}
	check(t, l.Answers(ctx, 3000))
	var second *cluster.Member
	// One of two members is half of the quorum, so that requests wait for the new one.
	check(t, l.Disturb(func() error {
		if second, err = c.Add(ctx, pair[1], !auth); err != nil || auth {
			return err
		}
		return c.Promote(ctx, second)
	}))
	wasSnapshot(t, second)
	same()
	l.Refresh()
	check(t, l.Disturb(func() error { return c.MoveLeader(ctx, second) }))
	check(t, l.Answers(ctx, 3000))
	var third *cluster.Member
	check(t, l.Disturb(func() error {
		third, err = c.Add(ctx, pair[0], false)
		return err
	}))
	wasSnapshot(t, third)
	same()
	if auth {
		check(t, sameUsers(ctx, c.Members()))
	}
	l.Refresh()
	check(t, l.Answers(ctx, 500))
	check(t, l.Disturb(func() error { return c.Remove(ctx, first) }))
	same()
	l.Refresh()
	check(t, l.Answers(ctx, 300))
	check(t, l.Disturb(func() error { return c.MoveLeader(ctx, third) }))
	check(t, l.Answers(ctx, 300))
	check(t, l.Disturb(func() error { return c.Remove(ctx, second) }))
	report(t, ctx, l)
	if auth {
		client, err := third.Client()
		check(t, err)
		_, err = client.RoleAdd(ctx, "after")
		check(t, err)
		check(t, sameUsers(ctx, c.Members()))
	}
}

// wasSnapshot fails the test if a member got the log and no snapshot.
func wasSnapshot(t *testing.T, m *cluster.Member) {
	t.Helper()
	if n, err := metric(m, "etcd_network_snapshot_receive_success"); err != nil || n == 0 {
		t.Fatalf("%v joined without a snapshot: %v of them, %v", m, n, err)
	}
}

// metric sums a member's metric over its labels.
func metric(m *cluster.Member, name string) (sum float64, err error) {
	resp, err := http.Get(m.ClientURL + "/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(io.LimitReader(resp.Body, 16<<20)); lines.Scan(); {
		label, value, ok := strings.Cut(lines.Text(), " ")
		if label, _, _ := strings.Cut(label, "{"); ok && label == name {
			var n float64
			if _, err := fmt.Sscan(value, &n); err != nil {
				return 0, fmt.Errorf("%s: %w", lines.Text(), err)
			}
			sum += n
		}
	}
	return sum, nil
}

// TestMixedLeases follows leases over changes of the leader: kept alive through any member they live, and left alone they
// end, not before their time.
func TestMixedLeases(t *testing.T) {
	t.Parallel()               // it waits for the clock
	const ttl, leftTTL = 8, 20 // seconds
	// least is what a lease still has at least that began anew not before since; TimeToLive cuts fractions off.
	least := func(ttl int64, since time.Time) int64 { return ttl - 1 - int64(time.Since(since)/time.Second) }
	for name, programs := range compositions(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := mixedContext(t)
			c := newCluster(t, quick...)
			check(t, c.Start(ctx, programs...))
			members := c.Members()
			for _, turn := range []int{0, 2} { // one of each program leads
				leader := members[turn]
				check(t, lead(ctx, c, leader))
				granter, err := members[(turn+1)%3].Client()
				check(t, err)
				kept, err := granter.Grant(ctx, ttl)
				check(t, err)
				left, err := granter.Grant(ctx, leftTTL)
				check(t, err)
				_, err = granter.Put(ctx, fmt.Sprint("left", turn), "", clientv3.WithLease(left.ID))
				check(t, err)
				granted := time.Now()
				for until := granted.Add(3 * ttl * time.Second / 2); time.Now().Before(until); {
					for _, m := range members {
						client, err := m.Client()
						check(t, err)
						renewed := time.Now()
						if r, err := client.KeepAliveOnce(ctx, kept.ID); err != nil || r.TTL != ttl {
							t.Fatalf("%v leads, %v keeps alive: %v, %v", leader, m, r, err)
						}
						r, err := client.TimeToLive(ctx, kept.ID)
						check(t, err)
						if r.TTL < least(ttl, renewed) || r.TTL > ttl || r.GrantedTTL != ttl {
							t.Fatal(broken.Errorf("%v leads, %v tells the time to live: %v", leader, m, r))
						}
					}
					select {
					case <-ctx.Done():
						t.Fatal(ctx.Err())
					case <-time.After(ttl * time.Second / 8): // a lease is kept alive by the clock
					}
				}
				moved := time.Now()
				check(t, lead(ctx, c, members[(turn+1)%3])) // the new leader gives all leases their time again
				r, err := granter.TimeToLive(ctx, left.ID, clientv3.WithAttachedKeys())
				check(t, err)
				if r.TTL < least(leftTTL, moved) || len(r.Keys) != 1 {
					t.Fatal(broken.Errorf("%v after a change of the leader: %v", time.Since(moved), r))
				}
				_, err = granter.Revoke(ctx, kept.ID)
				check(t, err)
				watch := clientv3.NewWatcher(granter)
				expired := watch.Watch(ctx, fmt.Sprint("left", turn), clientv3.WithFilterPut())
				select {
				case r := <-expired:
					if len(r.Events) != 1 || r.Err() != nil {
						t.Fatalf("the watch of an expiring key got %v", r)
					}
					if lived := time.Since(moved); lived < (leftTTL-1)*time.Second {
						t.Fatal(broken.Errorf("a lease of %d s ended %v after the change of the leader", leftTTL, lived))
					}
				case <-time.After(3 * leftTTL * time.Second):
					t.Fatalf("the lease did not end")
				}
				check(t, watch.Close())
			}
			_, err := c.CheckHash(ctx)
			check(t, err)
		})
	}
}

// TestMixedDowngrade asks all members for a downgrade: they answer alike, and all know of one that is on.
func TestMixedDowngrade(t *testing.T) {
	t.Parallel() // it waits for the clock
	if older(other(t)) || older(reference(t)) {
		t.Skip("such a cluster has the older version already")
	}
	for name, programs := range compositions(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := mixedContext(t)
			c := newCluster(t, quick...)
			check(t, c.Start(ctx, programs...))
			members := c.Members()
			ask := func(m *cluster.Member, action etcdserverpb.DowngradeRequest_DowngradeAction, version string) string {
				return askDowngrade(ctx, t, m, action, version)
			}
			version := func(want string) {
				for _, m := range members {
					check(t, eventually(ctx, m.Name, func() error { return clusterVersion(m, want) }))
				}
			}
			version("3.7.0")
			for _, turn := range []int{0, 2} {
				m := members[turn]
				check(t, lead(ctx, c, members[(turn+1)%3]))
				var said []string
				for _, v := range []string{"3.6", "3.6.0", "3.5.0", "3.7.0", "3.8.0", "", "x", "4.0"} {
					said = append(said, v+": "+ask(m, etcdserverpb.DowngradeRequest_VALIDATE, v))
				}
				for _, o := range members[1:] {
					for i, v := range []string{"3.6", "3.6.0", "3.5.0", "3.7.0", "3.8.0", "", "x", "4.0"} {
						if got := v + ": " + ask(o, etcdserverpb.DowngradeRequest_VALIDATE, v); got != said[i] {
							t.Errorf("%v answers %s, %v answers %s", m, said[i], o, got)
						}
					}
				}
				if got := ask(m, etcdserverpb.DowngradeRequest_ENABLE, "3.6.0"); !strings.HasPrefix(got, "version 3.7") {
					t.Fatalf("%v enables: %s", m, got)
				}
				version("3.6.0")
				for _, o := range members {
					if on, err := peerText(o, "/downgrade/enabled"); err != nil || on != "true" {
						t.Errorf("%v says that a downgrade is on: %q, %v", o, on, err)
					}
				}
				before := ask(m, etcdserverpb.DowngradeRequest_ENABLE, "3.6.0")
				for _, o := range members {
					if got := ask(o, etcdserverpb.DowngradeRequest_ENABLE, "3.6.0"); got != before || !strings.Contains(got, "error") {
						t.Errorf("a second one: %v answers %s, %v answers %s", m, before, o, got)
					}
				}
				if got := ask(members[(turn+2)%3], etcdserverpb.DowngradeRequest_CANCEL, ""); !strings.HasPrefix(got, "version 3.6") {
					t.Fatalf("%v cancels: %s", members[(turn+2)%3], got)
				}
				version("3.7.0")
			}
			_, err := c.CheckHash(ctx)
			check(t, err)
		})
	}
}

// askDowngrade is what a member answers, or its error.
func askDowngrade(ctx context.Context, t *testing.T, m *cluster.Member, action etcdserverpb.DowngradeRequest_DowngradeAction, version string) string {
	t.Helper()
	client, err := m.Client()
	check(t, err)
	r, err := etcdserverpb.NewMaintenanceClient(client.ActiveConnection()).Downgrade(ctx,
		&etcdserverpb.DowngradeRequest{Action: action, Version: version})
	if err != nil {
		return wire.ErrorText(err)
	}
	return "version " + r.Version
}

func clusterVersion(m *cluster.Member, want string) error {
	text, err := peerText(m, "/version")
	if err == nil && !strings.Contains(text, fmt.Sprintf(`"etcdcluster":"%s"`, want)) {
		err = errors.New(text)
	}
	return err
}

func peerText(m *cluster.Member, path string) (string, error) {
	resp, err := http.Get(m.PeerURL + path)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	return string(text), err
}
