package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// binary is the program under test, built once.
var binary string

func TestMain(m *testing.M) {
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func buildAndRun(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "engram-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	binary = filepath.Join(dir, "engram")
	if text, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		return 0, fmt.Errorf("go build: %w\n%s", err, text)
	}
	return m.Run(), nil
}

// command is a command whose environment configures nothing.
func command(t *testing.T, dir, program string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel) // kills it
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ETCD") || strings.HasPrefix(v, "ENGRAM") })
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// member is a running member and what it printed when it was ready, by the words at the start of the lines.
type member struct {
	t     *testing.T
	cmd   *exec.Cmd
	out   io.Reader // what follows the greeting
	log   *bytes.Buffer
	title string
	said  map[string]string
}

// greeted starts a member in a working directory and reads its greeting.
func greeted(t *testing.T, dir string, flags ...string) *member {
	t.Helper()
	m := &member{t: t, cmd: command(t, dir, binary, flags...), log: &bytes.Buffer{}, said: map[string]string{}}
	m.cmd.Stderr = m.log
	out, err := m.cmd.StdoutPipe()
	if err == nil {
		err = m.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if m.cmd.ProcessState == nil {
			_ = m.cmd.Process.Kill()
			_ = m.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("%s said on standard error:\n%s", binary, m.log)
		}
	})
	lines := bufio.NewReader(out)
	m.out = lines
	word := ""
	for word != "stop" {
		line, err := lines.ReadString('\n')
		if err != nil {
			_ = m.cmd.Wait()
			t.Fatalf("the greeting ends with %q, %v; the process: %v", line, err, m.cmd.ProcessState)
		}
		line = strings.TrimSuffix(line, "\n")
		switch {
		case m.title == "":
			m.title = line
		case strings.HasPrefix(line, "           "):
			m.said[word] += "\n" + strings.TrimSpace(line)
		default:
			var rest string
			word, rest, _ = strings.Cut(strings.TrimSpace(line), " ")
			m.said[word] = strings.TrimSpace(rest)
		}
	}
	return m
}

// end ends the member by a signal: it prints no more, and its status is 0.
func (m *member) end(by os.Signal) {
	m.t.Helper()
	if err := m.cmd.Process.Signal(by); err != nil {
		m.t.Fatal(err)
	}
	more, err := io.ReadAll(m.out)
	if err := errors.Join(err, m.cmd.Wait()); err != nil || len(more) > 0 {
		m.t.Fatalf("after %v: %v; it printed %q", by, err, more)
	}
}

// tries runs what the greeting says to type next, each by the program itself, and returns what that prints.
func (m *member) tries(dir string) (printed []string) {
	m.t.Helper()
	for line := range strings.Lines(m.said["try"]) {
		first, _, _ := strings.Cut(strings.TrimSpace(line), "     (or: ")
		words := strings.Fields(first)
		if len(words) < 2 || words[0] != "engram" || words[1] != "ctl" {
			m.t.Fatalf("the greeting says to type %q", line)
		}
		printed = append(printed, m.run(command(m.t, dir, binary, words[1:]...)))
	}
	return printed
}

func (m *member) run(cmd *exec.Cmd) string {
	m.t.Helper()
	text, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			text = append(text, exit.Stderr...)
		}
		m.t.Fatalf("%v: %v\n%s", cmd.Args, err, text)
	}
	return string(text)
}

var wantTries = []string{"OK\n", "greeting\nhello\n"}

// TestGreeting: a member says where it listens, where its data lies and what to type next, all of which is so; both signals end it with
// status 0, and it goes on where it was.
func TestGreeting(t *testing.T) {
	flags := []string{"--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0", "--listen-peer-urls=http://127.0.0.1:0"}
	dir := t.TempDir()
	m := greeted(t, dir, flags...)
	if !strings.HasPrefix(m.title, "Engram ") || !strings.HasSuffix(m.title, " is ready.") {
		t.Errorf("the greeting begins with %q", m.title)
	}
	for _, who := range []string{"clients", "peers"} {
		host, port, err := net.SplitHostPort(m.said[who])
		if err != nil || host != "127.0.0.1" || port == "0" {
			t.Errorf("%s at %q, %v", who, m.said[who], err)
			continue
		}
		c, err := net.Dial("tcp", m.said[who])
		if err != nil {
			t.Errorf("nobody listens for %s: %v", who, err)
			continue
		}
		_ = c.Close()
	}
	if m.said["clients"] == m.said["peers"] {
		t.Errorf("clients and peers at %s", m.said["peers"])
	}
	if want := filepath.Join(dir, "default.engram"); m.said["data"] != "default.engram" && m.said["data"] != want {
		t.Errorf("data in %q, want %q", m.said["data"], want)
	}
	if _, err := os.Stat(filepath.Join(dir, "default.engram", "IDENTITY")); err != nil {
		t.Error(err)
	}
	if got := m.tries(dir); !slices.Equal(got, wantTries) {
		t.Errorf("what is to be typed next prints %q, want %q", got, wantTries)
	}
	m.end(os.Interrupt)

	m = greeted(t, dir, flags...)
	get := command(t, dir, binary, "ctl", "--endpoints="+m.said["clients"], "get", "greeting")
	if got := m.run(get); got != wantTries[1] {
		t.Errorf("after a restart: %q", got)
	}
	m.end(syscall.SIGTERM)
}

