package operations

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/engram-kv/engram/test/internal/page"
	"github.com/engram-kv/engram/test/internal/race"
)

// operations is where the procedures stand.
const operations = "../../docs/operations.md"

// elsewhere are blocks that test/compat types, where etcd's data is.
var elsewhere = []string{"migrate", "way-back"}

// typed are the commands that were made of the page, by the name of a block or the text of a span.
var typed = struct {
	sync.Mutex
	commands map[string][]*exec.Cmd
}{commands: map[string][]*exec.Cmd{}}

// remember notes a command of the page.
func remember(name string, cmd *exec.Cmd) *exec.Cmd {
	typed.Lock()
	defer typed.Unlock()
	typed.commands[name] = append(typed.commands[name], cmd)
	return cmd
}

// TestMain asks at the end of all tests, if no flag left some out, if everything that the page has people type was run.
func TestMain(m *testing.M) {
	code := race.Main(m.Run)
	chosen := false
	for _, name := range []string{"test.run", "test.skip", "test.list"} {
		chosen = chosen || flag.Lookup(name).Value.String() != ""
	}
	if code == 0 && !chosen {
		if err := untyped(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// untyped is an error that names what no test ran.
func untyped() error {
	blocks, err := page.Read(operations)
	if err != nil {
		return err
	}
	spans, err := page.Spans(operations)
	if err != nil {
		return err
	}
	ran := func(name string) bool {
		return slices.ContainsFunc(typed.commands[name], func(cmd *exec.Cmd) bool { return cmd.ProcessState != nil })
	}
	var missing []error
	var commands []string
	for _, b := range blocks {
		commands = append(commands, strings.Split(b.Text, "\n")...)
		if !ran(b.Name) && !slices.Contains(elsewhere, b.Name) {
			missing = append(missing, fmt.Errorf("%s:%d: no test types the block %q", operations, b.Line, b.Name))
		}
	}
	for _, s := range spans {
		commands = append(commands, s.Text)
	}
	for _, s := range spans {
		mention := slices.ContainsFunc(commands, func(c string) bool { return strings.HasPrefix(c, s.Text+" ") })
		if !ran(s.Text) && !mention {
			missing = append(missing, fmt.Errorf("%s:%d: no test types `%s`", operations, s.Line, s.Text))
		}
	}
	return errors.Join(missing...)
}

// shell types commands, in which engram is the program under test.
func (r *rig) shell(commands string) *exec.Cmd {
	r.Helper()
	cmd, err := page.Shell(r.ctx, commands, r.p.Path, r.TempDir())
	r.must(err)
	return cmd
}

// blockCommand types the block of that name, with other words for those of the page: old, new, old, new.
func (r *rig) blockCommand(name string, words ...string) *exec.Cmd {
	r.Helper()
	cmd, err := page.Command(r.ctx, operations, name, r.p.Path, r.TempDir(), words...)
	r.must(err)
	return remember(name, cmd)
}

// typeBlock is blockCommand that has ended.
func (r *rig) typeBlock(name string, words ...string) (stdout, stderr string, err error) {
	r.Helper()
	cmd := r.blockCommand(name, words...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// block is typeBlock of commands that must succeed.
func (r *rig) block(name string, words ...string) string {
	r.Helper()
	out, errs, err := r.typeBlock(name, words...)
	if err != nil {
		r.Fatalf("%s: %v\n%s%s", name, err, out, errs)
	}
	return out + errs
}

// spanCommand types a command of the page's text, where endpoint is the member of this machine.
func (r *rig) spanCommand(endpoint, text string, words ...string) *exec.Cmd {
	r.Helper()
	cmd, err := page.SpanCommand(r.ctx, operations, text, r.p.Path, r.TempDir(), words...)
	r.must(err)
	cmd.Env = append(cmd.Env, "ETCDCTL_ENDPOINTS="+endpoint)
	return remember(text, cmd)
}

// span is spanCommand of one that must succeed.
func (r *rig) span(endpoint, text string, words ...string) string {
	r.Helper()
	out, err := r.spanCommand(endpoint, text, words...).CombinedOutput()
	if err != nil {
		r.Fatalf("%s: %v\n%s", text, err, out)
	}
	return string(out)
}

// follow starts commands of which the last goes on, and returns the lines that they print and, for a failure, what they complain of. They end
// with the test.
func (r *rig) follow(cmd *exec.Cmd) (lines *bufio.Scanner, complaints *strings.Builder) {
	r.Helper()
	out, err := cmd.StdoutPipe()
	r.must(err)
	complaints = &strings.Builder{}
	cmd.Stderr = complaints
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the shell has a child that goes on
	r.must(cmd.Start())
	r.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	return bufio.NewScanner(out), complaints
}

// TestEveryBlockHasAName reads the page: each block has a name of its own, by which a test types it. Those of test/compat are looked for in its
// sources.
func TestEveryBlockHasAName(t *testing.T) {
	blocks, err := page.Read(operations)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, b := range blocks {
		switch {
		case b.Name == "":
			t.Errorf("%s:%d: the block has no name for a test:\n%s", operations, b.Line, b.Text)
		case seen[b.Name]:
			t.Errorf("%s:%d: a second block of name %q", operations, b.Line, b.Name)
		}
		seen[b.Name] = true
	}
	if len(blocks) < 15 {
		t.Errorf("the page has %d blocks: were they found?", len(blocks))
	}
	there := typedIn(t, "../compat")
	for _, name := range elsewhere {
		if !seen[name] || !there[name] {
			t.Errorf("block %q is on the page: %t, test/compat types it: %t", name, seen[name], there[name])
		}
	}
}

// TestShellEndsWithTheFirstFailure: a block has failed if any of its commands has.
func TestShellEndsWithTheFirstFailure(t *testing.T) {
	for commands, ends := range map[string]string{"true\necho on\n": "on\n", "false\necho on\n": "exit status 1", "rev=$(false)\necho on\n": "exit status 1"} {
		cmd, err := page.Shell(t.Context(), commands, os.Args[0], t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.CombinedOutput()
		if got := string(out); err == nil && got != ends || err != nil && got+err.Error() != ends {
			t.Errorf("%q ends with %q, %v, want %q", commands, got, err, ends)
		}
	}
}

// typedIn are the names that tests of a directory give to typePage.
func typedIn(t *testing.T, dir string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests in %s: %v", dir, err)
	}
	names := map[string]bool{}
	for _, file := range files {
		source, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(source, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if f, ok := call.Fun.(*ast.Ident); !ok || f.Name != "typePage" || len(call.Args) < 2 {
				return true
			}
			if text, ok := call.Args[1].(*ast.BasicLit); ok && text.Kind == token.STRING {
				if name, err := strconv.Unquote(text.Value); err == nil {
					names[name] = true
				}
			}
			return true
		})
	}
	return names
}
