package ctl

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"

	"github.com/engram-kv/engram/internal/inspectpb"
)

func newClient(t *testing.T, endpoint string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeClient(client) })
	return client
}

// TestDuWithoutEngram compares what du finds by etcd's own requests with what an Engram measures.
func TestDuWithoutEngram(t *testing.T) {
	client := newClient(t, startMember(t))
	rnd := rand.New(rand.NewPCG(11, 1))
	for range 150 {
		key := strings.Repeat("/", rnd.IntN(2))
		for range 1 + rnd.IntN(4) {
			key += []string{"a", "b/", "/", "\xff", "cc/"}[rnd.IntN(5)]
		}
		if key == "" {
			continue
		}
		if _, err := client.Put(t.Context(), key, "v"); err != nil {
			t.Fatal(err)
		}
	}
	tl := &tool{ctx: t.Context(), global: globalFlags{commandTimeout: 10 * time.Second}}
	lines := 0
	for range 100 {
		r := &inspectpb.UsageRequest{
			Prefix: []byte([]string{"", "/", "a", "b/", "\xff", "nothing"}[rnd.IntN(6)]), Delimiter: []byte([]string{"/", "a", "//"}[rnd.IntN(3)]), Depth: int32(1 + rnd.IntN(3)), Limit: int32(1 + rnd.IntN(8)),
		}
		want, err := tl.usage(client, r, int(r.Limit))
		if err != nil {
			t.Fatal(err)
		}
		got, err := countKeys(t.Context(), client, r, int(r.Limit))
		if err != nil {
			t.Fatal(err)
		}
		lines += len(got.Rows)
		for _, u := range []*duUsage{want, got} { // what etcd does not tell
			for i := range u.Rows {
				u.Rows[i].duMeasure = duMeasure{Keys: u.Rows[i].Keys}
			}
			u.Total, u.KeysOnly, u.Compact = duMeasure{Keys: u.Total.Keys}, false, 0
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%v:\n%+v\nwant\n%+v", r, got, want)
		}
	}
	if lines < 100 {
		t.Errorf("%d lines only", lines)
	}
}

