package operations

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/cluster"
)

// TestRebuild rebuilds a member whose data went bad, by the command of the page, and by the one that the doctor tells when it sees the alarm.
func TestRebuild(t *testing.T) {
	for _, by := range []string{"page", "doctor"} {
		t.Run(by, func(t *testing.T) {
			r := begin(t, 3, "--corrupt-check-time=1s", "--feature-gates=InitialCorruptCheck=false")
			r.load()
			victim := r.c.Members()[1]
			r.badMember(victim)
			r.must(victim.Restart(r.ctx))
			r.alarms(fmt.Sprintf("memberID:%d", victim.ID))
			others := r.others(victim)
			if by == "page" {
				r.rebuild(victim, r.blockCommand("rebuild", "10.0.0.1:2379,10.0.0.2:2379", strings.Join(others, ","), "/var/lib/engram", victim.DataDir, "m3", victim.Name))
			} else {
				r.rebuild(victim, r.shell(r.toldByDoctor(others[0], "corrupt", victim)))
			}
			r.alarms("")
		})
	}
}

// TestRebuildAfterDamage rebuilds a member whose files are damaged, by the command that `engram util verify` tells.
func TestRebuildAfterDamage(t *testing.T) {
	r := begin(t, 3)
	r.load()
	victim := r.c.Members()[1]
	r.must(victim.Stop())
	tables, err := filepath.Glob(filepath.Join(victim.DataDir, "store", "*.sst"))
	r.must(err)
	if len(tables) == 0 {
		t.Fatal("the store has no tables")
	}
	for _, path := range tables {
		b, err := os.ReadFile(path)
		r.must(err)
		b[len(b)/3] ^= 1
		r.must(os.WriteFile(path, b, 0o600))
	}
	told, _, err := r.typeBlock("verify", "/var/lib/engram", victim.DataDir)
	if err == nil || !strings.Contains(told, "DAMAGED: ") {
		t.Fatalf("verify: %v\n%s", err, told)
	}
	command := regexp.MustCompile("`(engram ctl [^`]* rebuild [^`]*)`").FindStringSubmatch(told)
	if command == nil {
		t.Fatalf("verify names no command:\n%s", told)
	}
	r.rebuild(victim, r.shell(strings.ReplaceAll(command[1], "<other members>", strings.Join(r.others(victim), ","))))
}

func (r *rig) others(but *cluster.Member) (endpoints []string) {
	for _, m := range r.c.Members() {
		if m != but {
			endpoints = append(endpoints, m.Endpoint())
		}
	}
	return endpoints
}

// toldByDoctor is the command with which the doctor cures what a check found, which is to rebuild that member.
func (r *rig) toldByDoctor(endpoint, check string, bad *cluster.Member) string {
	r.Helper()
	out, errs, _ := r.run(r.p.Path, "ctl", "--endpoints="+endpoint, "doctor", "-w", "json") // its exit code says how bad it is
	var answer struct {
		Findings []struct{ Check, Cure string }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		r.Fatalf("%v in %s%s", err, out, errs)
	}
	for _, f := range answer.Findings {
		if f.Check == check {
			if command := regexp.MustCompile(fmt.Sprintf("`(engram ctl [^`]* rebuild %x)`", bad.ID)).FindStringSubmatch(f.Cure); command != nil {
				return command[1] + " --data-dir " + bad.DataDir
			}
		}
	}
	r.Fatalf("the doctor names no command under %q for member %x: %s", check, bad.ID, out)
	return ""
}

