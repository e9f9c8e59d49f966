package play

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// binary is the program under test, built once.
var binary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "engram-play-test-")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "engram")
	if out, err := exec.Command("go", "build", "-o", path, "../cmd/engram").CombinedOutput(); err != nil {
		return path, fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "4"); err != nil { // they wait for elections, most of the time
		panic(err)
	}
	code := m.Run()
	if path, _ := binary(); path != "" {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// session is a play that a test types to.
type session struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	bytes chan byte
	all   strings.Builder // what was read
	tmp   string
}

func play(t *testing.T, args ...string) *session {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	s := &session{t: t, cmd: exec.Command(path, append([]string{"play"}, args...)...), bytes: make(chan byte, 1<<20), tmp: t.TempDir()}
	s.cmd.Env = append(os.Environ(), "TMPDIR="+s.tmp, "ETCD_NAME=not-ours")
	s.cmd.Stderr = os.Stderr
	if s.stdin, err = s.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(s.bytes)
		for in := bufio.NewReader(stdout); ; {
			b, err := in.ReadByte()
			if err != nil {
				return
			}
			s.bytes <- b
		}
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill() // if it has not ended yet
		_ = s.cmd.Wait()
	})
	s.answer()
	return s
}

// answer reads up to the next prompt, or the end of the output.
func (s *session) answer() string {
	s.t.Helper()
	var got strings.Builder
	limit := time.NewTimer(60 * time.Second)
	defer limit.Stop()
	for !strings.HasSuffix(got.String(), "\n"+prompt) {
		select {
		case b, ok := <-s.bytes:
			if !ok {
				return got.String()
			}
			got.WriteByte(b)
			s.all.WriteByte(b)
		case <-limit.C:
			s.t.Fatalf("no prompt comes:\n%s", s.all.String())
		}
	}
	return strings.TrimSuffix(got.String(), prompt)
}

// do types a command, whose answer must match the patterns; it returns the answer.
func (s *session) do(command string, patterns ...string) string {
	s.t.Helper()
	fmt.Fprintln(s.stdin, command)
	got := s.answer()
	for _, p := range patterns {
		if !regexp.MustCompile(p).MatchString(got) {
			s.t.Fatalf("%s: no %q in the answer; all of it:\n%s", command, p, s.all.String())
		}
	}
	return got
}

// until repeats a command until its answer matches.
func (s *session) until(command, pattern string) {
	s.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !regexp.MustCompile(pattern).MatchString(s.do(command)) {
		if time.Now().After(deadline) {
			s.t.Fatalf("%s: never %q; all of it:\n%s", command, pattern, s.all.String())
		}
	}
}

// end closes the input, and checks that nothing is left.
func (s *session) end(pids []int) {
	s.t.Helper()
	_ = s.stdin.Close()
	s.answer()
	if err := s.cmd.Wait(); err != nil {
		s.t.Errorf("play ended with %v:\n%s", err, s.all.String())
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, 0); err == nil {
			s.t.Errorf("process %d outlived play", pid)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(s.tmp, "*")); len(left) > 0 {
		s.t.Errorf("left behind: %v", left)
	}
}

// pids are the processes of the members: the children of play.
func (s *session) pids() []int {
	s.t.Helper()
	var pids []int
	for _, p := range processes(s.t) {
		if p.parent == s.cmd.Process.Pid {
			pids = append(pids, p.id)
		}
	}
	return pids
}

type family struct{ id, parent int }

// processes are all that run, by Linux's files or, elsewhere, by ps.
func processes(t *testing.T) []family {
	t.Helper()
	var all []family
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		text := string(b)
		var p family
		var state string
		name := strings.LastIndex(text, ")") // which may hold spaces and brackets
		if _, err := fmt.Sscan(text, &p.id); err != nil || name < 0 {
			t.Fatalf("%s: %q", path, b)
		}
		if _, err := fmt.Sscan(text[name+1:], &state, &p.parent); err != nil {
			t.Fatalf("%s: %q", path, b)
		}
		all = append(all, p)
	}
	if len(stats) > 0 {
		return all
	}
	out, err := exec.Command("ps", "-A", "-o", "pid=", "-o", "ppid=").Output()
	if err != nil {
		t.Fatalf("ps: %v", err)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		var p family
		if _, err := fmt.Sscan(line, &p.id, &p.parent); err != nil {
			t.Fatalf("ps says %q: %v", line, err)
		}
		all = append(all, p)
	}
	return all
}

