package crash

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/race"
)

// long says that the long versions are wanted.
func long() bool { return os.Getenv("ENGRAM_CI") != "" }

// engram builds engram once for all tests of a run, which end removes.
var engram = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "engram-crash")
	if err != nil {
		return "", err
	}
	built = dir
	return race.Build("../..", "./cmd/engram", filepath.Join(dir, "engram"))
})

var built string // directory of the binary, "" if none was built

func TestMain(m *testing.M) {
	code := race.Main(m.Run)
	if built != "" {
		_ = os.RemoveAll(built)
	}
	os.Exit(code)
}

// process is an engram process on a data directory.
type process struct {
	cmd    *exec.Cmd
	addr   string
	output *tail
	exited chan struct{}
	err    error // of Wait, once exited
}

// spawn starts a process and returns without waiting for it to serve.
func spawn(t testing.TB, dir string, flags ...string) (*process, <-chan string) {
	t.Helper()
	path, err := engram()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{output: &tail{}, exited: make(chan struct{})}
	p.cmd = exec.Command(path, append([]string{
		"--data-dir=" + dir, "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0",
		"--listen-peer-urls=http://127.0.0.1:0", "--log-level=info", "--log-format=json",
	}, flags...)...)
	p.cmd.Env = append(os.Environ(), "GOMEMLIMIT=512MiB", "GOMAXPROCS=2")
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready := make(chan string, 1)
	go func() {
		p.read(stderr, ready)
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.kill()
		if err := race.Of(p.cmd.Process.Pid); err != nil {
			t.Error(err)
		}
	})
	return p, ready
}

// startProcess starts a process and waits until it serves.
func startProcess(t testing.TB, dir string, flags ...string) (*process, error) {
	t.Helper()
	p, ready := spawn(t, dir, flags...)
	select {
	case p.addr = <-ready:
		return p, nil
	case <-p.exited:
		return nil, fmt.Errorf("engram ended while starting: %w\n%s", p.err, p.output)
	case <-time.After(time.Minute):
		return nil, fmt.Errorf("engram does not serve after a minute\n%s", p.output)
	}
}

// read keeps the last lines of the log and finds the address in them.
func (p *process) read(r io.Reader, ready chan<- string) {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		p.output.add(s.Bytes())
		var line struct {
			Msg     string   `json:"msg"`
			Clients []string `json:"clients"`
		}
		if json.Unmarshal(s.Bytes(), &line) == nil && line.Msg == "ready to serve client requests" && len(line.Clients) > 0 {
			ready <- line.Clients[0]
		}
	}
}

// kill takes the process away at once.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// stop ends the process gracefully.
func (p *process) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.exited:
	case <-time.After(30 * time.Second):
		return errors.New("engram does not end after SIGTERM")
	}
	if p.err != nil {
		return fmt.Errorf("engram ended with %w\n%s", p.err, p.output)
	}
	return nil
}

// tail is the last lines of a log.
type tail struct {
	mu    sync.Mutex
	lines [][]byte
}

const tailLines = 40

func (t *tail) add(line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, bytes.Clone(line))
	if n := len(t.lines) - tailLines; n > 0 {
		t.lines = t.lines[n:]
	}
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.Join(t.lines, []byte("\n")))
}
