package ctl

import (
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
	if got := run("--endpoints", free, "--command-timeout=300ms", "get", "a"); !strings.Contains(got, "Hint: nothing listens at "+free) {
		t.Errorf("nobody there: %s", got)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	if got := run("--endpoints", "https://"+silent.Addr().String(), "--command-timeout=300ms", "get", "a"); !strings.Contains(got, "use http://") {
		t.Errorf("wrong scheme: %s", got)
	}
	if got := run("snapshot", "save", "x"); !strings.Contains(got, "Hint: snapshot: this version has no snapshots yet") {
		t.Errorf("later command: %s", got)
	}
	if got := run("nonsense"); strings.Contains(got, "Hint:") {
		t.Errorf("nonsense: %s", got)
	}
}
