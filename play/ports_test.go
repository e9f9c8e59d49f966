package play

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestPortTaken: a member whose port another program took, between being found free and the member's listening, is started once more;
// one that ends so each time has failed, and the user is told why.
func TestPortTaken(t *testing.T) {
	const taken = `echo 'listen tcp 127.0.0.1:20000: bind: address already in use' >&2; exit 1`
	for _, c := range []struct {
		name    string
		times   int // that it is taken
		starts  int
		want    condition
		told    string
		message string // what the process says instead
	}{
		{name: "once", times: 1, starts: 2, want: running},
		{name: "each time", times: 100, starts: 1 + movesMost, want: failed, told: "address already in use"},
		{name: "another failure", times: 100, starts: 1, want: failed, told: "no such thing", message: "echo no such thing >&2; exit 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			starts, script := filepath.Join(dir, "starts"), filepath.Join(dir, "member")
			fails := taken
			if c.message != "" {
				fails = c.message
			}
			text := fmt.Sprintf("#!/bin/sh\necho x >>%s\nif [ $(wc -l <%s) -le %d ]; then %s; fi\nexec sleep 600\n", starts, starts, c.times, fails)
			if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
				t.Fatal(err)
			}
			told := make(chan string, 10)
			cl, err := newCluster(script, filepath.Join(dir, "home"), filepath.Join(dir, "s"), func(text string) { told <- text })
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				hasty, cancel := context.WithCancel(context.Background())
				cancel()
				cl.close(hasty)
			}()
			if err := cl.found(&options{members: 1}); err != nil {
				t.Fatal(err)
			}
			m := cl.list()[0]
			for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
				b, _ := os.ReadFile(starts)
				var is condition
				cl.locked(func() { is = m.condition })
				if n := strings.Count(string(b), "x"); n == c.starts && is == c.want {
					break
				} else if time.Since(began) > time.Minute {
					t.Fatalf("%d starts, %s; want %d, %s", n, is, c.starts, c.want)
				}
			}
			if c.told == "" {
				if len(told) > 0 {
					t.Errorf("the user was told %q", <-told)
				}
				return
			}
			if text := <-told; !strings.Contains(text, c.told) {
				t.Errorf("the user was told %q", text)
			}
		})
	}
}
