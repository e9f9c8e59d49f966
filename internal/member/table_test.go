package member

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/storage"
)

func open(t testing.TB, fs vfs.FS, o Options) (*storage.Store, *Table) {
	store, err := storage.Open(storage.Options{FS: fs, Dir: "db"})
	if err != nil {
		t.Fatal(err)
	}
	table, err := Open(store, o)
	if err != nil {
		t.Fatal(err)
	}
	return store, table
}

func TestScript(t *testing.T) {
	fs, o := vfs.NewMem(), Options{Version: "3.7.3"}
	store, table := open(t, fs, o)
	var noted uint64
	datadriven.RunTest(t, "testdata/member", func(t *testing.T, d *datadriven.TestData) string {
		var id uint64
		var urls, name, version, context string
		d.MaybeScanArgs(t, "id", &id)
		d.MaybeScanArgs(t, "urls", &urls)
		d.MaybeScanArgs(t, "name", &name)
		d.MaybeScanArgs(t, "version", &version)
		d.MaybeScanArgs(t, "context", &context)
		m := Member{ID: id, PeerURLs: split(urls), Name: name}
		var cc *raftpb.ConfChange
		switch d.Cmd {
		case "reopen":
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			before := table.Root()
			store, table = open(t, fs, o)
			if !reflect.DeepEqual(before, table.Root()) {
				t.Errorf("reopened\n%s, had\n%s", show(table.Root()), show(before))
			}
			return show(table.Root())
		case "rows":
			var out strings.Builder
			for _, tab := range []storage.Table{storage.TableMember, storage.TableMemberRemoved, storage.TableCluster} {
				if err := storage.Rows(store, tab, func(name, value []byte) error {
					fmt.Fprintf(&out, "%s = %s\n", name, value)
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			return out.String()
		case "add":
			cc = AddChange(9, m)
		case "add-learner":
			m.IsLearner = true
			cc = AddChange(9, m)
		case "promote":
			cc = PromoteChange(9, id)
		case "update":
			cc = UpdateChange(9, id, m.PeerURLs)
		case "remove":
			cc = RemoveChange(9, id)
		case "raw": // a change as nobody should propose it
			typ := raftpb.ConfChangeType(raftpb.ConfChangeType_value["ConfChange"+name])
			if name == "unknown" {
				typ = 77
			}
			cc = change(9, typ, id, []byte(context))
		}
		before := table.Root()
		kept := show(before)
		b := store.NewBatch()
		var out string
		var err error
		switch {
		case cc != nil:
			out, err = applyChange(t, table, b, cc)
		case d.Cmd == "publish":
			r := &membershippb.ClusterMemberAttrSetRequest{Member_ID: id}
			if !d.HasArg("nothing") {
				r.MemberAttributes = &membershippb.Attributes{Name: name, ClientUrls: split(urls)}
			}
			err = table.SetAttributes(b, r)
		case d.Cmd == "version":
			err = table.SetVersion(b, &membershippb.ClusterVersionSetRequest{Ver: version})
		case d.Cmd == "downgrade":
			table.SetDowngrade(b, &membershippb.DowngradeInfoSetRequest{Enabled: !d.HasArg("cancel"), Ver: version})
		case d.Cmd == "level": // of the present membership, or of the one of that fingerprint
			var level uint64
			d.ScanArgs(t, "to", &level)
			fingerprint := table.Root().Fingerprint()
			if d.HasArg("noted") {
				fingerprint = noted
			}
			err = table.SetFeatureLevel(b, level, fingerprint)
		case d.Cmd == "note":
			noted = table.Root().Fingerprint()
		default:
			t.Fatalf("unknown command %s", d.Cmd)
		}
		if err != nil && (!b.Empty() || table.Root() != before) {
			t.Error("a refused change changed something")
		}
		if cerr := store.Commit(b); cerr != nil {
			t.Fatal(cerr)
		}
		if show(before) != kept {
			t.Error("a root changed")
		}
		if err != nil {
			return out + err.Error() + "\n"
		}
		return out + show(table.Root())
	})
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func split(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, "+")
}

// applyChange checks what goes to raft and that Validate says the same as Apply.
func applyChange(t *testing.T, table *Table, b *storage.Batch, cc *raftpb.ConfChange) (string, error) {
	asked := proto.Clone(cc)
	valid := table.Root().ValidateConfChange(cc)
	forRaft, err := table.ApplyConfChange(b, cc)
	if fmt.Sprint(valid) != fmt.Sprint(err) {
		t.Errorf("validate says %v, apply %v", valid, err)
	}
	if !proto.Equal(cc, asked) {
		t.Errorf("change became %v, was %v", cc, asked)
	}
	want := proto.Clone(cc).(*raftpb.ConfChange)
	if err != nil {
		want.NodeId = proto.Uint64(0)
	}
	if !proto.Equal(forRaft, want) {
		t.Errorf("raft gets %v, want %v", forRaft, want)
	}
	return fmt.Sprintf("context %s\n", cc.GetContext()), err
}

func show(r *Root) string {
	var out strings.Builder
	for _, m := range r.List() {
		role := "voter"
		if m.IsLearner {
			role = "learner"
		}
		fmt.Fprintf(&out, "%x %s peers %v name %q clients %v\n", m.ID, role, m.PeerURLs, m.Name, m.ClientURLs)
	}
	if ids := r.RemovedIDs(); len(ids) > 0 {
		fmt.Fprintf(&out, "removed %x\n", ids)
	}
	if v := r.Version(); v != "" {
		fmt.Fprintf(&out, "version %s\n", v)
	}
	if d := r.Downgrade(); d != (Downgrade{}) {
		fmt.Fprintf(&out, "downgrade %+v\n", d)
	}
	if l := r.FeatureLevel(); l != 0 {
		fmt.Fprintf(&out, "feature level %d\n", l)
	}
	return out.String()
}

// TestIDs checks the vector of a live etcd.
func TestIDs(t *testing.T) {
	id := FoundingID([]string{"http://127.0.0.1:23791"}, "etcd-cluster")
	if id != 0xac7c97ef0ec193b0 {
		t.Errorf("member %x", id)
	}
	if c := ClusterID([]uint64{id}); c != 0x8cc9da78b36d1115 {
		t.Errorf("cluster %x", c)
	}
	a, b := []string{"http://a:1", "http://b:2"}, []string{"http://b:2", "http://a:1"}
	if FoundingID(a, "t") != FoundingID(b, "t") || ClusterID([]uint64{1, 2}) != ClusterID([]uint64{2, 1}) {
		t.Error("an ID depends on the order")
	}
	if b[0] != "http://b:2" {
		t.Error("the caller's URLs were sorted")
	}
	now := time.Unix(1700000000, 0)
	if NewID(a, now) != FoundingID(a, "1700000000") || NewID(a, now) == NewID(a, now.Add(time.Second)) {
		t.Error("the ID of a new member does not depend on the time")
	}
}

func TestCheckPeerURLs(t *testing.T) {
	for _, good := range []string{"http://127.0.0.1:2380", "https://[::1]:2380", "http://host.example:1", "unix://localhost:2380", "unixs://sock:1"} {
		if err := CheckPeerURLs([]string{good}); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "127.0.0.1:2380", "http://127.0.0.1", "http://h:1/", "http://h:1/path", "http://h:1?q=1", "http://h:1#f",
		"http://u@h:1", "ftp://h:1", "http://[::1:2", "://", "unix://", "http://%zz:1"} {
		if err := CheckPeerURLs([]string{"http://ok:1", bad}); !errors.Is(err, ErrBadURL) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := CheckPeerURLs(nil); !errors.Is(err, ErrBadURL) {
		t.Errorf("no URL: %v", err)
	}
}

func TestFoundingChange(t *testing.T) {
	cc := AddChange(0, Member{ID: 5, PeerURLs: []string{"http://a:1"}, Name: "n1"})
	if cc.Id != nil || string(cc.GetContext()) != `{"id":5,"peerURLs":["http://a:1"],"name":"n1"}` {
		t.Errorf("founding change %v", cc)
	}
}

func TestOpenRefusals(t *testing.T) {
	row := func(t storage.Table, name string) []byte { return storage.RowKey(t, []byte(name)) }
	for name, kv := range map[string][2][]byte{
		"not json":        {row(storage.TableMember, "5"), []byte("x")},
		"other id":        {row(storage.TableMember, "5"), []byte(`{"id":6,"peerURLs":null}`)},
		"not hex":         {row(storage.TableMember, "zz"), []byte(`{"id":6,"peerURLs":null}`)},
		"removed not hex": {row(storage.TableMemberRemoved, "zz"), []byte("removed")},
		"downgrade":       {row(storage.TableCluster, rowDowngrade), []byte("x")},
		"newer cluster":   {row(storage.TableCluster, rowVersion), []byte("3.8.0")},
		"bad version":     {row(storage.TableCluster, rowVersion), []byte("3.8")},
	} {
		store, _ := open(t, vfs.NewMem(), Options{})
		b := store.NewBatch()
		b.Set(kv[0], kv[1])
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(store, Options{Version: "3.7.3"}); err == nil {
			t.Errorf("%s was read", name)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
	store, _ := open(t, vfs.NewMem(), Options{})
	if _, err := Open(store, Options{Version: "three"}); err == nil {
		t.Error("an own version of three was taken")
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestModel runs random changes against the rules written as plainly as the
// specification has them, with restarts.
func TestModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	fs, o := vfs.NewMem(), Options{MaxLearners: 2}
	store, table := open(t, fs, o)
	members, removed := map[uint64]Member{}, map[uint64]bool{}
	used := func(urls []string, but uint64) bool {
		for id, m := range members {
			for _, u := range urls {
				if id != but && slices.Contains(m.PeerURLs, u) {
					return true
				}
			}
		}
		return false
	}
	count := func(learner bool) (n int) {
		for _, m := range members {
			if m.IsLearner == learner {
				n++
			}
		}
		return n
	}
	seen := map[string]int{}
	nextID := uint64(1)
	for step := range 6000 {
		// IDs that never come back would run out, so their window moves on.
		id := nextID + rng.Uint64N(6)
		if list := table.Root().List(); len(list) > 0 && rng.IntN(2) == 0 {
			id = list[rng.IntN(len(list))].ID
		}
		if removed[id] && rng.IntN(4) == 0 {
			nextID++
		}
		urls := []string{fmt.Sprintf("http://h%d:1", rng.IntN(12))}
		m, exists := members[id]
		var cc *raftpb.ConfChange
		var want error
		var what string
		var do func()
		op := rng.IntN(5)
		if step/50%4 == 3 && rng.IntN(2) == 0 {
			op = 4 // the cluster shrinks
		}
		switch op {
		case 0, 1:
			added := Member{ID: id, PeerURLs: urls, IsLearner: rng.IntN(4) > 0}
			what, cc, do = "add", AddChange(1, added), func() { members[id] = added }
			switch {
			case removed[id]:
				want = ErrRemoved
			case exists:
				want = ErrExists
			case used(urls, 0):
				want = ErrPeerURLExists
			case added.IsLearner && count(true) >= 2:
				want = ErrTooManyLearners
			}
		case 2:
			what, cc, do = "promote", PromoteChange(1, id), func() { m.IsLearner = false; members[id] = m }
			switch {
			case removed[id]:
				want = ErrRemoved
			case !exists:
				want = ErrNotFound
			case !m.IsLearner:
				want = ErrNotLearner
			}
		case 3:
			what, cc, do = "update", UpdateChange(1, id, urls), func() { m.PeerURLs = urls; members[id] = m }
			switch {
			case removed[id]:
				want = ErrRemoved
			case !exists:
				want = ErrNotFound
			case used(urls, id):
				want = ErrPeerURLExists
			}
		case 4:
			what, cc, do = "remove", RemoveChange(1, id), func() { delete(members, id); removed[id] = true }
			switch {
			case removed[id]:
				want = ErrRemoved
			case !exists:
				want = ErrNotFound
			case !m.IsLearner && count(false) == 1:
				want = ErrLastVoter
			}
		}
		b := store.NewBatch()
		_, err := applyChange(t, table, b, cc)
		if !errors.Is(err, want) {
			t.Fatalf("%s %d: %v, want %v", what, id, err, want)
		}
		if err == nil {
			do()
			if rng.IntN(3) == 0 {
				if m, ok := members[id]; ok {
					m.Name, m.ClientURLs = "n", []string{"http://c"}
					members[id] = m
					if err := table.SetAttributes(b, &membershippb.ClusterMemberAttrSetRequest{Member_ID: id,
						MemberAttributes: &membershippb.Attributes{Name: "n", ClientUrls: []string{"http://c"}}}); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		seen[fmt.Sprintf("%s: %v", what, want)]++
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if rng.IntN(200) == 0 {
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			store, table = open(t, fs, o)
		}
		var list []Member
		for _, m := range table.Root().List() {
			list = append(list, *m)
		}
		var model []Member
		for _, m := range members {
			model = append(model, m)
		}
		slices.SortFunc(model, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
		if got, want := mustJSON(list), mustJSON(model); string(got) != string(want) {
			t.Fatalf("after %s %d:\n%s, want\n%s", what, id, got, want)
		}
		if table.Root().Removed(id) != removed[id] || len(table.Root().RemovedIDs()) != len(removed) {
			t.Fatalf("removed of %d is %v", id, table.Root().Removed(id))
		}
	}
	for what, errs := range map[string][]error{
		"add":     {nil, ErrRemoved, ErrExists, ErrPeerURLExists, ErrTooManyLearners},
		"promote": {nil, ErrRemoved, ErrNotFound, ErrNotLearner},
		"update":  {nil, ErrRemoved, ErrNotFound, ErrPeerURLExists},
		"remove":  {nil, ErrRemoved, ErrNotFound, ErrLastVoter},
	} {
		for _, err := range errs {
			if seen[fmt.Sprintf("%s: %v", what, err)] == 0 {
				t.Errorf("%s never ended in %v", what, err)
			}
		}
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

// FuzzContext: whatever stands in a change, it is judged, and what is accepted
// can be read back.
func FuzzContext(f *testing.F) {
	for _, cc := range []*raftpb.ConfChange{
		AddChange(1, Member{ID: 7, PeerURLs: []string{"http://a:1"}, IsLearner: true}),
		PromoteChange(1, 2), UpdateChange(1, 1, []string{"http://b:1"}), RemoveChange(1, 2),
	} {
		f.Add(int32(cc.GetType()), cc.GetNodeId(), cc.GetContext())
	}
	store, _ := open(f, vfs.NewMem(), Options{})
	f.Cleanup(func() {
		if err := store.Close(); err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, typ int32, id uint64, context []byte) {
		table, err := Open(store, Options{})
		if err != nil {
			t.Fatal(err)
		}
		b := store.NewBatch()
		defer b.Discard()
		for _, m := range []Member{{ID: 1, PeerURLs: []string{"http://x:1"}}, {ID: 2, PeerURLs: []string{"http://y:1"}, IsLearner: true}} {
			if _, err := table.ApplyConfChange(b, AddChange(1, m)); err != nil {
				t.Fatal(err)
			}
		}
		cc := change(1, raftpb.ConfChangeType(typ), id, context)
		forRaft, err := table.ApplyConfChange(b, cc)
		if (err == nil) != (forRaft.GetNodeId() == id && id != 0) {
			t.Fatalf("raft gets %v with %v", forRaft, err)
		}
		if voters, _ := table.Root().Count(); voters == 0 {
			t.Fatal("nobody votes")
		}
		for _, m := range table.Root().List() {
			var again Member
			if err := json.Unmarshal(mustJSON(m), &again); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestFingerprint: it tells every membership that a cluster can have from every
// other, and nothing but who is there and who was removed counts.
func TestFingerprint(t *testing.T) {
	store, table := open(t, vfs.NewMem(), Options{MaxLearners: 3})
	defer store.Close()
	b := store.NewBatch()
	seen := map[uint64]int{table.Root().Fingerprint(): -1}
	apply := func(cc *raftpb.ConfChange) {
		t.Helper()
		if _, err := table.ApplyConfChange(b, cc); err != nil {
			t.Fatal(err)
		}
	}
	url := func(id uint64) []string { return []string{fmt.Sprintf("http://127.0.0.1:%d", id)} }
	for i, cc := range []*raftpb.ConfChange{
		AddChange(0, Member{ID: 2, PeerURLs: url(2)}), AddChange(0, Member{ID: 1, PeerURLs: url(1)}), AddChange(0, Member{ID: 3, PeerURLs: url(3), IsLearner: true}),
		RemoveChange(0, 2), AddChange(0, Member{ID: 4, PeerURLs: url(4)}), RemoveChange(0, 1), RemoveChange(0, 3),
	} {
		apply(cc)
		if before, ok := seen[table.Root().Fingerprint()]; ok {
			t.Errorf("after change %d the fingerprint is that after %d", i, before)
		}
		seen[table.Root().Fingerprint()] = i
	}
	apply(AddChange(0, Member{ID: 5, PeerURLs: url(5), IsLearner: true}))
	before := table.Root().Fingerprint()
	apply(PromoteChange(0, 5))
	apply(UpdateChange(0, 5, url(6)))
	if err := table.SetAttributes(b, &membershippb.ClusterMemberAttrSetRequest{Member_ID: 5, MemberAttributes: &membershippb.Attributes{Name: "five"}}); err != nil {
		t.Fatal(err)
	}
	if table.Root().Fingerprint() != before {
		t.Error("role, URLs and name count")
	}
	if got, want := (&Root{members: []*Member{{ID: 1}, {ID: 2}}, removed: map[uint64]struct{}{3: {}}}).Fingerprint(), uint64(0xb7d03c4880209af9); got != want {
		t.Errorf("fingerprint %#x, all members must make the same %#x", got, want)
	}
	b.Discard()
}

// TestUnknownLevelOnDisk: a store that says more than this version knows is refused.
func TestUnknownLevelOnDisk(t *testing.T) {
	for _, row := range [][]byte{{0, 0, 0, 0, 0, 0, 0, FeatureLevel + 1}, {1}} {
		fs := vfs.NewMem()
		store, _ := open(t, fs, Options{})
		b := store.NewBatch()
		b.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaFeatureLevel)), row)
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(store, Options{}); err == nil || len(row) == 8 && !errors.Is(err, ErrFeatureLevel) {
			t.Errorf("row %x: %v", row, err)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
