package ctl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/server"
)

// buffer is a bytes.Buffer that may be written to and read at once, and can be waited for.
type buffer struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{}
}

func newBuffer() *buffer { return &buffer{changed: make(chan struct{}, 1)} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case b.changed <- struct{}{}:
	default:
	}
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// waitFor returns once text was written.
func (b *buffer) waitFor(t *testing.T, text string) {
	t.Helper()
	timeout := time.After(time.Minute)
	for !strings.Contains(b.String(), text) {
		select {
		case <-b.changed:
		case <-timeout:
			t.Fatalf("%q was not printed; there is:\n%s", text, b)
		}
	}
}

// startMember starts a member and returns its endpoint. It ends with the test.
func startMember(t *testing.T) string {
	t.Helper()
	endpoint, stop := startMemberOn(t, filepath.Join(t.TempDir(), "data"), "http://127.0.0.1:0")
	t.Cleanup(stop)
	return endpoint
}

// startMemberOn starts a member on a directory, which listens there, and returns its endpoint, and what stops it.
func startMemberOn(t *testing.T, dir, clientURL string) (endpoint string, stop func()) {
	t.Helper()
	endpoint, stop, err := openMember(t, "--name=one", "--data-dir="+dir, "--listen-client-urls="+clientURL, "--advertise-client-urls="+clientURL,
		"--listen-peer-urls=http://127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return endpoint, stop
}

// openMember starts a member with flags.
func openMember(t *testing.T, flags ...string) (endpoint string, stop func(), err error) {
	t.Helper()
	cfg, err := config.Parse("engram", append(flags, "--listen-metrics-urls=http://127.0.0.1:0"), nil)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m, err := server.Start(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return "", nil, err
	}
	return m.ClientAddrs()[0], func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := m.Wait(ctx); err != nil {
			t.Error(err)
		}
	}, nil
}

var (
	ownIDs   = regexp.MustCompile(`\b[0-9a-f]{14,20}\b`)
	ownTimes = regexp.MustCompile(`\b[0-9.]+(ms|µs|s)\b`)
)

// TestCommands runs command lines against a member, each under "run"; a line "input:" is followed by the tool's input, in
// which "." stands for an empty line. Words are split as in a transaction. $endpoint is the member's, $lease the lease granted last; IDs and durations are masked.
func TestCommands(t *testing.T) {
	endpoint := startMember(t)
	lease := ""
	datadriven.RunTest(t, "testdata/commands.txt", func(t *testing.T, d *datadriven.TestData) string {
		command, input, _ := strings.Cut(d.Input, "\ninput:\n")
		command = strings.NewReplacer("$endpoint", endpoint, "$lease", lease).Replace(command)
		var lines strings.Builder
		for line := range strings.Lines(input) {
			if line = strings.TrimSuffix(line, "\n"); line != "." {
				lines.WriteString(line)
			}
			lines.WriteString("\n")
		}
		words, err := splitWords(command)
		if err != nil {
			t.Fatal(err)
		}
		env := []string{"PATH=/usr/bin:/bin"}
		for len(words) > 0 && strings.Contains(words[0], "=") { // variables before the command, as in a shell
			env, words = append(env, words[0]), words[1:]
		}
		if !strings.Contains(command, "ndpoints=") && !strings.Contains(command, "ENDPOINTS=") {
			words = append([]string{"--endpoints=" + endpoint}, words...)
		}
		if !strings.Contains(command, "command-timeout") && !strings.Contains(command, "COMMAND_TIMEOUT") {
			words = append([]string{"--command-timeout=20s"}, words...) // a busy machine is no difference
		}
		var out, errors bytes.Buffer
		code := Run(t.Context(), "etcdctl", words, Streams{In: strings.NewReader(lines.String()), Out: &out, Err: &errors, Env: env})
		if id, ok := strings.CutPrefix(out.String(), "lease "); ok {
			lease, _, _ = strings.Cut(id, " ")
		}
		var b strings.Builder
		b.Write(out.Bytes())
		for line := range strings.Lines(errors.String()) {
			if !strings.HasPrefix(line, "{") || strings.Contains(line, "environment variable") {
				b.WriteString("stderr: " + line)
			}
		}
		if code != 0 {
			fmt.Fprintf(&b, "exit code %d\n", code)
		}
		text := strings.ReplaceAll(b.String(), endpoint, "$endpoint")
		text = regexp.MustCompile(`"ts":"[^"]*"`).ReplaceAllString(text, `"ts":"~"`)
		return ownTimes.ReplaceAllString(ownIDs.ReplaceAllString(text, "~"), "~")
	})
}