// TestProcessors: a member has more of Go's processors than CPUs, unless the operator says how many.
func TestProcessors(t *testing.T) {
	processors := func(set string) (n int) {
		t.Helper()
		t.Setenv("GOMAXPROCS", set)
		m := greeted(t, t.TempDir(), "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0", "--listen-peer-urls=http://127.0.0.1:0")
		defer m.end(syscall.SIGTERM)
		resp, err := http.Get("http://" + m.said["clients"] + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		_, text, _ = bytes.Cut(text, []byte("\ngo_sched_gomaxprocs_threads "))
		if _, err := fmt.Sscan(string(text), &n); err != nil {
			t.Fatalf("go_sched_gomaxprocs_threads: %v", err)
		}
		return n
	}
	if set := processors("1"); set != 1 {
		t.Errorf("%d processors with GOMAXPROCS=1", set)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	runtime.SetDefaultGOMAXPROCS()
	if got, cpus := processors(""), runtime.GOMAXPROCS(0); got <= cpus {
		t.Errorf("%d processors for %d CPUs, want more", got, cpus)
	}
}

// TestSecondSignal: a member that takes its time to stop, for it cannot write its store any more, ends at once when it is told again.
func TestSecondSignal(t *testing.T) {
	dir := t.TempDir()
	m := greeted(t, dir, "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0", "--listen-peer-urls=http://127.0.0.1:0")
	m.tries(dir)
	if err := os.RemoveAll(filepath.Join(dir, "default.engram", "store")); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- m.cmd.Wait() }()
	again := time.NewTicker(10 * time.Millisecond) // it may not have taken note of the first one yet
	defer again.Stop()
	for running := true; running; {
		_ = m.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
			running = false
		case <-again.C:
		}
	}
	if status, ok := m.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v, want by the signal", m.cmd.ProcessState)
	}
}

// TestDefaults: without any configuration a member is on etcd's ports, and the tool finds it there without being told.
func TestDefaults(t *testing.T) {
	for _, address := range []string{"127.0.0.1:2379", "127.0.0.1:2380"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			const why = "the default ports are what this test is about: stop what listens there: %v"
			if os.Getenv("ENGRAM_CI") != "" {
				t.Fatalf(why, err)
			}
			t.Skipf("NOT TESTED: "+why, err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	m := greeted(t, dir)
	if m.said["clients"] != "127.0.0.1:2379" || m.said["peers"] != "127.0.0.1:2380" {
		t.Errorf("clients at %q, peers at %q", m.said["clients"], m.said["peers"])
	}
	if strings.Contains(m.said["try"], "--endpoints") {
		t.Errorf("the tool needs no address here: %s", m.said["try"])
	}
	if got := m.tries(dir); !slices.Equal(got, wantTries) {
		t.Errorf("what is to be typed next prints %q, want %q", got, wantTries)
	}
	_, other, _ := strings.Cut(m.said["try"], "(or: ")
	other, _, found := strings.Cut(other, ")")
	words := strings.Fields(other)
	if !found || len(words) < 4 || !slices.Equal(words[:3], []string{"go", "run", "./cmd/engram"}) {
		t.Fatalf("the other way to do that: %q", other)
	}
	if got := m.run(command(t, filepath.Join("..", ".."), words[0], words[1:]...)); got != wantTries[0] {
		t.Errorf("%s prints %q, want %q", other, got, wantTries[0])
	}
	m.end(os.Interrupt)
}

// TestEndpointFlags: the tool is told where to look unless it looks there by itself.
func TestEndpointFlags(t *testing.T) {
	for _, c := range []struct{ url, bound, want string }{
		{"http://localhost:2379", "127.0.0.1:2379", ""},
		{"http://0.0.0.0:2379", "[::]:2379", ""},
		{"http://0.0.0.0:4001", "0.0.0.0:4001", " --endpoints=127.0.0.1:4001"},
		{"http://localhost:2379", "[::1]:2379", " --endpoints=[::1]:2379"},
		{"http://10.0.0.1:2379", "10.0.0.1:2379", " --endpoints=10.0.0.1:2379"},
		{"https://10.0.0.1:2379", "10.0.0.1:2379", " --endpoints=https://10.0.0.1:2379 --cacert=FILE"},
		{"unix://run/engram", "run/engram", " --endpoints=unix://run/engram"},
	} {
		u, err := url.Parse(c.url)
		if err != nil {
			t.Fatal(err)
		}
		if got := endpointFlags(u, c.bound); got != c.want {
			t.Errorf("%s bound to %s: %q, want %q", c.url, c.bound, got, c.want)
		}
	}
}
