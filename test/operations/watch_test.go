package operations

import (
	"bufio"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestCompactionOvertakesWatcher stops a client that watches, writes more than is on its way to it, and compacts: going on it is told that it has missed
// changes, rather than given some of them. One that follows misses nothing. Then the page's way to begin anew.
func TestCompactionOvertakesWatcher(t *testing.T) {
	for _, members := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", members), func(t *testing.T) {
			r := begin(t, members)
			c := r.client()
			at := r.c.Members()[members-1].Endpoint()
			watch := exec.CommandContext(r.ctx, r.ctl, "--endpoints="+at, "watch", "object/", "--prefix")
			var told strings.Builder
			watch.Stderr = &told
			out, err := watch.StdoutPipe()
			r.must(err)
			r.must(watch.Start())
			lines := bufio.NewScanner(out)
			lines.Buffer(nil, 4<<20)
			// It watches as soon as it tells of a change.
			stop, ended := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(ended)
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					case <-time.After(50 * time.Millisecond): // one after the other until one is seen
						if _, err := c.Put(r.ctx, "object/first", fmt.Sprint(i)); err != nil {
							return
						}
					}
				}
			}()
			if !lines.Scan() {
				t.Fatalf("the watcher ended: %s", told.String())
			}
			close(stop)
			<-ended
			r.must(watch.Process.Signal(syscall.SIGSTOP))

			follows := c.Watch(r.ctx, "object/", clientv3.WithPrefix())
			value := strings.Repeat("x", 1<<20)
			const puts = 64 // MiB: more than sockets and a server's memory hold for one client
			seen := make(chan error, 1)
			go func() {
				n := 0
				for w := range follows {
					if n += len(w.Events); w.Err() != nil || n == puts {
						seen <- w.Err()
						return
					}
				}
				seen <- fmt.Errorf("it ended after %d changes", n)
			}()
			var last int64
			for i := range puts {
				p, err := c.Put(r.ctx, fmt.Sprintf("object/%d", i%4), value)
				r.must(err)
				last = p.Header.Revision
			}
			select {
			case err := <-seen:
				r.must(err)
			case <-r.ctx.Done():
				t.Fatal("who follows has not seen all changes")
			}
			_, err = c.Compact(r.ctx, last)
			r.must(err)
			r.must(watch.Process.Signal(syscall.SIGCONT))
			n := 0
			for lines.Scan() {
				n++
			}
			if err := watch.Wait(); err == nil || !strings.Contains(told.String(), "required revision has been compacted") {
				t.Fatalf("the watcher that was overtaken ended with %v, after %d lines: %s", err, n, told.String())
			}
			if n >= 3*puts { // three lines for a change
				t.Fatal("it was not overtaken: it has seen all changes")
			}

			// Anew: what there is, and what comes after.
			lines, complaints := r.follow(r.blockCommand("watch-anew", "10.0.0.1:2379", at))
			listed := map[string]bool{}
			for len(listed) < 5 && lines.Scan() {
				if strings.HasPrefix(lines.Text(), "object/") {
					listed[lines.Text()] = true
				}
			}
			if len(listed) != 5 {
				t.Fatalf("it lists %v: %s", listed, complaints.String())
			}
			_, err = c.Put(r.ctx, "object/new", "y")
			r.must(err)
			for _, want := range []string{"PUT", "object/new", "y"} {
				for lines.Scan() && lines.Text() == "" { // between keys of the list
				}
				if lines.Text() != want {
					t.Fatalf("it tells %q, want %q: %s", lines.Text(), want, complaints.String())
				}
			}
		})
	}
}
