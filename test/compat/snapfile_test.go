package compat

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/broken"
)

// kvHash is an answer to HashKV at the newest revision, and what else the tool snapfile tells of a store.
type kvHash struct {
	Hash              uint32
	Revision, Compact int64

	Applied, Term                    uint64
	Leases, Attached, Users, Members int
}

// short is what etcd's answer has too.
func (h kvHash) short() string {
	return fmt.Sprintf("hash %d, revision %d, compact revision %d", h.Hash, h.Revision, h.Compact)
}

// tools runs the tool snapfile and etcdutl.
type tools struct {
	t        *testing.T
	snapfile string
}

func newTools(t *testing.T) tools {
	path, err := process.BuildSnapfile(parentModule, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return tools{t, path}
}

func (c tools) run(program string, args ...string) string {
	c.t.Helper()
	out, err := process.Command{Program: []string{program}, Args: args}.Run()
	if err != nil || out.Code != 0 {
		c.t.Fatalf("%s %q: exit code %d, %v\n%s%s", filepath.Base(program), args, out.Code, err, out.Stdout, out.Stderr)
	}
	return out.Stdout
}

func (c tools) hashKV(store string) (h kvHash) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(c.run(c.snapfile, "hashkv", store)), &h); err != nil {
		c.t.Fatal(err)
	}
	return h
}

