package play

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
)

// maxStderrBytes is how large the file of a member's standard error may have grown when the member starts again. A member
// writes little there: the error that ended it.
const maxStderrBytes = 1 << 20

// starter starts processes, all from one thread that ends with play: Linux kills a child when the thread that started it
// is no more, and Go's other threads come and go.
type starter struct{ jobs chan func() }

func newStarter() *starter {
	s := &starter{make(chan func())}
	go func() {
		runtime.LockOSThread()
		for job := range s.jobs {
			job()
		}
	}()
	return s
}

// close ends the thread. Every process must have ended.
func (s *starter) close() { close(s.jobs) }

// program is what a process is made from.
type program struct {
	path, dir string // the file, and the directory it runs in
	args      []string
	stderr    string // file
}

// process is one run of a member.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has ended
	err   error         // how; to be read after ended
}

func (s *starter) start(p program) (*process, error) {
	flags := os.O_CREATE | os.O_WRONLY | os.O_APPEND
	if info, err := os.Stat(p.stderr); err == nil && info.Size() > maxStderrBytes {
		flags |= os.O_TRUNC
	}
	stderr, err := os.OpenFile(p.stderr, flags, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = stderr.Close() }() // the process has its own
	cmd := exec.Command(p.path, p.args...)
	cmd.Args[0] = "engram" // by which it knows what it is to be
	cmd.Dir, cmd.Env, cmd.Stderr, cmd.SysProcAttr = p.dir, memberEnv(os.Environ()), stderr, processAttributes()
	started := make(chan error, 1)
	s.jobs <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, err
	}
	proc := &process{cmd: cmd, ended: make(chan struct{})}
	go func() {
		proc.err = cmd.Wait()
		close(proc.ended)
	}()
	return proc, nil
}

// memberEnv leaves out what would be read as a member's options.
func memberEnv(env []string) []string {
	var out []string
	for _, e := range env {
		if !strings.HasPrefix(e, "ETCD_") && !strings.HasPrefix(e, "ENGRAM_") {
			out = append(out, e)
		}
	}
	return out
}

// running says that the process has not ended. A nil process does not run.
func (p *process) running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// signal sends a signal to the process, if it runs. Until Wait has returned its ID belongs to nobody else.
func (p *process) signal(s syscall.Signal) error {
	if !p.running() {
		return nil
	}
	if err := p.cmd.Process.Signal(s); err != nil && p.running() {
		return fmt.Errorf("signal %v to process %d: %w", s, p.cmd.Process.Pid, err)
	}
	return nil
}

// lastWords is the last line of a file, for the reason why a process ended; "" if there is none.
func lastWords(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	const most = 4 << 10
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return ""
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
