package compat

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
	"github.com/engram-kv/engram/test/internal/page"
)

// importSources are the releases whose data directories Engram imports.
var importSources = []string{"etcd", "etcd36", "etcd35"}

// TestImport starts Engram on what an etcd member left, stopped in order and killed under load: everything that this etcd
// itself has when it starts on it again is there, and no acknowledged write is missing. Then etcd is started there by
// mistake, which must fail, and at last taken back to what it left.
func TestImport(t *testing.T) {
	for _, name := range importSources {
		seat(t, name) // built while no other test runs
	}
	t.Parallel() // it waits more than it works
	for _, name := range importSources {
		for _, kill := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, killed %t", name, kill), func(t *testing.T) {
				t.Parallel()
				p := reference(t)
				if name != "etcd" {
					p = seat(t, name)
				}
				importMember(t, p, kill)
			})
		}
	}
}

func importMember(t *testing.T, p cluster.Program, kill bool) {
	ctx := mixedContext(t)
	engram := seat(t, "engram")
	c := newCluster(t, "--snapshot-count=100")
	check(t, c.Start(ctx, p))
	m := c.Members()[0]
	check(t, fillImport(ctx, c, m))
	load := startPuts(ctx, m)
	check(t, load.answers(ctx, 300))
	if kill {
		check(t, m.Kill())
	} else {
		check(t, m.Stop())
	}
	acknowledged := load.stop()

	left := m.DataDir + ".left"
	check(t, copyDir(m.DataDir, left))
	check(t, m.Restart(ctx)) // etcd itself
	want, err := contentOf(ctx, m)
	check(t, err)
	check(t, m.Stop())
	check(t, os.Rename(m.DataDir, m.DataDir+".etcd"))
	check(t, os.Rename(left, m.DataDir))

	told := typePage(t, "migrate", "/var/lib/etcd", m.DataDir)
	if !strings.Contains(told, "go on as the same member") {
		t.Errorf("migrate --check: %s", told)
	}
	m.Program = engram
	check(t, m.Restart(ctx))
	got, err := contentOf(ctx, m)
	check(t, err)
	sameContent(t, want, got)
	check(t, hasAll(ctx, m, acknowledged))
	check(t, checkLease(ctx, m))
	client, err := m.Client()
	check(t, err)
	if _, err := client.Put(ctx, "after", "import"); err != nil {
		t.Fatal(err)
	}
	check(t, m.Kill())
	check(t, m.Restart(ctx)) // an ordinary start
	r, err := client.Get(ctx, "after")
	check(t, err)
	if r.Count != 1 {
		t.Fatal(broken.Errorf("a write after the import is gone: %v", r))
	}
	check(t, m.Stop())

	m.Program = p
	check(t, m.Spawn())
	select {
	case <-m.Exited():
	case <-ctx.Done():
		t.Fatal("etcd was started on an imported directory, and runs")
	}

	typePage(t, "way-back", "/var/lib/etcd", m.DataDir)
	check(t, forgetToken(c, m))
	check(t, m.Restart(ctx))
	again, err := contentOf(ctx, m)
	check(t, err)
	sameContent(t, want, again)
}

// typePage types a block of docs/operations.md, with other words for those of the page: old, new.
func typePage(t *testing.T, name string, words ...string) string {
	t.Helper()
	cmd, err := page.Command(t.Context(), "../../docs/operations.md", name, programs.Engram, t.TempDir(), words...)
	check(t, err)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
	return string(out)
}

// forgetToken takes the client its token: it names an entry that a member on older data has yet to get, and 3.6 waits for it.
func forgetToken(c *cluster.Cluster, m *cluster.Member) error {
	user := c.User
	c.User = ""
	_, err := m.Client() // another one, without a user
	c.User = user
	return err
}

// TestImportInPlace takes a cluster of three voters and a learner from etcd to Engram in place, one member after the other on its
// own data, under write load: no acknowledged write is lost, watchers miss nothing, and all agree at each step.
func TestImportInPlace(t *testing.T) {
	t.Parallel() // it waits more than it works
	for _, name := range []string{"etcd", "etcd36"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, o := seat(t, name), seat(t, "engram")
			e.Name = name
			if name == "etcd" {
				e = reference(t)
			}
			ctx, cancel := context.WithTimeout(t.Context(), migrationWithin)
			defer cancel()
			c := newCluster(t, "--snapshot-count=300", "--snapshot-catchup-entries=100")
			check(t, c.Start(ctx, e, e, e))
			voters := c.Members()
			learner, err := c.Add(ctx, e, true)
			check(t, err)
			l, err := history.Start(c, history.Options{Seed: rand.Uint64(), Compact: true})
			check(t, err)
			defer l.Abandon()
			for i, m := range append([]*cluster.Member{learner}, voters...) {
				check(t, l.Answers(ctx, calmAnswers))
				check(t, l.Disturb(func() error {
					end := m.Stop
					if i%2 == 1 {
						end = m.Kill // a leader too, before it could hand over
					}
					if err := end(); err != nil {
						return err
					}
					if err := l.Answers(ctx, 100); err != nil { // the others go on
						return err
					}
					m.Program = o
					return m.Restart(ctx)
				}))
				if moved, err := filepath.Glob(filepath.Join(m.DataDir, "member.etcd-*")); err != nil || len(moved) != 1 {
					t.Fatalf("%v: etcd's data is in %v: %v", m, moved, err)
				}
				t.Logf("%v goes on as Engram (%d of 4)", m, i+1)
			}
			for _, m := range voters { // each leads once
				check(t, l.Disturb(func() error { return c.MoveLeader(ctx, m) }))
				check(t, l.Answers(ctx, 100))
			}
			for _, m := range c.Members() {
				check(t, eventually(ctx, m.Name, func() error { return clusterVersion(m, "3.7.0") }))
			}
			report(t, ctx, l)
			_, err = c.CheckHash(ctx)
			check(t, err)
		})
	}
}

