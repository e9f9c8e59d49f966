package compat

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// side is one of the two programs with its tools.
type side struct {
	name, server string
	save         []string // the tool that saves a backup, and its first arguments
	util         []string // the tool that restores one
}

func sides(t *testing.T) [2]side {
	// Called by etcd's names Engram does what etcd does.
	dir := t.TempDir()
	for _, name := range []string{"etcdctl", "etcdutl"} {
		if err := os.Symlink(programs.Engram, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return [2]side{
		{"etcd", programs.Etcd, []string{programs.Etcdctl}, []string{programs.Etcdutl}},
		{"engram", programs.Engram, []string{filepath.Join(dir, "etcdctl")}, []string{filepath.Join(dir, "etcdutl")}},
	}
}

// TestBackupInterchange saves a backup from each program with each tool, restores it with each tool, and starts the program on
// it: hash, keys, leases, users and roles are the same as before, and the restored member works on.
func TestBackupInterchange(t *testing.T) {
	t.Parallel() // it waits more than it works
	if programs.Engram == "" {
		t.Skip("COMPAT_SUBJECT=etcd: there is no other program to exchange backups with")
	}
	all := sides(t)
	for _, from := range all {
		t.Run("from "+from.name, func(t *testing.T) {
			t.Parallel()
			c := tools{t: t}
			dir := t.TempDir()
			s, err := process.Start(process.Options{Program: from.server, Dir: dir, Name: "m"})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for seed := range uint64(2) {
				writeMuch(t, s, rand.New(rand.NewPCG(seed, 4)), 300)
			}
			addRoot(t, s)
			want, wantHash := seenBy(t, s), etcdHashKV(t, s)
			var backups []string
			for _, by := range all {
				path := filepath.Join(dir, "by-"+by.name)
				out := c.run(by.save[0], append(by.save[1:], "--endpoints", s.ClientURL, "snapshot", "save", path)...)
				if out != fmt.Sprintf("Snapshot saved at %s\nServer version 3.7.0\n", path) {
					t.Errorf("%s snapshot save prints %q", by.name, out)
				}
				backups = append(backups, path)
			}
			if err := s.Stop(); err != nil {
				t.Fatal(err)
			}
			for i, backup := range backups {
				statusOf(t, c, all, backup)
				for _, to := range all {
					t.Run(fmt.Sprintf("saved by %s, to %s", all[i].name, to.name), func(t *testing.T) {
						r := restoreOn(t, tools{t: t}, to, backup)
						defer r.Close()
						if got := etcdHashKV(t, r); got.short() != wantHash.short() {
							t.Error(broken.Errorf("%s, it was %s", got.short(), wantHash.short()))
						}
						if got := seenBy(t, r); got != want {
							t.Error(broken.Errorf("the content differs: %s", difference(want, got)))
						}
						worksOn(t, r)
					})
				}
			}
		})
	}
}

// TestBackupBump restores with a raised revision on both programs: equal hashes, and watchers of old revisions are told.
func TestBackupBump(t *testing.T) {
	t.Parallel() // it waits more than it works
	if programs.Engram == "" {
		t.Skip("COMPAT_SUBJECT=etcd: there is no other program to compare with")
	}
	all, c, dir := sides(t), tools{t: t}, t.TempDir()
	s, err := process.Start(process.Options{Program: programs.Engram, Dir: dir, Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	writeMuch(t, s, rand.New(rand.NewPCG(7, 4)), 300)
	before := etcdHashKV(t, s)
	backup := filepath.Join(dir, "backup")
	c.run(all[1].save[0], "--endpoints", s.ClientURL, "snapshot", "save", backup)
	var hashes, contents []string
	for _, to := range all {
		r := restoreOn(t, c, to, backup, "--bump-revision", "1000000", "--mark-compacted")
		defer r.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		// It is refused, after the compaction that waits.
		if _, err := etcdserverpb.NewKVClient(r.Conn()).Compact(ctx, &etcdserverpb.CompactionRequest{Revision: 1, Physical: true}); err == nil {
			t.Error(broken.Errorf("a compacted revision was compacted again"))
		}
		watch, err := etcdserverpb.NewWatchClient(r.Conn()).Watch(ctx)
		if err != nil {
			t.Fatal(err)
		}
		err = watch.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
			CreateRequest: &etcdserverpb.WatchCreateRequest{Key: []byte("k"), StartRevision: before.Revision + 1}}})
		if err != nil {
			t.Fatal(err)
		}
		for {
			m, err := watch.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if m.Canceled {
				if m.CompactRevision != before.Revision+1_000_000 {
					t.Errorf("%s: a watcher from before the restore is told of compact revision %d", to.name, m.CompactRevision)
				}
				break
			}
			if len(m.Events) > 0 {
				t.Fatal(broken.Errorf("%s: a watcher from before the restore gets events", to.name))
			}
		}
		hashes, contents = append(hashes, etcdHashKV(t, r).short()), append(contents, seenBy(t, r))
	}
	if hashes[0] != hashes[1] {
		t.Error(broken.Errorf("etcd has %s, Engram %s", hashes[0], hashes[1]))
	}
	if contents[0] != contents[1] {
		t.Error(broken.Errorf("the content differs: %s", difference(contents[0], contents[1])))
	}
}

// TestBackupRefused gives both programs' tools files that are no backups.
func TestBackupRefused(t *testing.T) {
	if programs.Engram == "" {
		t.Skip("COMPAT_SUBJECT=etcd: there is no other program to compare with")
	}
	all, c, dir := sides(t), tools{t: t}, t.TempDir()
	s, err := process.Start(process.Options{Program: programs.Engram, Dir: dir, Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	writeMuch(t, s, rand.New(rand.NewPCG(9, 4)), 100)
	backup := filepath.Join(dir, "backup")
	c.run(all[0].save[0], "--endpoints", s.ClientURL, "snapshot", "save", backup)
	whole, err := os.ReadFile(backup)
	if err != nil {
		t.Fatal(err)
	}
	flip := slices.Clone(whole)
	flip[len(flip)/2] ^= 1
	full := filepath.Join(dir, "full")
	if err := os.MkdirAll(filepath.Join(full, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		content []byte
		flags   string
	}{
		{"flipped", flip, ""},
		{"without checksum", whole[:len(whole)-32], ""},
		{"cut", whole[:len(whole)/2+1], ""},
		{"not empty", whole, "--data-dir=" + full},
		{"log directory there", whole, "--wal-dir=" + full},
		{"no such name", whole, "--name=other"},
		{"other URLs", whole, "--initial-advertise-peer-urls=http://127.0.0.1:9"},
		{"duplicate URL", whole, "--initial-cluster=m=http://127.0.0.1:1,n=http://127.0.0.1:1"},
		{"bump alone", whole, "--bump-revision=5"},
		{"mark alone", whole, "--mark-compacted"},
	} {
		path := filepath.Join(dir, "bad")
		if err := os.WriteFile(path, test.content, 0o600); err != nil {
			t.Fatal(err)
		}
		var codes [2]int
		var texts [2]string
		for i, to := range all {
			args := []string{"snapshot", "restore", path, "--data-dir", filepath.Join(t.TempDir(), "d"), "--name=m",
				"--initial-cluster=m=http://127.0.0.1:1", "--initial-advertise-peer-urls=http://127.0.0.1:1"}
			out, err := process.Command{Program: to.util, Args: append(args, strings.Fields(test.flags)...)}.Run()
			if err != nil {
				t.Fatal(err)
			}
			codes[i] = out.Code
			for line := range strings.Lines(out.Stderr) {
				if strings.HasPrefix(line, "Error: ") {
					texts[i] = strings.TrimSpace(line)
				}
			}
		}
		// Ours says what etcd says, and then what to do.
		if codes[0] != codes[1] || codes[0] == 0 || texts[0] == "" || !strings.HasPrefix(texts[1], texts[0]) {
			t.Errorf("%s: etcdutl ends with %d and %q, ours with %d and %q", test.name, codes[0], texts[0], codes[1], texts[1])
		}
	}
}

// statusOf lets both tools tell of a backup, in each format, and compares.
func statusOf(t *testing.T, c tools, all [2]side, backup string) {
	t.Helper()
	for _, format := range []string{"simple", "json", "table", "fields"} {
		for _, command := range [][]string{{"snapshot", "status"}, {"hashkv"}} {
			var told [2]string
			for i, by := range all {
				// etcdutl hashkv writes to the file.
				work := filepath.Join(t.TempDir(), "work")
				b, err := os.ReadFile(backup)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(work, b, 0o600); err != nil {
					t.Fatal(err)
				}
				told[i] = c.run(by.util[0], append(command, work, "-w", format)...)
			}
			if strings.TrimSpace(told[0]) != strings.TrimSpace(told[1]) {
				t.Errorf("%v -w %s: etcdutl prints\n%s\nours\n%s", command, format, told[0], told[1])
			}
		}
	}
}

// restoreOn restores a backup with a side's tool, and starts its program on that.
func restoreOn(t *testing.T, c tools, to side, backup string, flags ...string) *process.Server {
	t.Helper()
	dir := t.TempDir()
	args := []string{"snapshot", "restore", backup, "--data-dir", filepath.Join(dir, "m.data"), "--name", "m",
		"--initial-cluster", "m=http://127.0.0.1:1", "--initial-advertise-peer-urls", "http://127.0.0.1:1"}
	c.run(to.util[0], append(args, flags...)...)
	s, err := process.Start(process.Options{Program: to.server, Dir: dir, Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const rootPassword = "of the root"

func addRoot(t *testing.T, s *process.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	auth := etcdserverpb.NewAuthClient(s.Conn())
	if _, err := auth.UserAdd(ctx, &etcdserverpb.AuthUserAddRequest{Name: "root", Password: rootPassword}); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.UserGrantRole(ctx, &etcdserverpb.AuthUserGrantRoleRequest{User: "root", Role: "root"}); err != nil {
		t.Fatal(err)
	}
}

// worksOn writes to a member, turns auth on with the users that it has, and logs in.
func worksOn(t *testing.T, s *process.Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	before := etcdHashKV(t, s)
	p, err := etcdserverpb.NewKVClient(s.Conn()).Put(ctx, &etcdserverpb.PutRequest{Key: []byte("new"), Value: []byte("v")})
	if err != nil || p.Header.Revision != before.Revision+1 {
		t.Errorf("put: %v, %v, the revision was %d", p, err, before.Revision)
	}
	auth := etcdserverpb.NewAuthClient(s.Conn())
	if _, err := auth.AuthEnable(ctx, &etcdserverpb.AuthEnableRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := auth.Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: "root", Password: rootPassword}); err != nil {
		t.Error(err)
	}
	if _, err := auth.Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: "root", Password: "another"}); err == nil {
		t.Error(broken.Errorf("any password will do"))
	}
}

// seenBy is all that clients can see of a member but IDs, term and times.
func seenBy(t *testing.T, s *process.Server) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var b strings.Builder
	text := func(m proto.Message) {
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		check(err)
		fmt.Fprintf(&b, "%T %x\n", m, raw)
	}
	keys, err := etcdserverpb.NewKVClient(s.Conn()).Range(ctx, &etcdserverpb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
	check(err)
	fmt.Fprintln(&b, "count", keys.Count)
	for _, kv := range keys.Kvs {
		if len(kv.Value) > 100 {
			kv.Value = fmt.Appendf(nil, "%d bytes", len(kv.Value))
		}
		text(kv)
	}
	lessor := etcdserverpb.NewLeaseClient(s.Conn())
	leases, err := lessor.LeaseLeases(ctx, &etcdserverpb.LeaseLeasesRequest{})
	check(err)
	var lines []string
	for _, l := range leases.Leases {
		ttl, err := lessor.LeaseTimeToLive(ctx, &etcdserverpb.LeaseTimeToLiveRequest{ID: l.ID, Keys: true})
		check(err)
		var attached []string
		for _, k := range ttl.Keys {
			attached = append(attached, string(k))
		}
		slices.Sort(attached)
		lines = append(lines, fmt.Sprintf("lease %x of %d s: %q", l.ID, ttl.GrantedTTL, attached))
	}
	slices.Sort(lines)
	fmt.Fprintln(&b, strings.Join(lines, "\n"))
	auth := etcdserverpb.NewAuthClient(s.Conn())
	status, err := auth.AuthStatus(ctx, &etcdserverpb.AuthStatusRequest{})
	check(err)
	fmt.Fprintln(&b, "auth", status.Enabled, status.AuthRevision)
	users, err := auth.UserList(ctx, &etcdserverpb.AuthUserListRequest{})
	check(err)
	for _, name := range users.Users {
		u, err := auth.UserGet(ctx, &etcdserverpb.AuthUserGetRequest{Name: name})
		check(err)
		fmt.Fprintln(&b, "user", name, u.Roles)
	}
	roles, err := auth.RoleList(ctx, &etcdserverpb.AuthRoleListRequest{})
	check(err)
	for _, name := range roles.Roles {
		r, err := auth.RoleGet(ctx, &etcdserverpb.AuthRoleGetRequest{Role: name})
		check(err)
		fmt.Fprintln(&b, "role", name)
		for _, p := range r.Perm {
			text(p)
		}
	}
	st, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Status(ctx, &etcdserverpb.StatusRequest{})
	check(err)
	fmt.Fprintln(&b, "storage version", st.StorageVersion)
	return b.String()
}

// difference is the first line that differs.
func difference(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return fmt.Sprintf("line %d: %.300q and %.300q", i, x[i], y[i])
		}
	}
	return fmt.Sprintf("%d and %d lines", len(x), len(y))
}

// TestBackupMixed restores one cluster of both programs from one file, each member with its own program's tool, and has
// members of both join it.
func TestBackupMixed(t *testing.T) {
	t.Parallel() // it waits more than it works
	if programs.Engram == "" {
		t.Skip("COMPAT_SUBJECT=etcd: there is no other program to be in a cluster with")
	}
	for _, bump := range [][]string{nil, {"--bump-revision", "1000", "--mark-compacted"}} {
		t.Run(fmt.Sprintf("bump %q", bump), func(t *testing.T) {
			t.Parallel()
			ctx, all, c := mixedContext(t), sides(t), tools{t: t}
			cl := newCluster(t, quick...)
			etcd, engram := reference(t), cluster.Program{Name: "engram", Path: programs.Engram}
			check(t, cl.Start(ctx, etcd, engram, engram))
			client, err := cl.Serving()[0].Client()
			check(t, err)
			lease, err := client.Grant(ctx, 1000)
			check(t, err)
			for i := range 300 {
				_, err := client.Put(ctx, fmt.Sprintf("k%d", i%100), strings.Repeat("v", i), clientv3.WithLease(lease.ID))
				check(t, err)
			}
			_, err = client.Compact(ctx, 200)
			check(t, err)
			backup := filepath.Join(t.TempDir(), "backup")
			c.run(all[0].save[0], "--endpoints", cl.Of("engram").ClientURL, "snapshot", "save", backup)
			var initial []string
			for _, m := range cl.Members() {
				check(t, m.Stop())
				check(t, os.RemoveAll(m.DataDir))
				initial = append(initial, m.Name+"="+m.PeerURL)
			}
			for _, m := range cl.Members() {
				by := all[0]
				if m.Program.Name == "engram" {
					by = all[1]
				}
				c.run(by.util[0], append([]string{"snapshot", "restore", backup, "--data-dir", m.DataDir, "--name", m.Name,
					"--initial-cluster", strings.Join(initial, ","), "--initial-advertise-peer-urls", m.PeerURL}, bump...)...)
			}
			for _, m := range cl.Members() {
				check(t, m.Spawn())
			}
			for _, m := range cl.Members() {
				check(t, m.Ready(ctx))
			}
			_, err = cl.CheckHash(ctx)
			check(t, err)
			for _, m := range cl.Members() {
				check(t, cl.MoveLeader(ctx, m))
				client, err := m.Client()
				check(t, err)
				_, err = client.Put(ctx, "from "+m.Name, "x", clientv3.WithLease(lease.ID))
				check(t, err)
			}
			// The log has nothing of what was restored: who joins gets a snapshot, of either leader.
			for _, leader := range []string{etcd.Name, engram.Name} {
				for _, p := range []cluster.Program{etcd, engram} {
					check(t, cl.MoveLeader(ctx, cl.Of(leader)))
					m, err := cl.Add(ctx, p, false)
					check(t, err)
					_, err = cl.CheckHash(ctx)
					check(t, err)
					check(t, cl.Remove(ctx, m))
				}
			}
			client, err = cl.Serving()[0].Client()
			check(t, err)
			got, err := client.Get(ctx, "", clientv3.WithPrefix())
			if err != nil || got.Count != 103 || got.Kvs[0].Lease != int64(lease.ID) {
				t.Errorf("%d keys, %v", got.Count, err)
			}
		})
	}
}
