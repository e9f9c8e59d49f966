// Package conformance holds the edge of a member against what others wrote: h2spec's cases of HTTP/2, the interop cases of
// grpc-go, and the gRPC library of another language.
//
// It is a module of its own, so that what only these tests need is no dependency of Engram.
//
//	CLUSTER_PROGRAM  etcd runs the same against a real member, which shows faults of the tests themselves
//	ENGRAM_CI        what is missing fails instead of skipping
package conformance

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/race"
)

// partVariable names the part that a process of this test binary shall run instead of tests. The suites end their process
// when they fail, and keep things in global variables: so each runs in a process of its own.
const partVariable = "CONFORMANCE_PART"

const partWithin = 2 * time.Minute

var parts = map[string]func() error{"h2spec": runH2spec, "interop": runInterop}

func TestMain(m *testing.M) {
	name := os.Getenv(partVariable)
	if name == "" {
		os.Exit(race.Main(m.Run))
	}
	if err := parts[name](); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// part is a command that runs a part of this binary.
func part(t *testing.T, name string, env ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), partWithin)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(append(os.Environ(), partVariable+"="+name), env...)
	return cmd
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
