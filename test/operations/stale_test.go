package operations

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/cluster"
)

// TestStaleMember brings a member back that the cluster went on without: after the log was cut below what it has, on an old copy of its data, and after
// it was removed. The first needs nothing, the second is rebuilt by what the doctor says, the third ends.
func TestStaleMember(t *testing.T) {
	r := begin(t, 3, "--snapshot-count=100", "--snapshot-catchup-entries=50", "--log-level=debug")
	r.load()
	victim := r.c.Members()[1]
	asked := r.c.Members()[0].Endpoint()

	c := r.client()
	_, err := r.c.Settle(r.ctx)
	r.must(err)
	status, err := c.Status(r.ctx, victim.Endpoint())
	r.must(err)
	r.must(victim.Stop())
	if out, err := exec.Command("cp", "-a", victim.DataDir, victim.DataDir+".copy").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for i := range 300 {
		p, err := c.Put(r.ctx, fmt.Sprintf("later/%d", i), "x")
		r.must(err)
		if i == 250 { // history that it has, and nobody else has any more
			_, err = c.Compact(r.ctx, p.Header.Revision)
			r.must(err)
		}
	}
	for _, m := range r.c.Members() {
		if m != victim {
			r.awaitCut(c, m, status.RaftAppliedIndex+100) // it may have got some entries more before it stopped
		}
	}
	r.must(victim.Restart(r.ctx))
	_, err = r.c.Settle(r.ctx)
	r.must(err)
	if log := victim.Log(); !strings.Contains(log, "snapshot installed") {
		t.Fatalf("it came back without a snapshot: the log was not cut far enough for this test\n%s", log)
	}
	told := r.block("back", "10.0.0.1:2379", asked)
	if n := strings.Count(told, "3.7."); n < 3 {
		t.Errorf("the page's look at all members shows %d of them:\n%s", n, told)
	}
	_, err = r.c.CheckHash(r.ctx)
	r.must(err)

	r.must(victim.Stop())
	r.must(os.RemoveAll(victim.DataDir))
	r.must(os.Rename(victim.DataDir+".copy", victim.DataDir))
	r.endsWith(victim, "the log has lost what was acknowledged")
	r.rebuild(victim, r.shell(r.toldByDoctor(asked, "quorum", victim)))

	// The rebuilt process has ended with that. It is removed while it is down, and then started.
	var id string
	for line := range strings.Lines(r.typed("member", "list")) {
		if words := strings.Split(line, ", "); len(words) > 3 && words[2] == victim.Name {
			id = words[0]
		}
	}
	r.typed("member", "remove", id)
	r.endsWith(victim, "removed from the cluster")
	r.typed("put", "after", "x")
}

// awaitCut has a member make durable what it has, and waits until its log was cut above index.
func (r *rig) awaitCut(c *clientv3.Client, m *cluster.Member, index uint64) {
	r.Helper()
	_, err := c.Defragment(r.ctx, m.Endpoint())
	r.must(err)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		for line := range strings.Lines(m.Log()) {
			var cut struct {
				Msg   string
				Index uint64
			}
			if json.Unmarshal([]byte(line), &cut) == nil && cut.Msg == "raft log cut" && cut.Index > index {
				return
			}
		}
		if time.Now().After(deadline) {
			r.Fatalf("the log of %s was not cut above index %d:\n%s", m.Name, index, m.LogTail())
		}
	}
}

// endsWith starts a member that must end by itself, and say why.
func (r *rig) endsWith(m *cluster.Member, why string) {
	r.Helper()
	r.must(m.Spawn())
	select {
	case <-m.Exited():
	case <-time.After(time.Minute):
		r.Fatalf("it runs:\n%s", m.LogTail())
	}
	if log := m.LogTail(); !strings.Contains(log, why) {
		r.Fatalf("its log does not say %q:\n%s", why, log)
	}
	text, err := os.ReadFile(operations)
	r.must(err)
	if !strings.Contains(string(text), why) {
		r.Errorf("the page does not have what it says: %s", why)
	}
}
