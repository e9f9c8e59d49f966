package compat

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	spaceQuota = 4 << 20
	spaceValue = 100_000 // bytes
	spaceFills = 200     // puts, at most: some forty fill the quota
	// clearsAfter is longer than an Engram leader of Engram members takes to clear the alarm of a store that has space again: it waits ten seconds.
	clearsAfter = 15 * time.Second
)

// TestMixedSpace fills a mixed cluster. All members refuse the same, and go on with the same; the alarm stays, though an Engram leads and there is space
// again, until somebody clears it, since members of etcd leave that to people. Then all take writes.
func TestMixedSpace(t *testing.T) {
	t.Parallel() // it waits for the clock
	for name, programs := range compositions(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := mixedContext(t)
			c := newCluster(t, append(quick, fmt.Sprintf("--quota-backend-bytes=%d", spaceQuota))...)
			check(t, c.Start(ctx, programs...))
			check(t, lead(ctx, c, c.Of(programs[2].Name)))
			clients := make([]*clientv3.Client, len(programs))
			for i, m := range c.Members() {
				var err error
				clients[i], err = m.Client()
				check(t, err)
				for _, key := range []string{"small", "deleted", "deleted too"} {
					_, err = clients[i].Put(ctx, fmt.Sprint(key, i), "v")
					check(t, err)
				}
			}
			var full error
			for i := 0; i < spaceFills && full == nil; i++ {
				_, full = clients[i%len(clients)].Put(ctx, "fill", strings.Repeat("x", spaceValue))
			}
			if !errors.Is(full, rpctypes.ErrNoSpace) {
				t.Fatalf("filling ended with %v", full)
			}
			check(t, eventually(ctx, "alarm", func() error {
				if all, err := alarms(ctx, c); err != nil || len(all) == 0 {
					return fmt.Errorf("alarms %v: %w", all, err)
				}
				return nil
			}))

			// Each asks for the same, through its own member. A small overwrite passes only where all members are Engram.
			same := func(when string, want map[string]string) {
				t.Helper()
				for what, want := range want {
					for i, m := range c.Members() {
						got, err := spaceAnswer(ctx, clients[i], what, i)
						check(t, err)
						if got != want {
							t.Error(broken.Errorf("%s, %v answers %s with %q, want %q", when, m, what, got, want))
						}
					}
				}
				_, err := c.CheckHash(ctx)
				check(t, err)
			}
			refused := rpctypes.ErrNoSpace.Error()
			same("full", map[string]string{
				"put": refused, "overwrite": refused, "txn that puts": refused, "txn that puts otherwise": refused, "grant": refused,
				"get": "1 key", "txn that reads": "1 key", "delete": "1 deleted", "txn that deletes": "1 deleted",
			})

			before, err := alarms(ctx, c)
			check(t, err)
			r, err := clients[0].Delete(ctx, "fill")
			check(t, err)
			_, err = clients[1].Compact(ctx, r.Header.Revision, clientv3.WithCompactPhysical())
			check(t, err)
			for _, m := range c.Members() {
				_, err := clients[0].Defragment(ctx, m.ClientURL)
				check(t, err)
			}
			for _, m := range c.Members() {
				s, err := m.Status(ctx)
				check(t, err)
				if s.DbSizeInUse > spaceQuota/2 {
					t.Fatalf("%v still uses %d bytes of %d", m, s.DbSizeInUse, spaceQuota)
				}
			}
			check(t, lead(ctx, c, c.Of(programs[2].Name)))
			for until := time.Now().Add(clearsAfter); time.Now().Before(until); {
				now, err := alarms(ctx, c)
				check(t, err)
				if !slices.Equal(now, before) {
					t.Fatal(broken.Errorf("alarms %v, want %v until somebody clears them", now, before))
				}
				select {
				case <-ctx.Done():
					t.Fatal(ctx.Err())
				case <-time.After(time.Second / 2): // it is a time in which nothing may happen
				}
			}
			same("with space again", map[string]string{"put": refused, "overwrite": refused, "grant": refused, "get": "0 keys"})

			_, err = clients[2].AlarmDisarm(ctx, &clientv3.AlarmMember{})
			check(t, err)
			if left, err := alarms(ctx, c); err != nil || len(left) > 0 {
				t.Fatalf("after they were cleared: alarms %v: %v", left, err)
			}
			same("cleared", map[string]string{"put": "", "overwrite": "", "txn that puts": "", "txn that puts otherwise": "", "grant": "", "get": "0 keys"})
			if again, err := alarms(ctx, c); err != nil || len(again) > 0 {
				t.Fatalf("after writes: alarms %v: %v", again, err)
			}
		})
	}
}

// spaceAnswer asks a member for something and tells the outcome, which may be that there is no space.
func spaceAnswer(ctx context.Context, client *clientv3.Client, what string, member int) (said string, err error) {
	never := clientv3.Compare(clientv3.Version("absent"), ">", 0)
	own := func(key string) string { return fmt.Sprint(key, member) }
	found := func(n int) string {
		if n == 1 {
			return "1 key"
		}
		return fmt.Sprintf("%d keys", n)
	}
	var txn *clientv3.TxnResponse
	switch what {
	case "put":
		_, err = client.Put(ctx, own("put"), "v")
	case "overwrite":
		_, err = client.Put(ctx, own("small"), "w")
	case "txn that puts":
		_, err = client.Txn(ctx).Then(clientv3.OpPut(own("txn"), "v")).Commit()
	case "txn that puts otherwise": // what it holds counts, not what would be done
		_, err = client.Txn(ctx).If(never).Then(clientv3.OpPut("absent", "v")).Else(clientv3.OpGet("fill")).Commit()
	case "grant":
		_, err = client.Grant(ctx, 3600)
	case "get":
		var r *clientv3.GetResponse
		if r, err = client.Get(ctx, "fill"); err == nil {
			said = found(len(r.Kvs))
		}
	case "txn that reads":
		if txn, err = client.Txn(ctx).Then(clientv3.OpGet("fill")).Commit(); err == nil {
			said = found(len(txn.Responses[0].GetResponseRange().Kvs))
		}
	case "delete":
		var r *clientv3.DeleteResponse
		if r, err = client.Delete(ctx, own("deleted")); err == nil {
			said = fmt.Sprintf("%d deleted", r.Deleted)
		}
	case "txn that deletes":
		if txn, err = client.Txn(ctx).Then(clientv3.OpDelete(own("deleted too"))).Commit(); err == nil {
			said = fmt.Sprintf("%d deleted", txn.Responses[0].GetResponseDeleteRange().Deleted)
		}
	default:
		return "", fmt.Errorf("no such question: %q", what)
	}
	if errors.Is(err, rpctypes.ErrNoSpace) {
		return err.Error(), nil
	}
	return said, err
}

// alarms are those that all members list. One that has not applied the last of them yet is asked again.
func alarms(ctx context.Context, c *cluster.Cluster) (all []string, err error) {
	err = eventually(ctx, "equal alarms", func() error {
		for i, m := range c.Members() {
			client, err := m.Client()
			if err != nil {
				return err
			}
			r, err := client.AlarmList(ctx)
			if err != nil {
				return err
			}
			var listed []string
			for _, a := range r.Alarms {
				listed = append(listed, fmt.Sprintf("%x: %v", a.MemberID, a.Alarm))
			}
			slices.Sort(listed)
			if i == 0 {
				all = listed
			} else if !slices.Equal(all, listed) {
				return fmt.Errorf("%v lists %v, another %v", m, listed, all)
			}
		}
		return nil
	})
	return all, err
}
