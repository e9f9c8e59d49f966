package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"go.etcd.io/etcd/server/v3/embed"
	// The packages under test and what their tests import, so that the module file names all of it.
	_ "k8s.io/apiserver/pkg/reconcilers"
	_ "k8s.io/apiserver/pkg/storage/etcd3/testing"
	_ "k8s.io/apiserver/pkg/storage/testing"
	_ "k8s.io/apiserver/pkg/util/peerproxy"
)

// upstream are the packages of k8s.io/apiserver whose tests use an etcd.
var upstream = []string{
	"storage/cacher",
	"storage/etcd3",
	"registry/generic/registry",
	"reconcilers",
	"util/peerproxy",
	"storage/storagebackend/factory",
}

// TestUpstream runs Kubernetes' own tests, unchanged, with an Engram process in the place of each etcd: ./etcd-server stands
// in for etcd's server in this module's file.
func TestUpstream(t *testing.T) {
	t.Parallel()
	failed := make([][]string, len(upstream)) // tests of each package
	t.Run("together", func(t *testing.T) {
		for i, pkg := range upstream {
			t.Run(pkg, func(t *testing.T) {
				t.Parallel()
				out, err := runUpstream(t, pkg, nil)
				if failed[i] = out.failed; err != nil && len(out.failed) > 0 {
					t.Logf("failed beside others, and run again: %q\n%s", out.failed, out.failures)
					return
				}
				judgeUpstream(t, out, err)
			})
		}
	})
	// Some of these tests give an event 150 ms, which a busy machine exceeds. Running those that failed again, one package after the other and
	// beside none, tells that apart from a fault. They are no subtests, which -run might leave out.
	for i, pkg := range upstream {
		if len(failed[i]) > 0 {
			t.Logf("%s again:", pkg)
			out, err := runUpstream(t, pkg, failed[i])
			judgeUpstream(t, out, err)
		}
	}
}

func judgeUpstream(t *testing.T, out result, err error) {
	t.Helper()
	if err != nil || out.passed == 0 {
		t.Errorf("%v; %d tests passed; the others printed:\n%s", err, out.passed, out.failures)
	}
	t.Logf("%d tests passed, %d skipped by themselves %q", out.passed, len(out.skipped), out.skipped)
}

// runUpstream runs the package's tests, or only those named.
func runUpstream(t *testing.T, pkg string, only []string) (result, error) {
	args := []string{"test", "-json", "-count=1", "-timeout=8m"}
	if len(only) > 0 {
		args = append(args, "-run=^("+strings.Join(only, "|")+")$")
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "k8s.io/apiserver/pkg/"+pkg)...)
	cmd.Env = append(os.Environ(), embed.ProgramVariable+"="+program)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	runErr := cmd.Run()
	out, err := readResult(&stdout)
	if err = errors.Join(runErr, err); err != nil {
		err = fmt.Errorf("%v: %w\n%s", cmd.Args, err, stderr.Bytes())
	}
	return out, err
}

// result is what one `go test -json` says.
type result struct {
	failed   []string // tests, without their subtests
	passed   int      // tests and subtests
	skipped  []string // their names
	failures string   // what failed tests printed, and the build
}

func readResult(r io.Reader) (result, error) {
	var out result
	var failures strings.Builder
	printed := map[string]*strings.Builder{} // by test; "" is the package
	for d := json.NewDecoder(r); ; {
		var e struct{ Action, Test, Output string }
		if err := d.Decode(&e); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return out, err
		}
		switch e.Action {
		case "output":
			if printed[e.Test] == nil {
				printed[e.Test] = new(strings.Builder)
			}
			printed[e.Test].WriteString(e.Output)
		case "build-output":
			failures.WriteString(e.Output)
		case "pass":
			if e.Test != "" {
				out.passed++
			}
			delete(printed, e.Test)
		case "skip":
			out.skipped = append(out.skipped, e.Test)
			delete(printed, e.Test)
		case "fail":
			if e.Test != "" && !strings.Contains(e.Test, "/") {
				out.failed = append(out.failed, e.Test)
			}
			if p := printed[e.Test]; p != nil {
				failures.WriteString(p.String())
				delete(printed, e.Test)
			}
		}
	}
	out.failures = failures.String()
	return out, nil
}
