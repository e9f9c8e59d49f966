// Package member builds Engram and runs it as a child process on loopback ports.
//
// It knows nothing of Kubernetes. Member is one running member with a data directory of its own. Invariants:
//
//	M1: Start and Restart return only once the member serves clients, or with the end of its log in the error.
//	M2: a member is ended by its own process id, and does not outlive the process that started it (on Linux).
//	M3: what is kept of a member's log is bounded.
package member

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

const (
	readyLine  = "ready to serve client requests"
	startTries = 3 // a port found free may be taken before the member listens on it

	readyWithin = 60 * time.Second
	endWithin   = 60 * time.Second
)

// ErrNotReady is wrapped by the errors of Start and Restart.
var ErrNotReady = errors.New("member does not serve clients")

// Build builds engram from the module in moduleDir into dir and returns the program's path. Go's build cache makes
// every build after the first one a link. With Race it is built with the race detector.
func Build(moduleDir, dir string) (string, error) {
	program, err := filepath.Abs(filepath.Join(dir, "engram"))
	if err != nil {
		return "", err
	}
	args, cgo := []string{"build"}, "CGO_ENABLED=0"
	if Race() {
		args, cgo, program = append(args, "-race"), "CGO_ENABLED=1", program+"-race"
	}
	cmd := exec.Command("go", append(args, "-o", program, "./cmd/engram")...)
	cmd.Dir = moduleDir
	cmd.Env = append(os.Environ(), cgo)
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v in %s: %w\n%s", cmd, moduleDir, err, text)
	}
	return program, nil
}

// Race says that ENGRAM_RACE asks for the race detector. Package test/internal/race, of another module, has the same.
func Race() bool {
	v := os.Getenv("ENGRAM_RACE")
	return v != "" && v != "0"
}

// Options say what to run.
type Options struct {
	Program string   // path of the engram program
	Dir     string   // data directory
	Flags   []string // added to the command line

	// ClientURL and PeerURL are listened on. Empty: free loopback ports, kept over restarts.
	ClientURL, PeerURL string
}

// Member is one member. Its methods must not be called at the same time.
type Member struct {
	opts Options
	log  *tail
	cmd  *exec.Cmd
	end  chan error // gets what Wait returned, once
}

// Start starts a member and waits until it serves clients.
func Start(opts Options) (*Member, error) {
	if opts.ClientURL != "" {
		m := &Member{opts: opts}
		return m, m.Restart()
	}
	for try := 1; ; try++ {
		ports, err := freePorts(2)
		if err != nil {
			return nil, err
		}
		opts.ClientURL, opts.PeerURL = "http://"+ports[0], "http://"+ports[1]
		m := &Member{opts: opts}
		if err = m.Restart(); err == nil {
			return m, nil
		}
		if try == startTries || !m.log.holds("address already in use") {
			return nil, err
		}
	}
}

// ClientURL is where clients find the member.
func (m *Member) ClientURL() string { return m.opts.ClientURL }

// Restart starts the member on the data it had. It must not be running.
func (m *Member) Restart() error {
	if m.cmd != nil {
		return fmt.Errorf("restart of member with process id %d: it still runs; call Stop or Kill first", m.cmd.Process.Pid)
	}
	cmd := exec.Command(m.opts.Program, slices.Concat([]string{
		"--name=kube",
		"--data-dir=" + m.opts.Dir,
		"--listen-client-urls=" + m.opts.ClientURL,
		"--advertise-client-urls=" + m.opts.ClientURL,
		"--listen-peer-urls=" + m.opts.PeerURL,
		"--initial-advertise-peer-urls=" + m.opts.PeerURL,
		"--initial-cluster=kube=" + m.opts.PeerURL,
		"--log-format=json",
	}, m.opts.Flags)...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=2")
	m.log = newTail(readyLine)
	cmd.Stdout, cmd.Stderr = m.log, m.log // one writer: exec never calls it twice at a time
	endWithParent(cmd)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", m.opts.Program, err)
	}
	end := make(chan error, 1)
	go func() { end <- cmd.Wait() }()
	m.cmd, m.end = cmd, end

	limit := time.NewTimer(readyWithin)
	defer limit.Stop()
	select {
	case <-m.log.seen:
		return nil
	case err := <-end:
		m.cmd = nil
		return fmt.Errorf("%s ended (%v): %w; its log:\n%s", m.opts.Program, err, ErrNotReady, m.log)
	case <-limit.C:
		m.Kill()
		return fmt.Errorf("%s: not after %v: %w; its log:\n%s", m.opts.Program, readyWithin, ErrNotReady, m.log)
	}
}

// Stop asks the member to end (SIGTERM) and waits for it. The error says how it ended if not with exit code 0 or, as etcd
// does once it has cleaned up, of the signal. Stopping a member that does not run does nothing.
func (m *Member) Stop() error {
	if m.cmd == nil {
		return nil
	}
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	limit := time.NewTimer(endWithin)
	defer limit.Stop()
	select {
	case err := <-m.end:
		m.cmd = nil
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == syscall.SIGTERM {
				return nil
			}
		}
		if err != nil {
			return fmt.Errorf("member ended on SIGTERM: %w; its log:\n%s", err, m.log)
		}
		return nil
	case <-limit.C:
		m.Kill()
		return fmt.Errorf("member still ran %v after SIGTERM; its log:\n%s", endWithin, m.log)
	}
}

// Kill ends the member at once (SIGKILL).
func (m *Member) Kill() {
	if m.cmd == nil {
		return
	}
	// The only error is that it has ended already.
	_ = m.cmd.Process.Kill()
	<-m.end
	m.cmd = nil
}

// Log returns the end of the member's log since its last start.
func (m *Member) Log() string { return m.log.String() }

// Ports lie below those that the kernel gives to outgoing connections, or one of these could take the port of a member that is down: a
// client that dials it may even reach itself.
const firstPort, lastPort = 12_000, 30_000

func freePorts(n int) (addrs []string, err error) {
	for range 100 {
		l, failed := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort+rand.IntN(lastPort-firstPort)))
		if failed != nil {
			err = failed
			continue
		}
		defer l.Close() // only after all are found, so that no two are equal
		if addrs = append(addrs, l.Addr().String()); len(addrs) == n {
			return addrs, nil
		}
	}
	return nil, fmt.Errorf("no free port: %w", err)
}
