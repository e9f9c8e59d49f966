package play

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// condition is what was done to a member's process, or what it did.
type condition string

const (
	running condition = "running"
	stopped condition = "stopped"
	killed  condition = "killed"
	paused  condition = "paused"
	failed  condition = "failed" // it ended by itself
)

const (
	stopWithin = 15 * time.Second // of a stop by SIGTERM, before the process is killed
	killWithin = 5 * time.Second
)

// member is one member and its process. The cluster's mu covers the fields below it.
type member struct {
	name string
	dir  string // data, log and standard error

	client *clientv3.Client // of this member alone; nil until its first start
	birth  birth

	process              *process
	clientPort, peerPort int
	condition            condition
	cut                  bool
	leaving              bool   // it is being removed, and may end by itself
	why                  string // it failed
	moves                int    // how often it found a port taken since it was launched
	id                   uint64 // 0 until it was seen
	learner              bool
	seen                 sight
}

// birth is what a member without data begins with. It is the same at each start: one that was killed early has none yet.
type birth struct {
	cluster string // as --initial-cluster has it
	state   string // new or existing
}

// state is the condition as the table shows it.
func (m *member) state() string {
	if m.cut && m.condition == running {
		return "cut off"
	}
	if m.cut {
		return string(m.condition) + ", cut off"
	}
	return string(m.condition)
}

// reachable says that the other members can talk with it.
func (m *member) reachable() bool { return m.condition == running && !m.cut }

// cure is the command that brings the member back.
func (m *member) cure() string {
	switch {
	case m.condition == paused:
		return "resume " + m.name
	case m.condition != running:
		return "start " + m.name
	case m.cut:
		return "heal " + m.name
	}
	return ""
}

func (m *member) clientURL() string { return fmt.Sprintf("http://127.0.0.1:%d", m.clientPort) }

func (m *member) logFile() string    { return filepath.Join(m.dir, "log") }
func (m *member) stderrFile() string { return filepath.Join(m.dir, "stderr") }

// newClient makes a client that tries again soon when a member comes back. It dials when it is used.
func newClient(endpoints ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: endpoints, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 500 * time.Millisecond}, MinConnectTimeout: time.Second,
		})},
	})
}

// launch starts the member's process.
func (c *cluster) launch(m *member) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.moves = 0
	return c.startProcess(m)
}

// startProcess starts the process on ports that are free now. The lock is held.
func (c *cluster) startProcess(m *member) (err error) {
	if m.clientPort, err = c.ports.again(m.clientPort); err != nil {
		return err
	}
	if m.peerPort, err = c.ports.again(m.peerPort); err != nil {
		return err
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return err
	}
	if m.client == nil {
		m.client, err = newClient(m.clientURL())
	} else {
		m.client.SetEndpoints(m.clientURL())
	}
	if err != nil {
		return err
	}
	c.net.listens(m.name, m.peerPort)
	p, err := c.starter.start(program{
		path: c.executable, dir: c.net.workDir(m.name), stderr: m.stderrFile(),
		args: []string{
			"--name=" + m.name, "--data-dir=" + filepath.Join(m.dir, "data"),
			"--listen-client-urls=" + m.clientURL(), "--advertise-client-urls=" + m.clientURL(),
			fmt.Sprintf("--listen-peer-urls=http://127.0.0.1:%d", m.peerPort), "--initial-advertise-peer-urls=" + peerURL(m.name),
			"--initial-cluster=" + m.birth.cluster, "--initial-cluster-state=" + m.birth.state, "--initial-cluster-token=engram-play",
			"--memory-budget=64MiB", "--log-outputs=" + m.logFile(), "--log-format=console",
			"--enable-log-rotation", `--log-rotation-config-json={"maxsize": 10, "maxbackups": 1}`,
		},
	})
	if err != nil {
		return fmt.Errorf("%s cannot be started from %s: %w", m.name, c.executable, err)
	}
	m.process, m.condition, m.why, m.seen = p, running, "", sight{}
	c.watchers.Go(func() { c.watch(m, p) })
	return nil
}

// movesMost is how often a member is started once more because another program took its port before it listened there.
const movesMost = 3

// watch waits for the end of a process and, if nobody asked for it, notes how it came. One whose port was taken is started again, on
// another.
func (c *cluster) watch(m *member, p *process) {
	<-p.ended
	c.mu.Lock()
	unasked := m.process == p && (m.condition == running || m.condition == paused)
	if unasked {
		m.condition = failed
		m.why = "ended by itself: " + endText(p.err)
		if last := lastWords(m.stderrFile()); last != "" && p.err != nil {
			m.why = last
		}
		unasked = !m.leaving
		if unasked && m.moves < movesMost && strings.Contains(m.why, syscall.EADDRINUSE.Error()) {
			m.moves++
			if err := c.startProcess(m); err == nil {
				unasked = false
			}
		}
	}
	text := fmt.Sprintf("%s %s; its log is %s", m.name, m.why, m.logFile())
	c.mu.Unlock()
	if unasked {
		c.happened(text)
	}
}

func endText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// end ends the member's process with a signal and waits for that. One that is paused must be resumed to hear of SIGTERM.
func (c *cluster) end(ctx context.Context, m *member, as condition, sig syscall.Signal) error {
	c.mu.Lock()
	p, before := m.process, m.condition
	m.condition = as
	c.mu.Unlock()
	if !p.running() {
		return nil
	}
	err := p.signal(sig)
	if sig == syscall.SIGTERM && before == paused {
		err = errors.Join(err, p.signal(syscall.SIGCONT))
	}
	if err != nil {
		return err
	}
	limit := time.NewTimer(stopWithin)
	defer limit.Stop()
	select {
	case <-p.ended:
		return nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-limit.C:
		err = fmt.Errorf("%s did not stop within %v and was killed; its log is %s", m.name, stopWithin, m.logFile())
	}
	if kerr := p.signal(syscall.SIGKILL); kerr != nil {
		return errors.Join(err, kerr)
	}
	dead := time.NewTimer(killWithin)
	defer dead.Stop()
	select {
	case <-p.ended:
	case <-dead.C: // it hangs in the kernel, on a disk perhaps
		err = errors.Join(err, fmt.Errorf("process %d of %s does not die", p.cmd.Process.Pid, m.name))
	}
	return err
}