// start runs a command line in the background, until stop is called, which returns the exit code.
func start(t *testing.T, in io.Reader, env []string, args ...string) (out, errors *buffer, stop func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, errors, end := startUntil(t, ctx, in, env, args...)
	return out, errors, func() int {
		cancel()
		return end()
	}
}

// startUntil runs a command line in the background. end waits until it ends, for it was told to by ctx or by itself, and returns the exit code.
func startUntil(t *testing.T, ctx context.Context, in io.Reader, env []string, args ...string) (out, errors *buffer, end func() int) {
	t.Helper()
	out, errors = newBuffer(), newBuffer()
	code := make(chan int, 1)
	go func() { code <- Run(ctx, "etcdctl", args, Streams{In: in, Out: out, Err: errors, Env: env}) }()
	return out, errors, func() int {
		select {
		case c := <-code:
			return c
		case <-time.After(time.Minute):
			t.Fatalf("%q does not end; it printed:\n%s%s", args, out, errors)
			return -1
		}
	}
}

func mustRun(t *testing.T, endpoint string, args ...string) string {
	t.Helper()
	var out, errors bytes.Buffer
	s := Streams{In: strings.NewReader(""), Out: &out, Err: &errors}
	if code := Run(t.Context(), "etcdctl", append([]string{"--endpoints=" + endpoint}, args...), s); code != 0 {
		t.Fatalf("%q: exit code %d\n%s%s", args, code, &out, &errors)
	}
	return out.String()
}

func TestWatchFollows(t *testing.T) {
	endpoint := startMember(t)
	mustRun(t, endpoint, "put", "a", "0")
	out, _, stop := start(t, strings.NewReader(""), []string{"PATH=/usr/bin:/bin"}, "--endpoints="+endpoint, "watch", "a", "--rev=2", "--prev-kv", "--",
		"sh", "-c", "echo $ETCD_WATCH_REVISION $ETCD_WATCH_EVENT_TYPE $ETCD_WATCH_KEY $ETCD_WATCH_VALUE")
	out.waitFor(t, "PUT\na\n0\n2 \"PUT\" \"a\" \"0\"\n")
	mustRun(t, endpoint, "put", "a", "1")
	out.waitFor(t, "PUT\na\n0\na\n1\n3 \"PUT\" \"a\" \"1\"\n")
	mustRun(t, endpoint, "del", "a")
	out.waitFor(t, "DELETE\na\n1\na\n\n4 \"DELETE\" \"a\" \"\"\n")
	if code := stop(); code != 0 {
		t.Errorf("ended with exit code %d, want 0", code)
	}
}

func TestWatchInteractive(t *testing.T) {
	endpoint := startMember(t)
	mustRun(t, endpoint, "put", "a", "1")
	mustRun(t, endpoint, "put", "b", "2")
	in, lines := io.Pipe()
	out, errors, stop := start(t, in, nil, "--endpoints="+endpoint, "watch", "-i")
	for _, step := range []struct{ line, out, err string }{
		{"watch a --rev 2", "PUT\na\n1\n", ""},
		{"watch b --rev 2 -- echo ran", "PUT\nb\n2\nran\n", ""},
		{"bogus", "", "Invalid command bogus (only support watch)\n"},
		{"progress", "progress notify: 3\n", ""},
	} {
		if _, err := io.WriteString(lines, step.line+"\n"); err != nil {
			t.Fatal(err)
		}
		out.waitFor(t, step.out)
		errors.waitFor(t, step.err)
	}
	if err := lines.Close(); err != nil {
		t.Fatal(err)
	}
	errors.waitFor(t, "Error: error reading watch request line: EOF\n")
	if code := stop(); code != exitInput {
		t.Errorf("ended with exit code %d, want %d", code, exitInput)
	}
}

