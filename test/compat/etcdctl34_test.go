package compat

import (
	"encoding/json"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/broken"
)

// foreign is the etcdctl of Debian's etcd-client, which nobody here built, against one server.
type foreign struct {
	t       *testing.T
	program string
	server  *process.Server
	trace   []string // every output, for the comparison of both servers
}

// TestEtcdctl34 uses a client some releases older than the server, as scripts of users do.
func TestEtcdctl34(t *testing.T) {
	t.Parallel() // it waits more than it works
	program, err := exec.LookPath("etcdctl")
	if err != nil {
		const text = "etcdctl is not installed: apt-get install etcd-client"
		if os.Getenv("ENGRAM_CI") != "" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	pair, err := process.StartPair(programs.Etcd, subject, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer pair.Close()
	var traces [2]string
	for i, name := range []string{"reference", "subject"} {
		t.Run(name, func(t *testing.T) {
			f := &foreign{t: t, program: program, server: pair[i].Server}
			f.versions()
			f.compaction()
			f.watch()
			f.lease()
			f.swap()
			traces[i] = strings.Join(f.trace, "\n")
		})
	}
	if traces[0] != traces[1] {
		t.Error(broken.Errorf("the outputs differ:\nreference:\n%s\nsubject:\n%s", traces[0], traces[1]))
	}
}

var ownNumbers = regexp.MustCompile(`"(cluster_id|member_id|raft_term|lease)":\d+`)

func (f *foreign) output(c process.Command) process.Output {
	f.t.Helper()
	c.Program, c.Args = []string{f.program}, append([]string{"--command-timeout=20s"}, c.Args...) // a busy machine is no difference
	c.Env = []string{"ETCDCTL_API=3", "ETCDCTL_ENDPOINTS=" + f.server.Endpoint()}
	o, err := c.Run()
	if err != nil {
		f.t.Fatal(err)
	}
	return o
}

// run runs a command that must succeed, and returns what it printed.
func (f *foreign) run(args ...string) string {
	f.t.Helper()
	return f.expect(0, process.Command{Args: args}).Stdout
}

func (f *foreign) expect(code int, c process.Command) process.Output {
	f.t.Helper()
	o := f.output(c)
	if o.Code != code {
		f.t.Fatalf("etcdctl %q: exit code %d, want %d; it printed:\n%s%s", c.Args, o.Code, code, o.Stdout, o.Stderr)
	}
	f.trace = append(f.trace, strings.Join(c.Args, " ")+"\n"+ownNumbers.ReplaceAllString(o.Stdout, `"$1":~`))
	return o
}

type getAnswer struct {
	Header struct {
		Revision int64
	}
	Kvs []struct {
		Key, Value     []byte
		CreateRevision int64 `json:"create_revision"`
		ModRevision    int64 `json:"mod_revision"`
		Version        int64
	}
	Count int64
}

func (f *foreign) get(args ...string) (a getAnswer) {
	f.t.Helper()
	text := f.run(append([]string{"get", "-w", "json"}, args...)...)
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		f.t.Fatalf("get %q answered %q: %v", args, text, err)
	}
	return a
}

func (f *foreign) versions() {
	for _, v := range []string{"one", "two", "three"} {
		f.run("put", "key", v)
	}
	a := f.get("key")
	if len(a.Kvs) != 1 {
		f.t.Fatalf("get answered %+v, want one key", a)
	}
	kv := a.Kvs[0]
	if kv.CreateRevision != 2 || kv.ModRevision != 4 || kv.Version != 3 || string(kv.Value) != "three" || a.Header.Revision != 4 {
		f.t.Errorf("after three puts get answered %+v, want create 2, mod 4, version 3, value three, revision 4", a)
	}
	if old := f.get("key", "--rev=3"); len(old.Kvs) != 1 || string(old.Kvs[0].Value) != "two" {
		f.t.Errorf("get at revision 3 answered %+v, want two", old)
	}
}

func (f *foreign) compaction() {
	f.run("compact", "4")
	o := f.expect(1, process.Command{Args: []string{"get", "key", "--rev=3"}})
	if want := "etcdserver: mvcc: required revision has been compacted"; !strings.Contains(o.Stderr, want) {
		f.t.Errorf("get at a compacted revision printed %q, want %q", o.Stderr, want)
	}
}

func (f *foreign) watch() {
	f.run("put", "key", "four")
	f.run("del", "key")
	f.run("put", "key", "five")
	o := f.expect(0, process.Command{Args: []string{"watch", "key", "--rev=4"}, Lines: 12})
	want := "PUT key three PUT key four DELETE key PUT key five"
	if got := strings.Join(strings.Fields(o.Stdout), " "); got != want {
		f.t.Errorf("watch from revision 4 printed %q, want %q", got, want)
	}
}

var leaseID = regexp.MustCompile(`lease ([0-9a-f]+) granted`)

func (f *foreign) lease() {
	granted := f.output(process.Command{Args: []string{"lease", "grant", "10"}}) // more than the puts take on a busy machine
	m := leaseID.FindStringSubmatch(granted.Stdout)
	if m == nil {
		f.t.Fatalf("lease grant printed %q%q", granted.Stdout, granted.Stderr)
	}
	for _, key := range []string{"leased/a", "leased/b"} {
		if o := f.output(process.Command{Args: []string{"put", key, "v", "--lease=" + m[1]}}); o.Code != 0 {
			f.t.Fatalf("put with a lease: %q", o.Stderr)
		}
	}
	first := f.get("leased/a").Kvs[0].ModRevision
	// The watch ends when the keys have gone: 2 puts of 3 lines, 2 deletions of 3 lines (their value is an empty line).
	o := f.expect(0, process.Command{Args: []string{"watch", "--prefix", "leased/", "--rev", itoa(first)}, Lines: 12})
	want := "PUT leased/a v PUT leased/b v DELETE leased/a DELETE leased/b"
	if got := strings.Join(strings.Fields(o.Stdout), " "); got != want {
		f.t.Errorf("while the lease expired watch printed %q, want %q", got, want)
	}
	if a := f.get("--prefix", "leased/"); a.Count != 0 {
		f.t.Errorf("after the lease expired get answered %+v, want nothing", a)
	}
	expired := f.output(process.Command{Args: []string{"lease", "timetolive", m[1]}})
	if !strings.Contains(expired.Stdout, "already expired") {
		f.t.Errorf("timetolive of an expired lease printed %q", expired.Stdout)
	}
}

func (f *foreign) swap() {
	f.run("put", "counter", "1")
	swap := process.Command{Args: []string{"txn"}, Stdin: "value(\"counter\") = \"1\"\n\nput counter 2\n\nget counter\n\n"}
	if o := f.expect(0, swap); !strings.HasPrefix(o.Stdout, "SUCCESS") {
		f.t.Errorf("the first swap printed %q, want SUCCESS", o.Stdout)
	}
	if o := f.expect(0, swap); !strings.HasPrefix(o.Stdout, "FAILURE") || !strings.Contains(o.Stdout, "counter\n2") {
		f.t.Errorf("the second swap printed %q, want FAILURE and the value 2", o.Stdout)
	}
}
