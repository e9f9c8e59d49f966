package operations

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/engram-kv/engram/test/internal/page"
)

// operations is where the procedures stand.
const operations = "../../docs/operations.md"

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
	return cmd
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

// typists are the functions that type a block, whose name is among their arguments.
var typists = []string{"block", "typeBlock", "blockCommand", "typePage"}

// TestEveryBlockIsTyped reads the page and the tests: each block has a name of its own, and a test that types it.
func TestEveryBlockIsTyped(t *testing.T) {
	blocks, err := page.Read(operations)
	if err != nil {
		t.Fatal(err)
	}
	typed := map[string]bool{}
	for _, dir := range []string{".", "../doctor", "../compat"} {
		files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no tests in %s: %v", dir, err)
		}
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
				name := ""
				switch f := call.Fun.(type) {
				case *ast.Ident:
					name = f.Name
				case *ast.SelectorExpr:
					name = f.Sel.Name
				}
				if !slices.Contains(typists, name) {
					return true
				}
				for _, arg := range call.Args {
					if text, ok := arg.(*ast.BasicLit); ok && text.Kind == token.STRING {
						if name, err := strconv.Unquote(text.Value); err == nil {
							typed[name] = true
						}
					}
				}
				return true
			})
		}
	}
	seen := map[string]bool{}
	for _, b := range blocks {
		switch {
		case b.Name == "":
			t.Errorf("%s:%d: the block has no name for a test:\n%s", operations, b.Line, b.Text)
		case seen[b.Name]:
			t.Errorf("%s:%d: a second block of name %q", operations, b.Line, b.Name)
		case !typed[b.Name]:
			t.Errorf("%s:%d: no test types the block %q", operations, b.Line, b.Name)
		}
		seen[b.Name] = true
	}
	if len(blocks) < 15 {
		t.Errorf("the page has %d blocks: were they found?", len(blocks))
	}
}