// TestServerLost stops the member under commands that last. A watch waits for it and goes on; what depends on a lease ends with that, who waits for
// a lock included.
func TestServerLost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	endpoint, stopMember := startMemberOn(t, dir, "http://127.0.0.1:0")
	lease := strings.Fields(mustRun(t, endpoint, "lease", "grant", "2"))[1]
	begin := func(args ...string) (out, errors *buffer, end func() int) {
		return startUntil(t, t.Context(), strings.NewReader(""), nil, append([]string{"--endpoints=" + endpoint, "--command-timeout=1s", "--dial-timeout=1s"}, args...)...)
	}
	alive, aliveErrors, endAlive := begin("lease", "keep-alive", lease)
	alive.waitFor(t, "keepalived")
	holder, holderErrors, endHolder := begin("lock", "l", "--ttl=2")
	holder.waitFor(t, "l/")
	_, waiterErrors, endWaiter := begin("lock", "l", "--ttl=2")
	for strings.Count(mustRun(t, endpoint, "get", "l/", "--prefix", "--keys-only"), "l/") < 2 { // the waiter waits
		time.Sleep(time.Millisecond)
	}
	interactive, lines := io.Pipe()
	defer func() { _ = lines.Close() }()
	watch, watchErrors, stopWatch := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "watch", "a", "--rev=1")
	several, severalErrors, stopSeveral := start(t, interactive, nil, "--endpoints="+endpoint, "watch", "-i")
	if _, err := io.WriteString(lines, "watch a --rev=1\n"); err != nil {
		t.Fatal(err)
	}
	mustRun(t, endpoint, "put", "a", "0")
	watch.waitFor(t, "PUT\na\n0\n")
	several.waitFor(t, "PUT\na\n0\n")

	stopMember()
	for _, told := range []*buffer{watchErrors, severalErrors} {
		told.waitFor(t, "The connection is lost: trying again until a member answers.\n")
		told.waitFor(t, "Hint: nothing listens at "+endpoint+": connection refused")
	}
	if code := endAlive(); code != exitConnection || strings.Contains(alive.String(), "expired") || !strings.Contains(aliveErrors.String(), "Hint: nothing listens at "+endpoint) {
		t.Errorf("keep-alive: exit code %d\n%s%s", code, alive, aliveErrors)
	}
	for name, c := range map[string]struct {
		told *buffer
		end  func() int
	}{"who holds the lock": {holderErrors, endHolder}, "who waits for it": {waiterErrors, endWaiter}} {
		if code := c.end(); code != exitFailed || !strings.Contains(c.told.String(), "Error: session expired\nHint: nothing listens at "+endpoint) {
			t.Errorf("%s: exit code %d\n%s", name, code, c.told)
		}
	}

	again, stopMember := startMemberOn(t, dir, "http://"+endpoint)
	defer stopMember()
	if again != endpoint {
		t.Fatalf("the member is at %s, it was at %s", again, endpoint)
	}
	mustRun(t, endpoint, "put", "a", "1")
	for _, w := range []struct {
		out, told *buffer
		stop      func() int
	}{{watch, watchErrors, stopWatch}, {several, severalErrors, stopSeveral}} {
		w.told.waitFor(t, "The connection is back.\n")
		w.out.waitFor(t, "PUT\na\n1\n")
		if code := w.stop(); code != 0 {
			t.Errorf("the watch ended with exit code %d:\n%s", code, w.told)
		}
	}
}

func TestLockIsHeldAndGivenUp(t *testing.T) {
	endpoint := startMember(t)
	first, _, stopFirst := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "lock", "l")
	first.waitFor(t, "l/")
	second, _, stopSecond := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "lock", "l")
	third, errors, stopThird := start(t, strings.NewReader(""), []string{"PATH=/usr/bin:/bin"}, "--endpoints="+endpoint, "lock", "l", "--",
		"sh", "-c", `echo "$ETCD_LOCK_KEY" | cut -d/ -f1; exit 7`)
	if code := stopFirst(); code != 0 {
		t.Errorf("the first holder ended with exit code %d, want 0", code)
	}
	// Which of the two waiting gets it next is open; the third ends by itself.
	second.waitFor(t, "l/")
	if code := stopSecond(); code != 0 {
		t.Errorf("the second holder ended with exit code %d, want 0", code)
	}
	third.waitFor(t, "l\n")
	errors.waitFor(t, "Error: exit status 7\n")
	if code := stopThird(); code != 7 {
		t.Errorf("the lock around a command ended with exit code %d, want the command's 7", code)
	}
	if left := mustRun(t, endpoint, "get", "l/", "--prefix"); left != "" {
		t.Errorf("after the locks there is still %q", left)
	}
}