// rebuild runs a command line of `ctl rebuild`, answers yes, and does what it shows: the member's directory is moved aside and
// the very command is run. At the end the member has what the others have, and votes.
func (r *rig) rebuild(victim *cluster.Member, ctl *exec.Cmd) {
	r.Helper()
	ctl.Stdin = strings.NewReader("yes\n")
	var told strings.Builder
	ctl.Stderr = &told
	out, err := ctl.StdoutPipe()
	r.must(err)
	r.must(ctl.Start())

	// What is shown is what is typed on the member's host, when its process has ended.
	var shown []string
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		shown = append(shown, lines.Text())
		if strings.Contains(lines.Text(), "with all other flags as before") {
			break
		}
	}
	text := strings.Join(shown, "\n")
	select {
	case <-victim.Exited():
	case <-time.After(time.Minute):
		r.Fatalf("the removed member runs; rebuild said:\n%s\n%s", text, told.String())
	}
	move := regexp.MustCompile(`(?m)^  mv (\S+) (\S+)$`).FindStringSubmatch(text)
	start := regexp.MustCompile(`(?ms)^  engram (.*?)\n\n`).FindStringSubmatch(text + "\n\n")
	if move == nil || start == nil {
		_ = ctl.Wait() // told is whole then
		r.Fatalf("rebuild showed no commands:\n%s\n%s", text, told.String())
	}
	r.must(os.Rename(move[1], move[2]))
	end := r.startMember(victim, strings.Fields(strings.ReplaceAll(start[1], "\\\n", " ")), nil)
	defer end()

	rest, err := io.ReadAll(out)
	r.must(err)
	if err := ctl.Wait(); err != nil {
		logged, _ := os.ReadFile(victim.DataDir + ".log")
		r.Fatalf("rebuild: %v\n%s%s\n%s\nthe member:\n%s", err, text, rest, told.String(), logged)
	}
	if !strings.Contains(string(rest), "is rebuilt") {
		r.Fatalf("rebuild ended with %s", rest)
	}
	if got, errs, err := r.run(r.ctl, "--endpoints="+victim.Endpoint(), "get", "victim", "--print-value-only"); err != nil || strings.TrimSpace(got) != strings.Repeat("w", 500) {
		r.Fatalf("the rebuilt member has %q, %v %s", got, err, errs)
	}
	if list := r.typed("member", "list"); strings.Count(list, "started") != 3 || strings.Contains(list, "true") {
		r.Fatalf("members:\n%s", list)
	}
	r.typed("put", "after", "x")
}

// startMember starts the program as an operator does who was told flags, or variables of the environment; what a member listens on it has from
// its flags before.
func (r *rig) startMember(m *cluster.Member, flags, env []string) (end func()) {
	r.Helper()
	log, err := os.Create(m.DataDir + ".log")
	r.must(err)
	member := exec.Command(r.p.Path, append(flags, "--listen-client-urls="+m.ClientURL, "--advertise-client-urls="+m.ClientURL, "--listen-peer-urls="+m.PeerURL)...)
	member.Stdout, member.Stderr, member.Env = log, log, append(os.Environ(), env...)
	r.must(member.Start())
	ended := make(chan error, 1)
	go func() { ended <- member.Wait() }()
	return func() {
		_ = member.Process.Signal(os.Interrupt)
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			_ = member.Process.Kill()
		}
		_ = log.Close()
	}
}

// TestRebuildRefuses what the cluster would not survive, and changes nothing.
func TestRebuildRefuses(t *testing.T) {
	r := begin(t, 3)
	members := r.c.Members()
	rebuild := func(in string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(r.ctx, r.p.Path, append([]string{"ctl", "--endpoints=" + strings.Join(r.endpoints(), ","), "rebuild", "--anew"}, args...)...)
		cmd.Stdin = strings.NewReader(in)
		text, err := cmd.CombinedOutput()
		if err == nil {
			t.Fatalf("rebuild %v: %s", args, text)
		}
		return string(text)
	}
	for _, c := range []struct{ in, which, want string }{
		{"yes\n", "nobody", "there is no member"},
		{"no\n", members[0].Name, "the answer was not yes"},
		{"", members[0].Name, "--yes"},
	} {
		if got := rebuild(c.in, c.which); !strings.Contains(got, c.want) {
			t.Errorf("rebuild %s: %s, want %q", c.which, got, c.want)
		}
	}
	// One is away: without another there is no quorum.
	r.must(members[2].Stop())
	if got := rebuild("yes\n", members[1].Name); !strings.Contains(got, "2 are needed") {
		t.Errorf("without a quorum: %s", got)
	}
	if list := r.typed("member", "list"); strings.Count(list, "started") != 3 {
		t.Fatalf("members were changed:\n%s", list)
	}
}