// TestQuorum is the README's story: three members survive one loss, two losses stop what needs a majority and nothing else.
func TestQuorum(t *testing.T) {
	t.Parallel()
	s := play(t)
	s.do("put greeting hello  world", `OK: revision 2`)
	s.do("get greeting", `greeting = hello  world \(revision 2; linearizable`)
	s.do("status", `(?s)m1 +running.*m2 +running.*m3 +running`)
	pids := s.pids()
	if len(pids) != 3 {
		t.Fatalf("%d processes run, not 3:\n%s", len(pids), s.all.String())
	}
	s.do("kill leader", `m\d was killed`, `m\d leads now`, `2 of 3 voters up: a majority \(2\) answers, m\d leads; none more may be lost`)
	s.do("put greeting again", `OK: revision 3`)
	s.do("stop leader", `m\d has stopped`, `1 of 3 voters up: no majority \(2 needed\)`)
	// Without a majority both give up sooner than the ten seconds for which an election is waited for.
	s.do("put greeting lost", `put failed after [3-9]\.\d s`, `no majority: 1 of 3 voters up, a write needs 2; missing: m\d (killed|stopped), m\d (killed|stopped)`, `start m\d or start m\d`)
	s.do("get greeting", `get failed after [3-9]\.\d s`, `a linearizable read needs 2`)
	s.do("get greeting --serializable", `greeting = again \(revision 3; serializable read by m\d at revision 3`)
	down := regexp.MustCompile(`(?m)^(m\d) +(?:killed|stopped) +-`).FindAllStringSubmatch(s.do("status"), -1)
	if len(down) != 2 {
		t.Fatalf("status shows %d lost members, not 2:\n%s", len(down), s.all.String())
	}
	s.do("start "+down[0][1], `was started`, `2 of 3 voters up: a majority`, `answers after`)
	s.do("put greeting back", `OK: revision \d`)
	s.do("start "+down[1][1], `3 of 3 voters up: .* one more may be lost`)
	s.do("get greeting --at "+down[1][1], `greeting = back`)
	pids = append(pids, s.pids()...)
	s.end(pids)
}

// TestPartition pauses a leader and cuts one off: another leads, and the old one follows when it is back.
func TestPartition(t *testing.T) {
	t.Parallel()
	s := play(t)
	leads := regexp.MustCompile(`(m\d) +running +leader`)
	leader := leads.FindStringSubmatch(s.do("status"))[1]
	s.do("put k before", "OK")
	s.do("cut "+leader, `m\d leads now`, `2 of 3 voters up: a majority`)
	s.do("put k after", "OK: revision 3")
	s.do("get k --serializable --at "+leader, `k = before \(revision 2`)
	s.do("get k --at "+leader, `failed`, leader+" is cut off")
	s.do("put stray v --at "+leader, `failed`, "heal "+leader)
	s.do("status", leader+` +cut off +follower`, "no leader")
	s.do("heal "+leader, `3 of 3 voters up`)
	s.do("get k --at "+leader, `k = after`)
	if got := s.do("status", leader+` +running +follower`); len(leads.FindAllString(got, -1)) != 1 {
		t.Errorf("not one leader:\n%s", got)
	}

	leader = leads.FindStringSubmatch(s.do("status"))[1]
	s.do("pause leader", leader+` is frozen`, `m\d leads now`)
	s.do("put k paused", "OK")
	s.do("get k --at "+leader, "cannot answer: it is paused. Type resume")
	s.do("resume "+leader, `3 of 3 voters up`)
	s.do("get k --at "+leader, "k = paused")
	s.do("pause 1")
	s.do("cut 2", `1 of 3 voters up: no majority`)
	s.do("heal m2", `2 of 3 voters up: a majority`)
	pids := s.pids()
	s.end(pids) // with a member paused
}