func TestElection(t *testing.T) {
	endpoint := startMember(t)
	leader, _, stopLeader := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "elect", "e", "first")
	leader.waitFor(t, "first\n")
	listener, _, stopListener := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "elect", "-l", "e")
	listener.waitFor(t, "first\n")
	next, _, stopNext := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "elect", "e", "second")
	if code := stopLeader(); code != 0 {
		t.Errorf("the leader ended with exit code %d, want 0", code)
	}
	next.waitFor(t, "second\n")
	listener.waitFor(t, "second\n")
	if code := stopNext(); code != 0 {
		t.Errorf("the next leader ended with exit code %d, want 0", code)
	}
	if code := stopListener(); code != 0 {
		t.Errorf("the listener ended with exit code %d, want 0", code)
	}
}

func TestKeepAliveFollowsALease(t *testing.T) {
	endpoint := startMember(t)
	id := strings.Fields(mustRun(t, endpoint, "lease", "grant", "500"))[1]
	out, _, stop := start(t, strings.NewReader(""), nil, "--endpoints="+endpoint, "lease", "keep-alive", id)
	out.waitFor(t, "lease "+id+" keepalived with TTL(500)\n")
	if code := stop(); code != 0 {
		t.Errorf("ended with exit code %d, want 0", code)
	}
	mustRun(t, endpoint, "lease", "revoke", id)
	if got, want := mustRun(t, endpoint, "lease", "keep-alive", id), "lease "+id+" expired or revoked.\n"; got != want {
		t.Errorf("keeping a revoked lease alive printed %q, want %q", got, want)
	}
}

// TestNameOfCall checks that usage texts say what people typed.
func TestNameOfCall(t *testing.T) {
	for _, name := range []string{"etcdctl", "engram ctl"} {
		for _, args := range [][]string{{}, {"lease"}, {"get", "--help"}, {"nonsense"}, {"completion", "bash"}} {
			var out, errors bytes.Buffer
			Run(t.Context(), name, args, Streams{In: strings.NewReader(""), Out: &out, Err: &errors})
			text := out.String() + errors.String()
			if args := strings.Join(args, " "); args == "completion bash" {
				if !strings.Contains(text, "__complete") {
					t.Errorf("%s %s has no request for completions", name, args)
				}
			} else if !strings.Contains(text, name) {
				t.Errorf("%s %s does not name its call:\n%s", name, args, text)
			}
		}
	}
}

// TestWarningsAreJSON checks that what is told about the environment can be read by what reads the client's log.
func TestWarningsAreJSON(t *testing.T) {
	var out, errors bytes.Buffer
	s := Streams{In: strings.NewReader(""), Out: &out, Err: &errors, Env: []string{`ETCDCTL_NO"NE=1`, "ETCDCTL_DIAL_TIMEOUT=x", "ETCDCTL_WRITE_OUT=x"}}
	if code := Run(t.Context(), "etcdctl", []string{"get", "a"}, s); code != exitFormat {
		t.Errorf("exit code %d, want %d of the format in the environment", code, exitFormat)
	}
	warnings := 0
	for line := range strings.Lines(errors.String()) {
		if strings.HasPrefix(line, "Error:") {
			continue
		}
		var w struct{ Level, Msg string }
		if err := json.Unmarshal([]byte(line), &w); err != nil || w.Level != "warn" || w.Msg == "" {
			t.Errorf("the warning %q is not one JSON object with level and msg: %v", line, err)
		}
		warnings++
	}
	if warnings != 2 {
		t.Errorf("%d warnings, want 2:\n%s", warnings, &errors)
	}
}

// TestPasswordsAreHidden checks what --debug shows of them.
func TestPasswordsAreHidden(t *testing.T) {
	root := (&tool{}).root()
	for flag, value := range map[string]string{"user": "root:secret", "password": "secret", "auth-jwt-token": "secret"} {
		if err := root.PersistentFlags().Set(flag, value); err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	writeFlags(&b, root.PersistentFlags())
	if text := b.String(); strings.Contains(text, "secret") || !strings.Contains(text, "ETCDCTL_USER=root:(hidden)\n") {
		t.Errorf("--debug shows:\n%s", text)
	}
}
