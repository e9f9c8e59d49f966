package auth

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/storage"
)

func open(t testing.TB, fs vfs.FS) (*storage.Store, *Table) {
	store, err := storage.Open(storage.Options{FS: fs, Dir: "db"})
	if err != nil {
		t.Fatal(err)
	}
	table, err := Open(store)
	if err != nil {
		t.Fatal(err)
	}
	return store, table
}

// arg reads a name or key; quoted ones may hold any byte.
func arg(t *testing.T, d *datadriven.TestData, name string) string {
	var s string
	d.MaybeScanArgs(t, name, &s)
	if strings.HasPrefix(s, `"`) {
		u, err := strconv.Unquote(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	return s
}

func TestScript(t *testing.T) {
	fs := vfs.NewMem()
	store, table := open(t, fs)
	datadriven.RunTest(t, "testdata/auth", func(t *testing.T, d *datadriven.TestData) string {
		user, role, key, end := arg(t, d, "user"), arg(t, d, "role"), []byte(arg(t, d, "key")), []byte(arg(t, d, "end"))
		root := table.Root()
		revision := root.Revision()
		d.MaybeScanArgs(t, "revision", &revision)
		switch d.Cmd { // questions
		case "check-range":
			return verdict(root.CheckRange(user, revision, key, end))
		case "check-put":
			return verdict(root.CheckPut(user, revision, key))
		case "check-delete":
			return verdict(root.CheckDeleteRange(user, revision, key, end))
		case "check-user":
			return verdict(root.CheckUser(user, revision))
		case "check-admin":
			return verdict(root.CheckAdmin(user))
		case "check-user-get":
			return verdict(root.CheckUserGet(user, arg(t, d, "other")))
		case "check-role-get":
			return verdict(root.CheckRoleGet(user, role))
		case "user":
			roles, err := root.UserRoles(user)
			if err != nil {
				return verdict(err)
			}
			u := root.User(user)
			return fmt.Sprintf("roles %q password %q no-password %v\n", roles, u.GetPassword(), u.GetOptions().GetNoPassword())
		case "role":
			perms, err := root.RolePermissions(role)
			if err != nil {
				return verdict(err)
			}
			var out strings.Builder
			for _, p := range perms {
				fmt.Fprintf(&out, "%v [%q, %q)\n", p.GetPermType(), p.GetKey(), p.GetRangeEnd())
			}
			return out.String()
		case "list":
			return fmt.Sprintf("enabled %v revision %d users %q roles %q\n", root.Enabled(), root.Revision(), root.UserNames(), root.RoleNames())
		case "rows":
			return rows(t, store)
		case "reopen":
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			store, table = open(t, fs)
			if got, want := describe(table.Root()), describe(root); got != want {
				t.Errorf("reopened\n%s, had\n%s", got, want)
			}
			return fmt.Sprintf("revision %d enabled %v\n", table.Root().Revision(), table.Root().Enabled())
		case "authenticate":
			var index uint64
			d.ScanArgs(t, "index", &index)
			token, err := table.Authenticate(&pb.InternalAuthenticateRequest{Name: user, SimpleToken: arg(t, d, "prefix")}, index)
			if err != nil {
				return verdict(err)
			}
			return fmt.Sprintf("token %q\n", token)
		}

		b := store.NewBatch()
		out, err := change(t, table, b, d, user, role, key, end)
		written := !b.Empty()
		if cerr := store.Commit(b); cerr != nil {
			t.Fatal(cerr)
		}
		if err != nil {
			if written || table.Root() != root {
				t.Error("a refused command changed something")
			}
			return verdict(err)
		}
		if table.Root().Revision() != revision {
			out += fmt.Sprintf("revision %d\n", table.Root().Revision())
		}
		return out
	})
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func change(t *testing.T, table *Table, b *storage.Batch, d *datadriven.TestData, user, role string, key, end []byte) (string, error) {
	hash := base64.StdEncoding.EncodeToString([]byte(arg(t, d, "hash")))
	if d.HasArg("raw-hash") {
		hash = arg(t, d, "raw-hash")
	}
	switch d.Cmd {
	case "init":
		table.Init(b)
	case "enable":
		return "", table.Enable(b)
	case "disable":
		return fmt.Sprintln("changed", table.Disable(b)), nil
	case "user-add":
		r := &pb.AuthUserAddRequest{Name: user, HashedPassword: hash}
		if d.HasArg("no-password") {
			r.Options = &authpb.UserAddOptions{NoPassword: true}
		}
		return "", table.UserAdd(b, r)
	case "user-delete":
		return "", table.UserDelete(b, &pb.AuthUserDeleteRequest{Name: user})
	case "user-password":
		return "", table.UserChangePassword(b, &pb.AuthUserChangePasswordRequest{Name: user, HashedPassword: hash})
	case "user-grant":
		return "", table.UserGrantRole(b, &pb.AuthUserGrantRoleRequest{User: user, Role: role})
	case "user-revoke":
		return "", table.UserRevokeRole(b, &pb.AuthUserRevokeRoleRequest{Name: user, Role: role})
	case "role-add":
		return "", table.RoleAdd(b, &pb.AuthRoleAddRequest{Name: role})
	case "role-delete":
		return "", table.RoleDelete(b, &pb.AuthRoleDeleteRequest{Role: role})
	case "role-grant":
		r := &pb.AuthRoleGrantPermissionRequest{Name: role}
		if !d.HasArg("none") {
			r.Perm = &authpb.Permission{PermType: authpb.Permission_Type(authpb.Permission_Type_value[arg(t, d, "type")]), Key: key, RangeEnd: end}
		}
		return "", table.RoleGrantPermission(b, r)
	case "role-revoke":
		return "", table.RoleRevokePermission(b, &pb.AuthRoleRevokePermissionRequest{Role: role, Key: key, RangeEnd: end})
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	return "", nil
}

func verdict(err error) string {
	if err != nil {
		return err.Error() + "\n"
	}
	return "ok\n"
}

func rows(t testing.TB, r storage.Reader) string {
	var out strings.Builder
	for _, table := range []storage.Table{storage.TableAuth, storage.TableAuthUser, storage.TableAuthRole} {
		if err := storage.Rows(r, table, func(name, value []byte) error {
			fmt.Fprintf(&out, "%q = %x\n", name, value)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	return out.String()
}

// TestPlainPassword: a command of an old etcd gets its password hashed here.
func TestPlainPassword(t *testing.T) {
	store, table := open(t, vfs.NewMem())
	b := store.NewBatch()
	if err := table.UserAdd(b, &pb.AuthUserAddRequest{Name: "bob", Password: "secret"}); err != nil {
		t.Fatal(err)
	}
	if err := bcrypt.CompareHashAndPassword(table.Root().User("bob").GetPassword(), []byte("secret")); err != nil {
		t.Error(err)
	}
	if err := table.UserChangePassword(b, &pb.AuthUserChangePasswordRequest{Name: "bob", Password: "other"}); err != nil {
		t.Fatal(err)
	}
	if err := bcrypt.CompareHashAndPassword(table.Root().User("bob").GetPassword(), []byte("other")); err != nil {
		t.Error(err)
	}
	// Without a hash and a password, as of a change to the empty one, none is right.
	if err := table.UserChangePassword(b, &pb.AuthUserChangePasswordRequest{Name: "bob"}); err != nil {
		t.Fatal(err)
	}
	if hash := table.Root().User("bob").GetPassword(); len(hash) != 0 {
		t.Errorf("the empty password is kept as %q", hash)
	}
	before := table.Root()
	if err := table.UserAdd(b, &pb.AuthUserAddRequest{Name: "eve", Password: strings.Repeat("x", 100)}); !errors.Is(err, ErrFailed) {
		t.Errorf("password of 100 bytes: %v", err)
	}
	if table.Root() != before {
		t.Error("a refused command changed something")
	}
	b.Discard()
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenRefusesGarbage(t *testing.T) {
	for name, key := range map[string][]byte{
		"revision":   storage.RowKey(storage.TableAuth, []byte(rowRevision)),
		"user":       storage.RowKey(storage.TableAuthUser, []byte("bob")),
		"other user": storage.RowKey(storage.TableAuthUser, []byte("eve")),
		"role":       storage.RowKey(storage.TableAuthRole, []byte("r")),
		"other role": storage.RowKey(storage.TableAuthRole, []byte("q")),
	} {
		value := []byte{0xff}
		switch name {
		case "other user":
			value = marshal(&authpb.User{Name: []byte("bob")})
		case "other role":
			value = marshal(&authpb.Role{Name: []byte("r")})
		}
		store, _ := open(t, vfs.NewMem())
		b := store.NewBatch()
		b.Set(key, value)
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(store); err == nil {
			t.Errorf("%s: garbage was read", name)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRights compares the merged intervals with a naive model: all keys of up to
// two letters and the gaps between them, each permission looked at by itself.
func TestRights(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	// points stand for all keys: each is a key or just behind one, so that two
	// different ranges with ends among keys differ in at least one point.
	var keys, points []string
	for _, a := range []string{"", "a", "b", "c"} {
		for _, b := range []string{"", "a", "b", "c"} {
			if k := a + b; k != "" {
				keys = append(keys, k)
			}
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for _, k := range keys {
		points = append(points, k, k+"\x00", k+"\x00\x01")
	}
	inside := func(p, key, end string) bool {
		switch end {
		case "":
			return p == key
		case "\x00":
			return p >= key
		}
		return p >= key && p < end
	}
	pick := func() (key, end string) {
		key = keys[rng.IntN(len(keys))]
		switch rng.IntN(4) {
		case 0:
			return key, ""
		case 1:
			if rng.IntN(3) == 0 {
				return key, "\x00"
			}
		case 2: // ends where a point permission does
			if end = keys[rng.IntN(len(keys))] + "\x00"; end > key {
				return key, end
			}
		}
		for {
			if end = keys[rng.IntN(len(keys))]; end > key {
				return key, end
			}
			if key = keys[rng.IntN(len(keys))]; key == keys[len(keys)-1] {
				key = keys[0]
			}
		}
	}
	seen := map[string]int{}
	store, _ := open(t, vfs.NewMem())
	defer store.Close()
	for range 500 { // nothing is committed, so each round starts afresh
		table, err := Open(store)
		if err != nil {
			t.Fatal(err)
		}
		b := store.NewBatch()
		must := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		must(table.UserAdd(b, &pb.AuthUserAddRequest{Name: RootUser, HashedPassword: "aA=="}))
		must(table.UserGrantRole(b, &pb.AuthUserGrantRoleRequest{User: RootUser, Role: RootRole}))
		must(table.UserAdd(b, &pb.AuthUserAddRequest{Name: "bob", HashedPassword: "aA=="}))
		must(table.Enable(b))
		type grant struct {
			kind     authpb.Permission_Type
			key, end string
		}
		var grants []grant
		for role := range 2 {
			name := fmt.Sprint("r", role)
			must(table.RoleAdd(b, &pb.AuthRoleAddRequest{Name: name}))
			must(table.UserGrantRole(b, &pb.AuthUserGrantRoleRequest{User: "bob", Role: name}))
			ranges := map[string]bool{}
			for range rng.IntN(5) {
				g := grant{kind: authpb.Permission_Type(rng.IntN(3))}
				g.key, g.end = pick()
				if ranges[g.key] {
					continue // a second of the same key may replace the first
				}
				ranges[g.key] = true
				must(table.RoleGrantPermission(b, &pb.AuthRoleGrantPermissionRequest{Name: name, Perm: &authpb.Permission{PermType: g.kind, Key: []byte(g.key), RangeEnd: []byte(g.end)}}))
				grants = append(grants, g)
				// Asking between two grants fills the cache, which must not stay.
				_ = table.Root().CheckPut("bob", table.Root().Revision(), []byte("a"))
			}
		}
		root := table.Root()
		for range 20 {
			key, end := pick()
			for _, kind := range []authpb.Permission_Type{authpb.READ, authpb.WRITE} {
				want := true
				for _, p := range points {
					if !inside(p, key, end) {
						continue
					}
					want = want && slices.ContainsFunc(grants, func(g grant) bool {
						return (g.kind == kind || g.kind == authpb.READWRITE) && inside(p, g.key, g.end)
					})
				}
				// Nothing but an open permission reaches all the way up.
				if want && end == "\x00" {
					want = slices.ContainsFunc(grants, func(g grant) bool {
						return (g.kind == kind || g.kind == authpb.READWRITE) && g.end == "\x00"
					})
				}
				var err error
				switch {
				case kind == authpb.READ:
					err = root.CheckRange("bob", root.Revision(), []byte(key), []byte(end))
				case end == "" && rng.IntN(2) == 0:
					err = root.CheckPut("bob", root.Revision(), []byte(key))
				default:
					err = root.CheckDeleteRange("bob", root.Revision(), []byte(key), []byte(end))
				}
				if err != nil && !errors.Is(err, ErrPermissionDenied) {
					t.Fatal(err)
				}
				if (err == nil) != want {
					t.Fatalf("%v [%q, %q) with %v: %v", kind, key, end, grants, err)
				}
				shape := "range"
				if len(end) < 2 {
					shape = fmt.Sprintf("end %q", end)
				}
				seen[fmt.Sprint(shape, want)]++
			}
		}
		b.Discard()
	}
	for _, what := range []string{"rangetrue", "rangefalse", `end ""true`, `end ""false`, `end "\x00"true`, `end "\x00"false`} {
		if seen[what] < 20 {
			t.Errorf("%s happened %d times only", what, seen[what])
		}
	}
}

// TestModel runs random changes and compares what is in memory with what a
// reopened table reads, and the revision with the count of changes.
func TestModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	store, table := open(t, vfs.NewMem())
	seen := map[string]int{}
	for i := range 1500 {
		name := []string{"", RootUser, "bob", "eve", "mal"}[rng.IntN(5)]
		role := []string{"", RootRole, "r", "s"}[rng.IntN(4)]
		key := []byte{byte('a' + rng.IntN(3))}
		var end []byte
		if rng.IntN(2) == 0 {
			end = []byte{byte('a' + rng.IntN(4))}
		}
		before := table.Root()
		kept := describe(before)
		b := store.NewBatch()
		var err error
		var what string
		quiet := false // may succeed and yet change nothing
		switch rng.IntN(11) {
		case 0:
			what, quiet, err = "enable", true, table.Enable(b)
		case 1:
			if rng.IntN(4) > 0 {
				b.Discard()
				continue
			}
			what, quiet = "disable", true
			table.Disable(b)
		case 2:
			what, err = "user-add", table.UserAdd(b, &pb.AuthUserAddRequest{Name: name, HashedPassword: "aA==", Options: &authpb.UserAddOptions{NoPassword: rng.IntN(3) == 0}})
		case 3:
			if rng.IntN(3) > 0 {
				b.Discard()
				continue
			}
			what, err = "user-delete", table.UserDelete(b, &pb.AuthUserDeleteRequest{Name: name})
		case 4:
			what, err = "user-password", table.UserChangePassword(b, &pb.AuthUserChangePasswordRequest{Name: name, HashedPassword: "aaaa"})
		case 5:
			what, quiet, err = "user-grant", true, table.UserGrantRole(b, &pb.AuthUserGrantRoleRequest{User: name, Role: role})
		case 6:
			what, err = "user-revoke", table.UserRevokeRole(b, &pb.AuthUserRevokeRoleRequest{Name: name, Role: role})
		case 7:
			what, err = "role-add", table.RoleAdd(b, &pb.AuthRoleAddRequest{Name: role})
		case 8:
			what, err = "role-delete", table.RoleDelete(b, &pb.AuthRoleDeleteRequest{Role: role})
		case 9:
			what, err = "role-grant", table.RoleGrantPermission(b, &pb.AuthRoleGrantPermissionRequest{Name: role, Perm: &authpb.Permission{PermType: authpb.Permission_Type(rng.IntN(3)), Key: key, RangeEnd: end}})
		case 10:
			what, err = "role-revoke", table.RoleRevokePermission(b, &pb.AuthRoleRevokePermissionRequest{Role: role, Key: key, RangeEnd: end})
		}
		seen[fmt.Sprint(what, " ", err == nil)]++
		after := table.Root()
		bumped := after.Revision() - before.Revision()
		switch {
		case err != nil && (after != before || !b.Empty()):
			t.Fatalf("%s failed with %v and changed something", what, err)
		case err == nil && !quiet && bumped != 1, bumped > 1, what == "enable" && bumped != 0:
			t.Fatalf("%s: revision went up by %d", what, bumped)
		}
		if describe(before) != kept {
			t.Fatalf("%s changed an old root", what)
		}
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if i%20 == 0 {
			again, err := Open(store)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := describe(again.Root()), describe(after); got != want {
				t.Fatalf("after %s reopened as\n%s, want\n%s", what, got, want)
			}
		}
		for name, u := range after.users {
			if !slices.IsSorted(u.GetRoles()) || u.GetOptions() == nil {
				t.Fatalf("user %q is %v", name, u)
			}
			for _, r := range u.GetRoles() {
				if r != RootRole && after.roles[r] == nil {
					t.Fatalf("user %q has role %q, which is gone", name, r)
				}
			}
		}
	}
	for _, what := range []string{"enable", "user-add", "user-delete", "user-password", "user-grant", "user-revoke", "role-add", "role-delete", "role-grant", "role-revoke"} {
		if seen[what+" true"] == 0 || seen[what+" false"] == 0 {
			t.Errorf("%s: %d successes, %d failures", what, seen[what+" true"], seen[what+" false"])
		}
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func describe(r *Root) string {
	var out bytes.Buffer
	fmt.Fprintln(&out, r.enabled, r.revision)
	for _, name := range r.UserNames() {
		b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(r.users[name])
		fmt.Fprintf(&out, "user %q %x\n", name, b)
	}
	for _, name := range r.RoleNames() {
		b, _ := proto.MarshalOptions{Deterministic: true}.Marshal(r.roles[name])
		fmt.Fprintf(&out, "role %q %x\n", name, b)
	}
	return out.String()
}

func BenchmarkCheckPut(b *testing.B) {
	store, table := open(b, vfs.NewMem())
	batch := store.NewBatch()
	for _, err := range []error{
		table.UserAdd(batch, &pb.AuthUserAddRequest{Name: RootUser, HashedPassword: "aA=="}),
		table.UserGrantRole(batch, &pb.AuthUserGrantRoleRequest{User: RootUser, Role: RootRole}),
		table.UserAdd(batch, &pb.AuthUserAddRequest{Name: "bob", HashedPassword: "aA=="}),
		table.RoleAdd(batch, &pb.AuthRoleAddRequest{Name: "r"}),
		table.UserGrantRole(batch, &pb.AuthUserGrantRoleRequest{User: "bob", Role: "r"}),
		table.RoleGrantPermission(batch, &pb.AuthRoleGrantPermissionRequest{Name: "r", Perm: &authpb.Permission{PermType: authpb.READWRITE, Key: []byte("/a/"), RangeEnd: []byte("/a0")}}),
		table.Enable(batch),
	} {
		if err != nil {
			b.Fatal(err)
		}
	}
	root, key := table.Root(), []byte("/a/some/key")
	b.ReportAllocs()
	for b.Loop() {
		if err := root.CheckPut("bob", root.Revision(), key); err != nil {
			b.Fatal(err)
		}
	}
	batch.Discard()
	if err := store.Close(); err != nil {
		b.Fatal(err)
	}
}
