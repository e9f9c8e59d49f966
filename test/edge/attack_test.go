package edge

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/authority"
	"github.com/engram-kv/engram/test/internal/race"
)

const (
	attackVariable = "EDGE_ATTACK" // an order, as JSON
	attackWithin   = time.Minute
	attackNice     = 15
)

// attack is something that a hostile client does.
type attack struct {
	name string
	tls  bool
	// conns is how many connections attack at a time.
	conns int
	// once attacks on one connection until it ends, or there is nothing left to do. It calls spend for each thing that it
	// does, and stops when that returns false. What it counts is told in the end.
	once func(dial func() (*rough, error), spend func() bool, count func(what string)) error
	// things is how many are done altogether, in the short and in the long version.
	short, long int

	memory int64         // bytes that the member may hold more at any time; 0: slack alone
	cpu    time.Duration // that one thing may cost the member
	reason string        // under which the member counts it; empty if that is no limit's business
	metric string        // which counts each thing, where no limit counts that there are many
}

// order is what a process that attacks is told.
type order struct {
	Name, Address, Authority string
	Things                   int64
}

// outcome is what it says in the end.
type outcome struct {
	Connections int64
	Left        int64
	Counts      map[string]int
	Error       string
}

func TestMain(m *testing.M) {
	text := os.Getenv(attackVariable)
	if text == "" {
		os.Exit(race.Main(m.Run))
	}
	var o order
	err := json.Unmarshal([]byte(text), &o)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(carryOut(o))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// carryOut attacks.
func carryOut(o order) outcome {
	a := attacks()[o.Name]
	var c *tls.Config
	if a.tls {
		var err error
		if c, err = authority.Client(o.Authority); err != nil {
			return outcome{Error: err.Error()}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), attackWithin)
	defer cancel()
	dial := func() (*rough, error) { return roughly(ctx, o.Address, c, greedy...) }
	var left, ended atomic.Int64
	var failed atomic.Pointer[string]
	left.Store(o.Things)
	var attackers sync.WaitGroup
	var counting sync.Mutex
	counts := map[string]int{}
	count := func(what string) {
		counting.Lock()
		counts[what]++
		counting.Unlock()
	}
	for range a.conns {
		attackers.Go(func() {
			for left.Load() > 0 && ctx.Err() == nil && failed.Load() == nil {
				if err := a.once(dial, func() bool { return left.Add(-1) >= 0 }, count); err != nil && !refused(err) && ctx.Err() == nil {
					text := err.Error()
					failed.Store(&text)
				}
				ended.Add(1)
			}
		})
	}
	attackers.Wait()
	out := outcome{Connections: ended.Load(), Left: max(0, left.Load()), Counts: counts}
	if text := failed.Load(); text != nil {
		out.Error = *text
	}
	return out
}

// attacks are all that a process may be ordered to do.
func attacks() map[string]attack {
	all := map[string]attack{}
	for _, a := range append(floods(), lists()...) {
		all[a.name] = a
	}
	return all
}

// perThing has a judge check what each of n things cost the member.
func perThing(t testing.TB, n int64, most time.Duration) func(time.Duration) {
	return func(spent time.Duration) {
		t.Helper()
		each := spent / time.Duration(max(1, n))
		t.Logf("%v of CPU for each of %d", each, n)
		if each > most && !race.On() { // which makes all of it dearer
			t.Errorf("each of %d things cost the member %v of CPU, at most %v is in order", n, each, most)
		}
	}
}

// bear runs an attack and checks what it costs. The attacker is a process of its own that yields to others: it stands for
// another machine, and shall not take the time of this one's. It returns what the attacker has counted.
func (b *battle) bear(t *testing.T, a attack) (counts map[string]int) {
	t.Helper()
	o := order{Name: a.name, Address: b.Clear, Authority: b.Authority.File, Things: int64(a.short)}
	if member.Long() {
		o.Things = int64(a.long)
	}
	if a.tls {
		o.Address = b.TLS
	}
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), attackVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	w := b.watch(t)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setpriority(syscall.PRIO_PROCESS, cmd.Process.Pid, attackNice); err != nil {
		t.Error(err)
	}
	var got outcome
	err = json.NewDecoder(stdout).Decode(&got)
	if end := cmd.Wait(); err == nil {
		err = end
	}
	if err != nil {
		t.Fatalf("the attacker: %v", err)
	}
	if got.Error != "" || got.Left > 0 {
		t.Errorf("the attack has not ended, %d of %d things are left: %s", got.Left, o.Things, got.Error)
	}
	t.Logf("%d things on %d connections", o.Things, got.Connections)
	w.judge(t, a.memory, a.reason, perThing(t, o.Things, a.cpu))
	if a.metric != "" {
		w.counted(t, a.metric, float64(o.Things))
	}
	return got.Counts
}