// TestDuPrints has a store of known contents.
func TestDuPrints(t *testing.T) {
	endpoint := startMember(t)
	client := newClient(t, endpoint)
	for i := range 30 {
		if _, err := client.Put(t.Context(), fmt.Sprintf("/registry/%s/ns/%d", []string{"pods", "leases"}[i%2], i/10), strings.Repeat("v", 100)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.Put(t.Context(), "\x01", "v"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ args, want string }{
		{"du", `KEYS   LIVE  REVISIONS  HISTORY  PATH
   6  780 B         24   3.1 kB  /registry/
   1   12 B          0      0 B  "\x01"
   7  792 B         24   3.1 kB  (total at revision 32)
`},
		{"du /registry/ --sort=path --limit=1", `KEYS   LIVE  REVISIONS  HISTORY  PATH
   3  393 B         12   1.6 kB  /registry/leases/
   6  780 B         24   3.1 kB  (total at revision 32)
`},
		{"du --depth=3 --sort=keys --limit=1", `KEYS   LIVE  REVISIONS  HISTORY  PATH
   3  393 B         12   1.6 kB  /registry/leases/ns/
   4  399 B         12   1.5 kB  (2 others)
   7  792 B         24   3.1 kB  (total at revision 32)
`},
		{"du none", `KEYS  LIVE  REVISIONS  HISTORY  PATH
   0   0 B          0      0 B  (total at revision 32)
`},
	} {
		out, told, code := runTool(t, append([]string{"--endpoints=" + endpoint}, strings.Fields(c.args)...)...)
		if code != 0 || out != c.want {
			t.Errorf("%s: exit code %d\n%s%s", c.args, code, out, told)
		}
		if more := strings.Contains(told, "There are more paths"); more != strings.Contains(c.args, "sort=path") {
			t.Errorf("%s: %s", c.args, told)
		}
	}
	for _, c := range []struct {
		args string
		code int
		told string
	}{
		{"du a b", exitArguments, "at most one argument"},
		{"du --depth=0", exitArguments, "--depth is 0: give 1 or more"},
		{"du --limit=0", exitArguments, "--limit is 0"},
		{"du --delimiter=", exitArguments, "give --keys"},
		{"du --sort=size", exitFormat, `bad sort order "size"`},
		{"du -w table", exitFormat, "table not supported as output format"},
		{"top --interval=1ms", exitArguments, "--interval is 1ms: give 200ms or more"},
		{"top --depth=9 --once", exitFailed, "depth is 9: give 1 to 4"},
		{"doctor -w fields", exitFormat, "fields not supported as output format"},
	} {
		_, told, code := runTool(t, append([]string{"--endpoints=" + endpoint}, strings.Fields(c.args)...)...)
		if code != c.code || !strings.Contains(told, c.told) {
			t.Errorf("%s: exit code %d, %s", c.args, code, told)
		}
	}
}

// TestTopGoesOn asks again and again until it is told to stop.
func TestTopGoesOn(t *testing.T) {
	endpoint := startMember(t)
	client := newClient(t, endpoint)
	if _, err := client.Put(t.Context(), "/a/b/c", "v"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out, done := newBuffer(), make(chan int, 1)
	go func() {
		done <- Run(ctx, "engram ctl", []string{"--endpoints=" + endpoint, "top", "-w", "json", "--interval=200ms"}, Streams{In: strings.NewReader(""), Out: out, Err: out})
	}()
	out.waitFor(t, "}\n{")
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d", code)
	}
	first, _, _ := strings.Cut(out.String(), "\n")
	var a topAnswer
	if err := json.Unmarshal([]byte(first), &a); err != nil || len(a.Members) != 1 || len(a.Members[0].Prefixes) != 1 || a.Members[0].Prefixes[0].Name != "/a/b/" || a.Members[0].Sampling != 1 {
		t.Errorf("%v\n%s", err, first)
	}
}

// TestTopAsksOnce: the password that top is given for its many connections is asked for once.
func TestTopAsksOnce(t *testing.T) {
	var out, told bytes.Buffer
	code := Run(t.Context(), "engram ctl", []string{"--endpoints=" + startMember(t), "--user=root", "top", "--once"},
		Streams{In: strings.NewReader("secret\n"), Out: &out, Err: &told})
	if code != 0 || strings.Count(out.String(), "Password: ") != 1 {
		t.Errorf("exit code %d\n%s%s", code, &out, &told)
	}
}

// TestSnapshotSaveReadsEnvironmentOnce: what the environment says is warned of once.
func TestSnapshotSaveReadsEnvironmentOnce(t *testing.T) {
	var out, told bytes.Buffer
	code := Run(t.Context(), "engram ctl", []string{"snapshot", "save", filepath.Join(t.TempDir(), "b.db")},
		Streams{In: strings.NewReader(""), Out: &out, Err: &told, Env: []string{"ETCDCTL_ENDPOINTS=" + startMember(t), "ETCDCTL_NOTHING=1"}})
	if code != 0 || strings.Count(told.String(), "ETCDCTL_NOTHING") != 1 {
		t.Errorf("exit code %d\n%s%s", code, &out, &told)
	}
}

// TestTopSumsUp has two members' lists.
func TestTopSumsUp(t *testing.T) {
	a := topAnswer{Members: []topMember{
		{Endpoint: "a", Window: 10, Sampling: 1, topLists: topLists{Total: topRow{Reads: 3}, Prefixes: []topRow{{Name: "/x/", Reads: 2}, {Name: "/y/", Reads: 1, Bytes: 1 << 20}}}},
		{Endpoint: "b", Window: 8, Sampling: 4, topLists: topLists{Total: topRow{Writes: 20}, Prefixes: []topRow{{Name: "/x/", Writes: 20, Doubt: 0.6}}}},
		{Endpoint: "c", Error: "gone"},
	}}
	var out, told bytes.Buffer
	tl := &tool{err: &told, out: bufio.NewWriter(&out)}
	a.print(tl, 2)
	if err := tl.out.Flush(); err != nil {
		t.Fatal(err)
	}
	want := `2 members: 3 reads, 20 writes, 0 events, 0 B a second, over 10 s (estimated from one of 4)

READS/s  WRITES/s  EVENTS/s  BYTES/s  PREFIX
    1.0       0.0       0.0   1.0 MB  /y/
    2.0        20       0.0      0 B  ~/x/

READS/s  WRITES/s  EVENTS/s  BYTES/s  KEY

READS/s  WRITES/s  EVENTS/s  BYTES/s  CLIENT
`
	if out.String() != want || told.String() != "c does not answer: gone\n" {
		t.Errorf("%s%s", &out, &told)
	}
}

// TestDecode reads an object as Kubernetes stores it.
func TestDecode(t *testing.T) {
	endpoint := startMember(t)
	client := newClient(t, endpoint)
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	object := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"k": "v"}}
	var stored bytes.Buffer
	if err := protobuf.NewSerializer(scheme, scheme).Encode(object, &stored); err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{"/registry/configmaps/c": stored.String(), "/registry/crd/x": `{"kind":"X"}`, "/registry/plain": "as it is"} {
		if _, err := client.Put(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	const yaml = "apiVersion: v1\ndata:\n  k: v\nkind: ConfigMap\nmetadata:\n  name: c\n"
	for _, c := range []struct{ args, want string }{
		{"get --prefix /registry --decode", "/registry/configmaps/c\n" + yaml + "/registry/crd/x\n{\n  \"kind\": \"X\"\n}\n/registry/plain\nas it is\n"},
		{"get --prefix /registry --decode --print-value-only", yaml + "---\n{\n  \"kind\": \"X\"\n}\n---\nas it is\n"},
		{"get --prefix /registry --decode --stream", "/registry/configmaps/c\n" + yaml + "/registry/crd/x\n{\n  \"kind\": \"X\"\n}\n/registry/plain\nas it is\n"},
	} {
		if out, told, code := runTool(t, append([]string{"--endpoints=" + endpoint}, strings.Fields(c.args)...)...); code != 0 || out != c.want {
			t.Errorf("%s: exit code %d\n%s%s", c.args, code, out, told)
		}
	}
	for args, want := range map[string]string{"get a --decode -w json": "--decode is only for", "get a --decode --hex": "choose one", "watch a --decode -w json": "--decode is only for"} {
		if _, told, code := runTool(t, append([]string{"--endpoints=" + endpoint}, strings.Fields(args)...)...); code != exitArguments || !strings.Contains(told, want) {
			t.Errorf("%s: exit code %d, %s", args, code, told)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	out, done := newBuffer(), make(chan int, 1)
	go func() {
		done <- Run(ctx, "engram ctl", []string{"--endpoints=" + endpoint, "watch", "/registry/configmaps/c", "--rev=1", "--decode"}, Streams{In: strings.NewReader(""), Out: out, Err: out})
	}()
	out.waitFor(t, "PUT\n/registry/configmaps/c\n"+yaml)
	cancel()
	<-done
}