// TestImportTogether stops all three members of a cluster of etcd 3.5, which is not one that Engram shares with others, and imports all: the
// way that is told of for such a cluster.
func TestImportTogether(t *testing.T) {
	t.Parallel() // it waits more than it works
	ctx := mixedContext(t)
	c := newCluster(t, "--snapshot-count=100")
	old := seat(t, "etcd35")
	check(t, c.Start(ctx, old, old, old))
	members := c.Members()
	load := startPuts(ctx, members[1])
	check(t, load.answers(ctx, 250))
	check(t, members[0].Kill())
	check(t, load.answers(ctx, 50)) // after an election, if it led
	for _, m := range members[1:] {
		check(t, m.Stop())
	}
	acknowledged := load.stop()
	for _, m := range members {
		m.Program = seat(t, "engram")
		check(t, m.Spawn())
	}
	for _, m := range members {
		check(t, m.Ready(ctx))
		check(t, hasAll(ctx, m, acknowledged))
		check(t, eventually(ctx, m.Name, func() error { return clusterVersion(m, "3.7.0") }))
	}
	_, err := c.CheckHash(ctx)
	check(t, err)
}

// fillImport gives a member something of everything: users, roles, leases, an alarm, history, and a compaction.
func fillImport(ctx context.Context, c *cluster.Cluster, m *cluster.Member) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	for i := range 250 {
		if _, err := client.Put(ctx, fmt.Sprintf("key-%02d", i%40), fmt.Sprintf("value %d", i)); err != nil {
			return err
		}
		if i%25 == 0 {
			if _, err := client.Delete(ctx, fmt.Sprintf("key-%02d", i%40)); err != nil {
				return err
			}
		}
	}
	if _, err := client.Grant(ctx, importLeaseTTL); err != nil {
		return err
	}
	lease, err := client.Grant(ctx, importLeaseTTL)
	if err != nil {
		return err
	}
	for i := range 5 {
		if _, err := client.Put(ctx, fmt.Sprintf("leased-%d", i), "x", clientv3.WithLease(lease.ID)); err != nil {
			return err
		}
	}
	if _, err := client.Compact(ctx, 100, clientv3.WithCompactPhysical()); err != nil {
		return err
	}
	for _, f := range []func() error{
		func() error { _, err := client.RoleAdd(ctx, "root"); return err },
		func() error { _, err := client.RoleAdd(ctx, "reader"); return err },
		func() error {
			_, err := client.RoleGrantPermission(ctx, "reader", "key", "kez", clientv3.PermissionType(clientv3.PermRead))
			return err
		},
		func() error { _, err := client.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := client.UserAdd(ctx, "alice", "other"); return err },
		func() error { _, err := client.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := client.UserGrantRole(ctx, "alice", "reader"); return err },
		func() error { _, err := client.AuthEnable(ctx); return err },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	c.User, c.Pass = "root", "secret"
	return nil
}

const importLeaseTTL = 3600 // seconds

// puts writes keys of their own, one after the other, until it is stopped. A put that fails, as those do that were under way to a
// leader that was killed, is in doubt, and the next key's turn comes.
type puts struct {
	cancel context.CancelFunc
	ended  chan struct{}

	mu     sync.Mutex
	keys   []string // acknowledged
	failed error    // why the last that failed did
}

func startPuts(ctx context.Context, m *cluster.Member) *puts {
	ctx, cancel := context.WithCancel(ctx)
	p := &puts{cancel: cancel, ended: make(chan struct{})}
	var workers sync.WaitGroup
	for w := range 4 {
		workers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				key := fmt.Sprintf("load-%d-%05d", w, i)
				err := p.put(ctx, m, key)
				p.mu.Lock()
				if err == nil {
					p.keys = append(p.keys, key)
				} else {
					p.failed = err
				}
				p.mu.Unlock()
				if err != nil {
					select {
					case <-ctx.Done():
					case <-time.After(20 * time.Millisecond): // the member may be gone
					}
				}
			}
		})
	}
	go func() { workers.Wait(); close(p.ended) }()
	return p
}

func (p *puts) put(ctx context.Context, m *cluster.Member, key string) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err = client.Put(ctx, key, strings.Repeat("v", 200))
	return err
}