// TestMembers adds a member, removes another, and moves the leader; then a load runs over the loss of the leader.
func TestMembers(t *testing.T) {
	t.Parallel()
	s := play(t, "--members=1")
	s.do("put k v", "OK")
	s.do("remove 1", "last member")
	s.do("add", "m2 was added as a learner", "m2 has caught up", "2 of 2 voters up: .* none more may be lost")
	s.until("get k --at 2", "k = v") // once m2 has heard itself that it votes
	s.do("add", "3 of 3 voters up: .* one more may be lost")
	leads := regexp.MustCompile(`m(\d) +running +leader`)
	leader, to := leads.FindStringSubmatch(s.do("status"))[1], "3"
	if leader == to { // it was elected meanwhile
		to = "2"
	}
	s.do("move-leader "+to, "m"+leader+" handed over to m"+to, "m"+to+" leads")
	s.do("load on 100", "100 small values")
	s.until("status", `load: 100 writes/s wanted, .* [1-9]\d* written`)
	s.do("kill 1", "2 of 3 voters up")
	s.do("load off", `The load is off: \d+ written`)
	s.do("remove 1", "m1 was removed", "2 of 2 voters up")
	left := regexp.MustCompile(`m(\d) leads`).FindStringSubmatch(
		s.do("remove leader", `m\d was removed .* It (heard of it and ended by itself|could not hear of it and was stopped)`, `m[23] leads`, "1 of 1 voter up"))[1]
	s.do("get k", "k = v .* by m"+left)
	s.do("status", `(?s)NAME.*\nm`+left+" ")
	s.do("start 1", `no member "1": name one of m`+left)
	s.do("add", "m4 was added", "2 of 2 voters")
	s.do("kill 4", "no majority")
	s.do("start 4", "2 of 2 voters up: a majority")
	s.end(s.pids())
}

// TestDirectory goes on with what an earlier play left, and leaves it there.
func TestDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "here")
	s := play(t, "--dir", dir, "--members=3")
	s.do("put k kept", "OK")
	s.do("remove 2", "m2 was removed")
	s.end(s.pids())
	s = play(t, "--dir", dir)
	s.do("get k", "k = kept")
	s.do("status", `m1 .*\nm3 .*\n2 of 2 voters`)
	pids := s.pids()
	fmt.Fprintln(s.stdin, "quit")
	s.end(pids)

	path, _ := binary()
	if out, err := exec.Command(path, "play", "--dir", dir, "--members", "4").CombinedOutput(); err == nil || !strings.Contains(string(out), "leave --members out") {
		t.Errorf("with another number of members: %v, %s", err, out)
	}
}

// TestSignals interrupts a play, and kills one: no member is left either way.
func TestSignals(t *testing.T) {
	t.Parallel()
	s := play(t, "--members=2")
	pids := s.pids()
	if err := s.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	s.end(pids)

	s = play(t, "--members=1")
	pids = s.pids()
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = s.cmd.Wait()
	for _, pid := range pids {
		for deadline := time.Now().Add(10 * time.Second); syscall.Kill(pid, 0) == nil; {
			if b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); strings.Contains(string(b), ") Z ") {
				break // dead, and nobody has collected it
			}
			if time.Now().After(deadline) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
				t.Fatalf("member process %d outlived a play that was killed", pid)
			}
		}
	}
}

// TestEndsByItself kills a member behind play's back.
func TestEndsByItself(t *testing.T) {
	t.Parallel()
	s := play(t, "--members=1")
	if err := syscall.Kill(s.pids()[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.until("status", `m1 +failed .*ended by itself: signal: killed`)
	s.do("put k v", `no member runs`, `start m1`)
	s.do("start 1", `1 of 1 voter up: a majority`)
	s.do("put k v", "OK")
	s.do("nonsense", "help lists them")
	s.do("kill", "to be typed as: kill N")
	s.do("help", `put K V +write`)
	s.end(s.pids())
}

func TestBadFlags(t *testing.T) {
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ flag, want string }{
		{"--members=0", "from 1 to 9"}, {"--members=10", "from 1 to 9"}, {"stray", "unknown command"}, {"--dir=/dev/null/x", "--dir"},
	} {
		out, err := exec.Command(path, "play", c.flag).CombinedOutput()
		if err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%s: %v, %s", c.flag, err, out)
		}
	}
}
