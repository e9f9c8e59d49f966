package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

const commandWithin = 2 * time.Minute

// Command is one run of a command-line tool.
type Command struct {
	Program []string // the path, and the subcommand that makes it the tool
	Args    []string
	Env     []string // added to the environment, which keeps no ETCDCTL_ variable
	Stdin   string
	Lines   int // end the tool once it has printed so many lines, unless it ends before: for one that does not end by itself. 0: let it end
}

// Output is what a tool printed and how it ended.
type Output struct {
	Stdout, Stderr string
	Code           int // exit code; 0 of a tool that was ended after its lines
}

// Run runs the command and waits for its end, or for its lines.
func (c Command) Run() (Output, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandWithin)
	defer cancel()
	args := append(slices.Clone(c.Program[1:]), c.Args...)
	cmd := exec.CommandContext(ctx, c.Program[0], args...)
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ETCDCTL") }), c.Env...)
	cmd.Stdin = strings.NewReader(c.Stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return Output{}, err
	}
	if err := cmd.Start(); err != nil {
		return Output{}, err
	}
	var out strings.Builder
	ended := true // by itself
	if c.Lines == 0 {
		_, err = io.Copy(&out, stdout)
	} else if ended, err = copyLines(&out, stdout, c.Lines); !ended {
		cmd.Process.Kill()
	}
	wait := cmd.Wait()
	o := Output{Stdout: out.String(), Stderr: stderr.String()}
	if ctx.Err() != nil {
		return o, fmt.Errorf("%s %q: still running after %v; it printed:\n%s%s", c.Program[0], args, commandWithin, o.Stdout, o.Stderr)
	}
	if err != nil {
		return o, fmt.Errorf("%s %q: reading its output: %w; it printed:\n%s%s", c.Program[0], args, err, o.Stdout, o.Stderr)
	}
	if exit := (*exec.ExitError)(nil); ended && errors.As(wait, &exit) {
		o.Code = exit.ExitCode()
	} else if ended && wait != nil {
		return o, wait
	}
	return o, nil
}

// copyLines copies up to n lines and tells if the input ended before.
func copyLines(w io.Writer, r io.Reader, n int) (ended bool, err error) {
	lines := bufio.NewReader(r)
	for range n {
		line, err := lines.ReadString('\n')
		if _, err := io.WriteString(w, line); err != nil {
			return false, err
		}
		if errors.Is(err, io.EOF) {
			return true, nil
		} else if err != nil {
			return false, err
		}
	}
	return false, nil
}
