package cluster

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/engram-kv/engram/bench/process"
	"github.com/engram-kv/engram/test/internal/race"
)

const (
	stopWithin = 30 * time.Second
	logTail    = 3 << 10
)

// Stop ends the process with SIGTERM and waits for it.
func (m *Member) Stop() error { return m.end(syscall.SIGTERM) }

// Kill ends the process with SIGKILL and waits for it.
func (m *Member) Kill() error { return m.end(syscall.SIGKILL) }

// Pause stops the process where it is, until Continue. On a busy machine its threads stop a while after the signal: until then it may answer.
func (m *Member) Pause() error {
	if err := m.signal(syscall.SIGSTOP, true); err != nil {
		return err
	}
	for began := time.Now(); ; time.Sleep(poll) { // another process: there is no event to wait for
		err := still(m.PID())
		if err == nil {
			return nil
		}
		if time.Since(began) > stopWithin {
			return fmt.Errorf("%v does not stand still %v after SIGSTOP: %w", m, stopWithin, err)
		}
	}
}

// still is nil once all threads of a process are stopped.
func still(pid int) error {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(threads) == 0 {
		return fmt.Errorf("process %d has %d threads: %v", pid, len(threads), err)
	}
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if _, state, _ := strings.Cut(string(text), ") "); !strings.HasPrefix(state, "T") {
			return fmt.Errorf("%s says %.1s", path, state)
		}
	}
	return nil
}

// Continue lets a paused process go on.
func (m *Member) Continue() error { return m.signal(syscall.SIGCONT, false) }

// Running tells if the process is there and not paused.
func (m *Member) Running() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.aliveLocked() && !m.paused
}

// Exited is closed when the process ends.
func (m *Member) Exited() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exited
}

// PID is the process id of the last process.
func (m *Member) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cmd.Process.Pid
}

// LogTail returns the last lines that the member logged.
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

// Log returns all that the member has printed.
func (m *Member) Log() string {
	text, err := os.ReadFile(m.logPath())
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func (m *Member) logPath() string { return filepath.Join(m.c.dir, m.Name+".log") }

func (m *Member) spawn() error {
	log, err := os.OpenFile(m.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	initial := []string{"--initial-cluster=" + m.initial}
	if m.state == "new" && m.c.Discovery != nil {
		initial = m.c.Discovery
	}
	args := []string{
		m.Program.Path,
		"--name=" + m.Name, "--data-dir=" + m.DataDir,
		"--listen-client-urls=" + strings.Join(append([]string{m.ClientURL}, m.c.Listen...), ","), "--advertise-client-urls=" + m.ClientURL,
		"--listen-peer-urls=" + m.listenPeer, "--initial-advertise-peer-urls=" + m.PeerURL,
		"--initial-cluster-state=" + m.state, "--log-level=warn",
	}
	args = slices.Concat(args, initial, m.c.Flags, m.Program.Flags)
	if m.host.Namespace != "" { // ip execs the program: the process id is the program's own
		args = slices.Concat([]string{"ip", "netns", "exec", m.host.Namespace}, args)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "ETCD") || strings.HasPrefix(v, "ENGRAM")
	}), m.c.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	m.cmd, m.exited, m.exitErr, m.paused = cmd, exited, nil, false
	go func() {
		err := cmd.Wait()
		m.c.found(m, race.Of(cmd.Process.Pid))
		m.mu.Lock()
		m.exitErr = err
		m.mu.Unlock()
		close(exited)
	}()
	return nil
}

func (m *Member) aliveLocked() bool {
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

func (m *Member) signal(sig syscall.Signal, paused bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.aliveLocked() {
		return fmt.Errorf("%v has already ended: %v; its log ends:\n%s", m, m.exitErr, m.LogTail())
	}
	if err := m.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("%v: %w", m, err)
	}
	m.paused = paused
	return nil
}

func (m *Member) end(sig syscall.Signal) error {
	if err := m.signal(sig, false); err != nil {
		return err
	}
	return m.waitExit(sig.String())
}

func (m *Member) waitExit(after string) error {
	select {
	case <-m.Exited():
		return nil
	case <-time.After(stopWithin):
		return fmt.Errorf("%v still runs %v after %s; its log ends:\n%s", m, stopWithin, after, m.LogTail())
	}
}

// close ends the process however it can be ended.
func (m *Member) close() error {
	m.mu.Lock()
	alive, paused := m.aliveLocked(), m.paused
	m.mu.Unlock()
	if !alive {
		return nil
	}
	if !paused && m.Stop() == nil {
		return nil
	}
	return m.Kill()
}

// CPU is the time that the process has spent on all its threads, user and system together.
func (m *Member) CPU() (time.Duration, error) { return process.CPU(m.PID()) }
