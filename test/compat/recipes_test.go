package compat

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/broken"
)

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// TestRecipes runs what programs build from the client library. Each recipe writes down what it saw; both servers must
// make it see the same.
func TestRecipes(t *testing.T) {
	recipes := []struct {
		name string
		run  func(ctx context.Context, c *clientv3.Client, saw func(format string, args ...any)) error
	}{
		{"mutex", mutex}, {"election", election}, {"stm", stm}, {"session", session}, {"counting", counting},
		{"compacted watch", compactedWatch}, {"pages", pages},
	}
	pair, err := process.StartPair(programs.Etcd, subject, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer pair.Close()
	for _, r := range recipes {
		t.Run(r.name, func(t *testing.T) {
			var seen [2]strings.Builder
			err := pair.Each(func(i int, s *process.Side) error {
				c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.ClientURL}})
				if err != nil {
					return err
				}
				defer c.Close()
				ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
				defer cancel()
				saw := func(format string, args ...any) { fmt.Fprintf(&seen[i], format+"\n", args...) }
				if err := r.run(ctx, c, saw); err != nil {
					return fmt.Errorf("on %s: %w; it saw:\n%s", []string{"reference", "subject"}[i], err, seen[i].String())
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if a, b := seen[0].String(), seen[1].String(); a != b {
				t.Error(broken.Errorf("the recipe saw\non reference:\n%s\non subject:\n%s", a, b))
			}
		})
	}
}

func mutex(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	const contenders = 4
	first, err := concurrency.NewSession(c)
	if err != nil {
		return err
	}
	held := concurrency.NewMutex(first, "/mutex")
	if err := held.Lock(ctx); err != nil {
		return err
	}
	saw("locked")
	var wg sync.WaitGroup
	errs := make([]error, contenders)
	inside, most, entered := 0, 0, 0
	var mu sync.Mutex
	for i := range contenders {
		s, err := concurrency.NewSession(c)
		if err != nil {
			return err
		}
		m := concurrency.NewMutex(s, "/mutex")
		if err := m.TryLock(ctx); !errors.Is(err, concurrency.ErrLocked) {
			return fmt.Errorf("TryLock of a held mutex: %v", err)
		}
		wg.Go(func() {
			if errs[i] = m.Lock(ctx); errs[i] != nil {
				return
			}
			mu.Lock()
			inside++
			entered++
			most = max(most, inside)
			mu.Unlock()
			if r, err := c.Txn(ctx).If(m.IsOwner()).Commit(); err != nil || !r.Succeeded {
				errs[i] = fmt.Errorf("the holder is not the owner: %v", err)
			}
			mu.Lock()
			inside--
			mu.Unlock()
			errs[i] = errors.Join(errs[i], m.Unlock(ctx), s.Close())
		})
	}
	if err := held.Unlock(ctx); err != nil {
		return err
	}
	wg.Wait()
	saw("%d entered, %d at once", entered, most)
	left, err := c.Get(ctx, "/mutex", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return err
	}
	saw("%d keys left", left.Count)
	return errors.Join(append(errs, first.Close())...)
}

func election(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	var sessions [2]*concurrency.Session
	var candidates [2]*concurrency.Election
	for i := range sessions {
		var err error
		if sessions[i], err = concurrency.NewSession(c); err != nil {
			return err
		}
		candidates[i] = concurrency.NewElection(sessions[i], "/election")
	}
	if _, err := candidates[0].Leader(ctx); !errors.Is(err, concurrency.ErrElectionNoLeader) {
		return fmt.Errorf("leader before a campaign: %v", err)
	}
	observed := candidates[1].Observe(ctx)
	if err := candidates[0].Campaign(ctx, "first"); err != nil {
		return err
	}
	saw("observed %s", (<-observed).Kvs[0].Value)
	if err := candidates[0].Proclaim(ctx, "still first"); err != nil {
		return err
	}
	saw("observed %s", (<-observed).Kvs[0].Value)
	won := make(chan error, 1)
	go func() { won <- candidates[1].Campaign(ctx, "second") }()
	for { // until the second stands in line
		r, err := c.Get(ctx, "/election", clientv3.WithPrefix())
		if err != nil {
			return err
		}
		if r.Count == 2 {
			break
		}
	}
	leader, err := candidates[1].Leader(ctx)
	if err != nil {
		return err
	}
	saw("leader %s", leader.Kvs[0].Value)
	if err := sessions[0].Close(); err != nil { // the first one's lease goes, and its key with it
		return err
	}
	if err := <-won; err != nil {
		return err
	}
	saw("observed %s", (<-observed).Kvs[0].Value)
	if err := candidates[0].Proclaim(ctx, "x"); err == nil {
		return errors.New("the one who lost can proclaim")
	}
	if err := candidates[1].Resign(ctx); err != nil {
		return err
	}
	_, err = candidates[1].Leader(ctx)
	saw("in the end: %v", err)
	return sessions[1].Close()
}

func stm(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	const accounts, workers, transfers, start = 4, 4, 25, 100
	for i := range accounts {
		if _, err := c.Put(ctx, fmt.Sprintf("/stm/%d", i), strconv.Itoa(start)); err != nil {
			return err
		}
	}
	levels := []concurrency.Isolation{concurrency.SerializableSnapshot, concurrency.Serializable}
	for _, level := range levels {
		var wg sync.WaitGroup
		errs := make([]error, workers)
		for w := range workers {
			wg.Go(func() {
				for i := range transfers {
					from, to := fmt.Sprintf("/stm/%d", (w+i)%accounts), fmt.Sprintf("/stm/%d", (w+2*i+1)%accounts)
					if from == to {
						continue
					}
					_, err := concurrency.NewSTM(c, func(s concurrency.STM) error {
						a, err := strconv.Atoi(s.Get(from))
						if err != nil {
							return err
						}
						b, err := strconv.Atoi(s.Get(to))
						if err != nil {
							return err
						}
						s.Put(from, strconv.Itoa(a-1))
						s.Put(to, strconv.Itoa(b+1))
						return nil
					}, concurrency.WithIsolation(level), concurrency.WithAbortContext(ctx))
					errs[w] = errors.Join(errs[w], err)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		r, err := c.Get(ctx, "/stm/", clientv3.WithPrefix())
		if err != nil {
			return err
		}
		sum := 0
		for _, kv := range r.Kvs {
			n, err := strconv.Atoi(string(kv.Value))
			if err != nil {
				return err
			}
			sum += n
			saw("isolation %d: %s = %d", level, kv.Key, n) // each transfer is done once, in whatever order
		}
		saw("isolation %d: sum %d", level, sum)
	}
	return nil
}

func session(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	s, err := concurrency.NewSession(c, concurrency.WithTTL(5)) // time enough to be kept alive on a busy machine
	if err != nil {
		return err
	}
	put, err := c.Put(ctx, "/session/key", "v", clientv3.WithLease(s.Lease()))
	if err != nil {
		return err
	}
	gone := c.Watch(ctx, "/session/", clientv3.WithPrefix(), clientv3.WithRev(put.Header.Revision+1)) // however late it is there
	alive, err := c.TimeToLive(ctx, s.Lease(), clientv3.WithAttachedKeys())
	if err != nil {
		return err
	}
	saw("granted %d, keys %q", alive.GrantedTTL, alive.Keys)
	s.Orphan() // no more keep-alives: the server lets it expire
	r := <-gone
	if r.Err() != nil || len(r.Events) != 1 {
		return fmt.Errorf("watching the session end: %v, %v", r.Err(), r.Events)
	}
	saw("%s %s", r.Events[0].Type, r.Events[0].Kv.Key)
	dead, err := c.TimeToLive(ctx, s.Lease())
	if err != nil {
		return err
	}
	saw("remaining %d", dead.TTL)
	_, err = c.KeepAliveOnce(ctx, s.Lease())
	saw("keep alive: %v", err)
	return nil
}

// counting has several writers add to one number by compare-and-swap.
func counting(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	const writers, additions = 4, 30
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for w := range writers {
		wg.Go(func() {
			for range additions {
				for done := false; !done && errs[w] == nil; {
					r, err := c.Get(ctx, "/count")
					if err != nil {
						errs[w] = err
						return
					}
					n, revision := 0, int64(0)
					if len(r.Kvs) == 1 {
						n, _ = strconv.Atoi(string(r.Kvs[0].Value)) // written below only
						revision = r.Kvs[0].ModRevision
					}
					t, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision("/count"), "=", revision)).
						Then(clientv3.OpPut("/count", strconv.Itoa(n+1))).Commit()
					if err != nil {
						errs[w] = err
						return
					}
					done = t.Succeeded
				}
			}
		})
	}
	wg.Wait()
	r, err := c.Get(ctx, "/count")
	if err != nil {
		return err
	}
	saw("%s after %d versions", r.Kvs[0].Value, r.Kvs[0].Version)
	return errors.Join(errs...)
}

func compactedWatch(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	var last int64
	for i := range 5 {
		r, err := c.Put(ctx, "/compacted", strconv.Itoa(i))
		if err != nil {
			return err
		}
		last = r.Header.Revision
	}
	if _, err := c.Compact(ctx, last-1, clientv3.WithCompactPhysical()); err != nil {
		return err
	}
	r := <-c.Watch(ctx, "/compacted", clientv3.WithRev(last-3))
	saw("canceled %t, compacted %d before the last: %v", r.Canceled, last-r.CompactRevision, r.Err())
	r = <-c.Watch(ctx, "/compacted", clientv3.WithRev(r.CompactRevision), clientv3.WithPrevKV())
	for _, e := range r.Events {
		saw("%s version %d, created %t", e.Kv.Value, e.Kv.Version, e.IsCreate())
	}
	return nil
}

// pages reads many keys in pages of one revision while they change, as Kubernetes does.
func pages(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	const keys, page = 70, 20
	for i := range keys {
		if _, err := c.Put(ctx, fmt.Sprintf("/pages/%03d", i), "old"); err != nil {
			return err
		}
	}
	next, revision := "/pages/", int64(0)
	for more := true; more; {
		r, err := c.Get(ctx, next, clientv3.WithRange(clientv3.GetPrefixRangeEnd("/pages/")), clientv3.WithLimit(page), clientv3.WithRev(revision))
		if err != nil {
			return err
		}
		if revision == 0 {
			revision = r.Header.Revision
		}
		last := r.Kvs[len(r.Kvs)-1]
		saw("%d keys of %d from %q, more %t, the last %s=%s", len(r.Kvs), r.Count, next, r.More, last.Key, last.Value)
		next, more = string(last.Key)+"\x00", r.More
		if _, err := c.Put(ctx, string(last.Key)+"x", "new"); err != nil {
			return err
		}
		if _, err := c.Delete(ctx, next, clientv3.WithRange(next+"\xff")); err != nil {
			return err
		}
	}
	return nil
}