// answers waits until so many more writes were acknowledged.
func (p *puts) answers(ctx context.Context, more int) error {
	p.mu.Lock()
	goal := len(p.keys) + more
	p.mu.Unlock()
	return eventually(ctx, "writes", func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.keys) < goal {
			return fmt.Errorf("%d writes were acknowledged, want %d; the last that failed: %v", len(p.keys), goal, p.failed)
		}
		return nil
	})
}

func (p *puts) stop() []string {
	p.cancel()
	<-p.ended
	return p.keys
}

func hasAll(ctx context.Context, m *cluster.Member, keys []string) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	r, err := client.Get(ctx, "load-", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, kv := range r.Kvs {
		there[string(kv.Key)] = true
	}
	for _, key := range keys {
		if !there[key] {
			return broken.Errorf("%s was acknowledged and is gone; %d of %d are there", key, len(there), len(keys))
		}
	}
	return nil
}

// checkLease looks at how long the lease with keys has left: about what was granted, and never more.
func checkLease(ctx context.Context, m *cluster.Member) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	list, err := client.Leases(ctx)
	if err != nil {
		return err
	}
	for _, l := range list.Leases {
		r, err := client.TimeToLive(ctx, l.ID)
		if err != nil {
			return err
		}
		if r.TTL > importLeaseTTL+60 || r.TTL < importLeaseTTL-300 {
			return broken.Errorf("lease %x has %d seconds left of %d", l.ID, r.TTL, r.GrantedTTL)
		}
	}
	if len(list.Leases) != 2 {
		return broken.Errorf("%d leases, want 2", len(list.Leases))
	}
	return nil
}

// contentOf writes all that a member holds into lines.
func contentOf(ctx context.Context, m *cluster.Member) (lines []string, err error) {
	client, err := m.Client()
	if err != nil {
		return nil, err
	}
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	all, err := client.Get(ctx, "\x00", clientv3.WithFromKey())
	if err != nil {
		return nil, err
	}
	for _, kv := range all.Kvs {
		say("%s = %s, created at %d, modified at %d, version %d, lease %x", kv.Key, kv.Value, kv.CreateRevision, kv.ModRevision, kv.Version, kv.Lease)
	}
	revision := all.Header.Revision
	say("revision %d, member %x of cluster %x", revision, all.Header.MemberId, all.Header.ClusterId)
	for _, rev := range []int64{revision, revision - 1, revision - 50, 180, 101} {
		h, err := client.HashKV(ctx, m.ClientURL, rev)
		if err != nil {
			return nil, fmt.Errorf("hash at %d: %w", rev, err)
		}
		say("hash at %d: %d, compacted at %d", rev, h.Hash, h.CompactRevision)
	}
	if _, err := client.Get(ctx, "key-01", clientv3.WithRev(99)); err == nil {
		return nil, broken.Errorf("revision 99 was compacted and can be read")
	}
	leases, err := client.Leases(ctx)
	if err != nil {
		return nil, err
	}
	for _, l := range leases.Leases {
		r, err := client.TimeToLive(ctx, l.ID, clientv3.WithAttachedKeys())
		if err != nil {
			return nil, err
		}
		var keys []string
		for _, k := range r.Keys {
			keys = append(keys, string(k))
		}
		slices.Sort(keys)
		say("lease %x of %d seconds: %q", l.ID, r.GrantedTTL, keys)
	}
	users, err := client.UserList(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range users.Users {
		u, err := client.UserGet(ctx, name)
		if err != nil {
			return nil, err
		}
		say("user %s with %v", name, u.Roles)
	}
	roles, err := client.RoleList(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range roles.Roles {
		r, err := client.RoleGet(ctx, name)
		if err != nil {
			return nil, err
		}
		if name == "root" {
			r.Perm = nil // which is not stored: 3.6 is the first release to answer what it may
		}
		say("role %s: %v", name, r.Perm)
	}
	status, err := client.AuthStatus(ctx)
	if err != nil {
		return nil, err
	}
	say("auth %t at %d", status.Enabled, status.AuthRevision)
	members, err := client.MemberList(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range members.Members {
		say("member %x %s %v %v, learner %t", m.ID, m.Name, m.PeerURLs, m.ClientURLs, m.IsLearner)
	}
	alarms, err := client.AlarmList(ctx)
	if err != nil {
		return nil, err
	}
	say("alarms %v", alarms.Alarms)
	slices.Sort(lines)
	return lines, nil
}

func sameContent(t *testing.T, want, got []string) {
	t.Helper()
	missing := slices.DeleteFunc(slices.Clone(want), func(line string) bool { return slices.Contains(got, line) })
	more := slices.DeleteFunc(slices.Clone(got), func(line string) bool { return slices.Contains(want, line) })
	if len(missing)+len(more) > 0 {
		t.Fatal(broken.Errorf("etcd says of its data\n%s\nand here it is\n%s", strings.Join(head(missing), "\n"), strings.Join(head(more), "\n")))
	}
}

func head(lines []string) []string { return lines[:min(len(lines), 20)] }

func copyDir(from, to string) error {
	if out, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	return nil
}
