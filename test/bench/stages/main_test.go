package main

import (
	"os"
	"path/filepath"
	"runtime/pprof"
	"strings"
	"testing"
	"time"
)

const traces = `File: engram
Type: cpu
Duration: 8s, Total samples = 10.05s (125.57%)
-----------+-------------------------------------------------------
      60ms   internal/runtime/syscall/linux.Syscall6
             runtime.netpoll
             runtime.mcall
-----------+-------------------------------------------------------
     1.20s   runtime.memmove
             github.com/cockroachdb/pebble/v2/internal/arenaskl.newNode
             github.com/engram-kv/engram/internal/state.(*Machine).Apply
             github.com/engram-kv/engram/internal/consensus.(*Applier).Step
-----------+-------------------------------------------------------
      key:  value
      20ms   internal/runtime/syscall/linux.Syscall6
             github.com/cockroachdb/pebble/v2/vfs.(*linuxFile).SyncData
             github.com/engram-kv/engram/internal/raftlog.(*Log).Sync
             github.com/engram-kv/engram/internal/consensus.(*LogWriter).Step
-----------+-------------------------------------------------------
      10ms   runtime.mallocgc
             github.com/engram-kv/engram/internal/rpc.(*KV).put (inline)
             github.com/engram-kv/engram/internal/grpcserver.(*conn).serve
-----------+-------------------------------------------------------
      30ms   github.com/engram-kv/engram/internal/consensus.(*Core).Step
-----------+-------------------------------------------------------
      40ms   golang.org/x/sys/unix.Write
             github.com/engram-kv/engram/internal/grpcserver.(*conn).flush
             github.com/engram-kv/engram/internal/grpcserver.(*conn).serve
`

func TestDivide(t *testing.T) {
	got, err := divide(strings.NewReader(traces))
	if err != nil {
		t.Fatal(err)
	}
	for stage, want := range map[string]time.Duration{beside: 60 * time.Millisecond, apply: 1200 * time.Millisecond, persist: 20 * time.Millisecond,
		read: 10 * time.Millisecond, order: 30 * time.Millisecond, answer: 40 * time.Millisecond} {
		if got[stage] != want {
			t.Errorf("%s: %v, want %v", stage, got[stage], want)
		}
	}
	if _, err := divide(strings.NewReader("-----------+---\n  what runtime.x\n")); err == nil {
		t.Error("a stack without a time was taken")
	}
}

func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cpu")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); {
	}
	pprof.StopCPUProfile()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := run(10, []string{file}, &out); err != nil {
		t.Fatal(err)
	}
	// No function of this test has a stage.
	if !strings.Contains(out.String(), "collection | 100 % | 10.00 |") {
		t.Errorf("printed\n%s", out.String())
	}
	for _, args := range [][]string{nil, {file, file}, {file + "-not-there"}} {
		if err := run(10, args, &out); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}
