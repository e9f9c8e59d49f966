package ctl

import (
	"context"
	"net"
	"strings"
	"testing"
)

func TestHintNamesWhatIsWrong(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		var out, told strings.Builder
		if code := Run(t.Context(), "engram ctl", args, Streams{In: strings.NewReader(""), Out: &out, Err: &told}); code == 0 {
			t.Fatalf("%q succeeded", args)
		}
		return told.String()
	}
	if got := run("--endpoints", free, "--command-timeout=300ms", "get", "a"); !strings.Contains(got, "Error: nothing listens at "+free+" (context deadline exceeded)\nHint: connection refused") {
		t.Errorf("nobody there: %s", got)
	}
	if got := run("--endpoints", free, "--command-timeout=300ms", "endpoint", "health"); !strings.Contains(got, "Error: nothing listens at "+free+" (unhealthy cluster)\nHint: connection refused") {
		t.Errorf("health: %s", got)
	}
	if got := run("--endpoints", free, "--command-timeout=300ms", "endpoint", "status"); !strings.Contains(got, "(context deadline exceeded)\nHint: nothing listens at "+free) {
		t.Errorf("status: %s", got)
	}
	// A member that serves and knows no leader.
	lost := newFake()
	lost.status.Leader, lost.refuse = 0, context.DeadlineExceeded
	if got := run("--endpoints", lost.serve(t, nil), "--command-timeout=300ms", "get", "a"); !strings.Contains(got, "knows no leader (context deadline exceeded)\nHint: a quorum") {
		t.Errorf("no leader: %s", got)
	}
	if got := run("make-mirror", "x"); !strings.Contains(got, "Hint: make-mirror: this version has no mirroring yet") {
		t.Errorf("later command: %s", got)
	}
	if got := run("nonsense"); strings.Contains(got, "Hint:") {
		t.Errorf("nonsense: %s", got)
	}
}