// etcdHashKV asks a running member.
func etcdHashKV(t *testing.T, s *process.Server) kvHash {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	a, err := etcdserverpb.NewMaintenanceClient(s.Conn()).HashKV(ctx, &etcdserverpb.HashKVRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return kvHash{Hash: a.Hash, Revision: a.HashRevision, Compact: a.CompactRevision}
}

// TestEtcdTakesOurFile gives a database file that Engram wrote to etcd's tools, and to a member of etcd, which works on.
func TestEtcdTakesOurFile(t *testing.T) {
	c := newTools(t)
	dir := t.TempDir()
	store, db := filepath.Join(dir, "store"), filepath.Join(dir, "db")
	c.run(c.snapfile, "fill", store, "3.7.0")
	c.run(c.snapfile, "export", store, db)
	want := c.hashKV(store)

	var status struct {
		Revision  int64
		TotalSize int64
		Version   string
	}
	if err := json.Unmarshal([]byte(c.run(programs.Etcdutl, "snapshot", "status", "-w", "json", db)), &status); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(db); err != nil || status.Revision != want.Revision || status.TotalSize != info.Size() || status.Version != "3.7.0" {
		t.Errorf("etcdutl snapshot status finds %+v in a file of %d bytes at revision %d (%v)", status, info.Size(), want.Revision, err)
	}

	data := filepath.Join(dir, "m.data")
	c.run(programs.Etcdutl, "snapshot", "restore", "--skip-hash-check", db, "--data-dir", data,
		"--name", "m", "--initial-cluster", "m=http://127.0.0.1:1", "--initial-advertise-peer-urls", "http://127.0.0.1:1")
	// A file that only reads would not do: etcdutl hashkv opens it to write.
	if got, wanted := strings.TrimSpace(c.run(programs.Etcdutl, "hashkv", db)), fmt.Sprintf("%d, %d, %d", want.Hash, want.Revision, want.Compact); got != wanted {
		t.Error(broken.Errorf("etcdutl hashkv prints %s, want %s", got, wanted))
	}

	s, err := process.Start(process.Options{Program: programs.Etcd, Dir: dir, Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got := etcdHashKV(t, s); got.short() != want.short() {
		t.Error(broken.Errorf("etcd has %s, Engram %s", got.short(), want.short()))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	leases, err := etcdserverpb.NewLeaseClient(s.Conn()).LeaseLeases(ctx, &etcdserverpb.LeaseLeasesRequest{})
	if err != nil || len(leases.Leases) != want.Leases {
		t.Errorf("etcd has leases %v, %v, Engram %d", leases.GetLeases(), err, want.Leases)
	}
	attached := 0
	for _, l := range leases.GetLeases() {
		ttl, err := etcdserverpb.NewLeaseClient(s.Conn()).LeaseTimeToLive(ctx, &etcdserverpb.LeaseTimeToLiveRequest{ID: l.ID, Keys: true})
		if err != nil {
			t.Fatal(err)
		}
		attached += len(ttl.Keys)
	}
	if attached != want.Attached || attached == 0 {
		t.Errorf("etcd has %d keys with leases, Engram %d", attached, want.Attached)
	}
	users, err := etcdserverpb.NewAuthClient(s.Conn()).UserList(ctx, &etcdserverpb.AuthUserListRequest{})
	if err != nil || len(users.Users) != want.Users {
		t.Errorf("etcd has users %v, %v, Engram %d", users.GetUsers(), err, want.Users)
	}

	// It works on: writes, compacts, frees pages, restarts, and Engram reads what came of it.
	writeMuch(t, s, rand.New(rand.NewPCG(1, 1)), 500)
	if _, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Defragment(ctx, &etcdserverpb.DefragmentRequest{}); err != nil {
		t.Fatal(err)
	}
	writeMuch(t, s, rand.New(rand.NewPCG(2, 2)), 500)
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(); err != nil {
		t.Fatal(err)
	}
	compareRead(t, c, s)
}

// TestEngramReadsEtcdsFile reads the database of a stopped member, and its backups.
func TestEngramReadsEtcdsFile(t *testing.T) {
	c := newTools(t)
	dir := t.TempDir()
	s, err := process.Start(process.Options{Program: programs.Etcd, Dir: dir, Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for seed := range uint64(3) {
		writeMuch(t, s, rand.New(rand.NewPCG(seed, 3)), 700)
	}
	backup := filepath.Join(dir, "backup")
	c.run(programs.Etcdctl, "--endpoints", s.ClientURL, "snapshot", "save", backup)
	want := etcdHashKV(t, s)
	store := filepath.Join(dir, "from backup")
	c.run(c.snapfile, "import", backup, store)
	if got := c.hashKV(store); got.short() != want.short() {
		t.Error(broken.Errorf("etcd has %s, Engram read %s from its backup", want.short(), got.short()))
	}
	compareRead(t, c, s)

	// A restore that raises the revision leaves a record with an empty value, and a compaction to be done.
	other := t.TempDir()
	c.run(programs.Etcdutl, "snapshot", "restore", backup, "--data-dir", filepath.Join(other, "m.data"), "--bump-revision", "1000000", "--mark-compacted",
		"--name", "m", "--initial-cluster", "m=http://127.0.0.1:1", "--initial-advertise-peer-urls", "http://127.0.0.1:1")
	raised := filepath.Join(other, "raised")
	c.run(c.snapfile, "import", filepath.Join(other, "m.data", "member", "snap", "db"), raised)
	r, err := process.Start(process.Options{Program: programs.Etcd, Dir: other, Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	// It is refused, after the compaction that waits.
	_, err = etcdserverpb.NewKVClient(r.Conn()).Compact(ctx, &etcdserverpb.CompactionRequest{Revision: 1, Physical: true})
	if err == nil {
		t.Error("a compacted revision was compacted again")
	}
	if got, want := c.hashKV(raised), etcdHashKV(t, r); got.short() != want.short() {
		t.Error(broken.Errorf("etcd has %s after a restore that raised the revision, Engram read %s", want.short(), got.short()))
	}
	compareRead(t, c, r)
}

// compareRead stops a member and compares what Engram reads from its file with what it answered before.
func compareRead(t *testing.T, c tools, s *process.Server) {
	t.Helper()
	want := etcdHashKV(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	leases, err := etcdserverpb.NewLeaseClient(s.Conn()).LeaseLeases(ctx, &etcdserverpb.LeaseLeasesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	users, err := etcdserverpb.NewAuthClient(s.Conn()).UserList(ctx, &etcdserverpb.AuthUserListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	status, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Status(ctx, &etcdserverpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	store := filepath.Join(t.TempDir(), "store")
	c.run(c.snapfile, "import", filepath.Join(s.DataDir, "member", "snap", "db"), store)
	got := c.hashKV(store)
	if got.short() != want.short() {
		t.Error(broken.Errorf("etcd had %s, Engram read %s from its file", want.short(), got.short()))
	}
	if got.Leases != len(leases.Leases) || got.Users != len(users.Users) || got.Members != 1 {
		t.Errorf("etcd had %d leases, %d users, 1 member, Engram read %+v", len(leases.Leases), len(users.Users), got)
	}
	if got.Applied < status.RaftAppliedIndex || got.Term != status.RaftTerm {
		t.Errorf("etcd had applied index %d in term %d, Engram read %+v", status.RaftAppliedIndex, status.RaftTerm, got)
	}
}

// writeMuch changes keys, leases, users and roles, and compacts.
func writeMuch(t *testing.T, s *process.Server, rng *rand.Rand, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	kv, auth, lessor := etcdserverpb.NewKVClient(s.Conn()), etcdserverpb.NewAuthClient(s.Conn()), etcdserverpb.NewLeaseClient(s.Conn())
	var leases []int64
	for range 3 {
		l, err := lessor.LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{TTL: 10_000})
		check(err)
		leases = append(leases, l.ID)
	}
	name := fmt.Sprintf("n%d", rng.Uint32())
	_, err := auth.RoleAdd(ctx, &etcdserverpb.AuthRoleAddRequest{Name: name})
	check(err)
	_, err = auth.RoleGrantPermission(ctx, &etcdserverpb.AuthRoleGrantPermissionRequest{Name: name, Perm: &authpb.Permission{
		PermType: authpb.READWRITE, Key: []byte("k"), RangeEnd: []byte("l"),
	}})
	check(err)
	_, err = auth.UserAdd(ctx, &etcdserverpb.AuthUserAddRequest{Name: name, Password: "p"})
	check(err)
	_, err = auth.UserGrantRole(ctx, &etcdserverpb.AuthUserGrantRoleRequest{User: name, Role: name})
	check(err)
	revision := int64(0)
	for i := range n {
		key := fmt.Appendf(nil, "k%d", rng.IntN(200))
		switch rng.IntN(8) {
		case 0:
			_, err = kv.DeleteRange(ctx, &etcdserverpb.DeleteRangeRequest{Key: key, RangeEnd: append(key, '5')})
		case 1:
			_, err = kv.Txn(ctx, &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{
				{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: &etcdserverpb.PutRequest{Key: key, Value: key}}},
				{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: &etcdserverpb.PutRequest{Key: append(key, 't'), Lease: leases[0]}}},
			}})
		default:
			lease := int64(0)
			if rng.IntN(3) == 0 {
				lease = leases[rng.IntN(len(leases))]
			}
			size := rng.IntN(2000)
			if i%100 == 7 {
				size = 1 << 20
			}
			var a *etcdserverpb.PutResponse
			if a, err = kv.Put(ctx, &etcdserverpb.PutRequest{Key: key, Value: make([]byte, size), Lease: lease}); err == nil {
				revision = a.Header.Revision
			}
		}
		check(err)
		if i == n*2/3 {
			_, err = kv.Compact(ctx, &etcdserverpb.CompactionRequest{Revision: revision, Physical: true})
			check(err)
		}
	}
	_, err = lessor.LeaseRevoke(ctx, &etcdserverpb.LeaseRevokeRequest{ID: leases[1]})
	check(err)
}
