package member

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	readyWithin = 3 * time.Minute // etcd with a large store takes its time
	stopWithin  = time.Minute
	answerIn    = 10 * time.Second
	poll        = 2 * time.Millisecond // between tries to reach a starting process: there is no event to wait for
	logTail     = 4 << 10
	quotaBytes  = 8 << 30
)

// Member is one server process. It is for one goroutine, apart from Dial.
type Member struct {
	Name    string // of the system: "etcd" or "engram"
	Address string // host:port of the client port

	program string
	dir     string
	peer    string
	cmd     *exec.Cmd
	exited  chan struct{} // closed when the process has ended and exitErr is set
	exitErr error
}

// New returns a member that is not running, with a data directory below dir.
func New(name, program, dir string) (*Member, error) {
	m := &Member{Name: name, program: program, dir: filepath.Join(dir, name)}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return nil, err
	}
	for _, address := range []*string{&m.Address, &m.peer} {
		port, err := cluster.FreePort()
		if err != nil {
			return nil, err
		}
		*address = net.JoinHostPort("127.0.0.1", port)
	}
	return m, nil
}

// Start runs the member and returns the time from exec to the first linearizable read that it answered.
func (m *Member) Start() (time.Duration, error) {
	client, peer := "http://"+m.Address, "http://"+m.peer
	log, err := os.OpenFile(m.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close() // the child has its own
	m.cmd = exec.Command(m.program,
		"--name=m", "--data-dir="+filepath.Join(m.dir, "data"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=m="+peer,
		fmt.Sprintf("--quota-backend-bytes=%d", quotaBytes), "--log-level=error", "--enable-pprof",
	)
	m.cmd.Stdout, m.cmd.Stderr = log, log
	m.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ETCD") || strings.HasPrefix(v, "ENGRAM") })
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	began := time.Now()
	if err := m.cmd.Start(); err != nil {
		return 0, err
	}
	m.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		m.exitErr = cmd.Wait()
		close(exited)
	}(m.cmd, m.exited)
	if err := m.ready(began); err != nil {
		return 0, fmt.Errorf("%s (%s) did not become ready: %w; its log ends:\n%s", m.Name, m.program, err, m.LogTail())
	}
	return time.Since(began), nil
}

// readRequest is a RangeRequest for the key "ready".
var readRequest = []byte("\x0a\x05ready")

func (m *Member) ready(began time.Time) error {
	for {
		err := m.read()
		if err == nil {
			return nil
		}
		select {
		case <-m.exited:
			return fmt.Errorf("the process ended: %w", m.exitErr)
		case <-time.After(poll):
		}
		if time.Since(began) > readyWithin {
			return fmt.Errorf("no linearizable read after %v: %w", readyWithin, err)
		}
	}
}

func (m *Member) read() error {
	c, err := load.Dial(m.Address)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Do("/etcdserverpb.KV/Range", readRequest, answerIn)
	return err
}

// Dial opens n connections to the running member.
func (m *Member) Dial(n int) (Conns, error) {
	var conns Conns
	for range n {
		c, err := load.Dial(m.Address)
		if err != nil {
			conns.Close()
			return nil, fmt.Errorf("%s: %w", m.Name, err)
		}
		conns = append(conns, c)
	}
	return conns, nil
}

// Conns are connections to one member.
type Conns []*load.Conn

// Close closes all of them.
func (cs Conns) Close() {
	for _, c := range cs {
		c.Close()
	}
}

// Stop ends the member with SIGTERM and waits for it.
func (m *Member) Stop() error { return m.end(syscall.SIGTERM) }

// Kill ends the member with SIGKILL and waits for it.
func (m *Member) Kill() error { return m.end(syscall.SIGKILL) }

// Close ends the member however it can be ended, and removes its data. It is safe on a member that is not running.
func (m *Member) Close() error {
	var err error
	if m.running() {
		if err = m.Stop(); err != nil && m.running() {
			err = errors.Join(err, m.Kill())
		}
	}
	return errors.Join(err, os.RemoveAll(m.dir))
}

// PID is the process id of the running member.
func (m *Member) PID() int { return m.cmd.Process.Pid }

func (m *Member) running() bool {
	if m.exited == nil {
		return false
	}
	select {
	case <-m.exited:
		return false
	default:
		return true
	}
}

func (m *Member) end(sig syscall.Signal) error {
	if !m.running() {
		return fmt.Errorf("%s had already ended: %v; its log ends:\n%s", m.Name, m.exitErr, m.LogTail())
	}
	if err := m.cmd.Process.Signal(sig); err != nil {
		return err
	}
	select {
	case <-m.exited:
		return nil
	case <-time.After(stopWithin):
		return fmt.Errorf("%s still runs %v after %v", m.Name, stopWithin, sig)
	}
}

func (m *Member) logPath() string { return filepath.Join(m.dir, "log") }

// LogTail returns the last lines the member logged.
func (m *Member) LogTail() string {
	f, err := os.Open(m.logPath())
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		f.Seek(max(0, end-logTail), io.SeekStart) // from the start, should it fail
	}
	var b bytes.Buffer
	io.Copy(&b, f) // what could be read is what there is to show
	return b.String()
}
