package compat

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	recipe "go.etcd.io/etcd/client/v3/experimental/recipes"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/client/v3/leasing"
	"go.etcd.io/etcd/client/v3/mirror"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.etcd.io/etcd/client/v3/naming/endpoints"
	"go.etcd.io/etcd/client/v3/ordering"

	"github.com/engram-kv/engram/test/compat/internal/process"
)

// TestClientPackages uses the packages that etcd's client library has beside the client itself. Each writes down what it saw;
// both servers must make it see the same.
func TestClientPackages(t *testing.T) {
	packages := []struct {
		name string
		run  func(ctx context.Context, c *clientv3.Client, saw func(format string, args ...any)) error
	}{
		{"namespace", useNamespace}, {"ordering", useOrdering}, {"mirror", useMirror}, {"leasing", useLeasing},
		{"naming", useNaming}, {"kubernetes", useKubernetes}, {"recipes", useRecipes}, {"stm levels", useLevels},
	}
	pair, ctx := surfacePair(t), surfaceContext(t)
	for _, p := range packages {
		t.Run(p.name, func(t *testing.T) {
			var seen [2]string
			err := pair.Each(func(i int, s *process.Side) error {
				c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.ClientURL}})
				if err != nil {
					return err
				}
				defer c.Close()
				var b strings.Builder
				err = p.run(ctx, c, func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) })
				seen[i] = b.String()
				if err != nil {
					return fmt.Errorf("on %s: %w; it saw:\n%s", []string{"etcd", "subject"}[i], err, seen[i])
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			equal(t, p.name, seen)
		})
	}
}

func useNamespace(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	kv, w := namespace.NewKV(c.KV, "ns/"), namespace.NewWatcher(c.Watcher, "ns/")
	defer w.Close()
	events := w.Watch(ctx, "", clientv3.WithFromKey())
	for _, key := range []string{"a", "b", "\xff"} {
		if _, err := kv.Put(ctx, key, "v"); err != nil {
			return err
		}
		r := <-events
		saw("event %q", r.Events[0].Kv.Key)
	}
	all, err := kv.Get(ctx, "", clientv3.WithFromKey())
	if err != nil {
		return err
	}
	for _, kv := range all.Kvs {
		saw("inside %q", kv.Key)
	}
	outside, err := c.Get(ctx, "ns", clientv3.WithPrefix())
	if err != nil {
		return err
	}
	for _, kv := range outside.Kvs {
		saw("outside %q", kv.Key)
	}
	r, err := kv.Txn(ctx).If(clientv3.Compare(clientv3.Version("a"), "=", 1)).Then(clientv3.OpDelete("", clientv3.WithPrefix())).Commit()
	if err != nil {
		return err
	}
	saw("%t, deleted %d", r.Succeeded, r.Responses[0].GetResponseDeleteRange().Deleted)
	return nil
}

func useOrdering(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	kv := ordering.NewKV(c.KV, func(op clientv3.Op, _ clientv3.OpResponse, _ int64) error {
		return fmt.Errorf("an older revision than seen before for %q", op.KeyBytes())
	})
	for i := range 5 {
		if _, err := c.Put(ctx, "order", itoa(int64(i))); err != nil {
			return err
		}
		for _, options := range [][]clientv3.OpOption{nil, {clientv3.WithSerializable()}} {
			r, err := kv.Get(ctx, "order", options...)
			if err != nil {
				return err
			}
			saw("%s", r.Kvs[0].Value)
		}
	}
	return nil
}

func useMirror(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	const keys = 1500 // more than one page
	for i := range keys {
		if _, err := c.Put(ctx, fmt.Sprintf("mirror/%04d", i), "v"); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := mirror.NewSyncer(c, "mirror/", 0)
	pages, failed := s.SyncBase(ctx)
	n := 0
	for page := range pages {
		n += len(page.Kvs)
		saw("page of %d", len(page.Kvs))
	}
	if err := <-failed; err != nil {
		return err
	}
	updates := s.SyncUpdates(ctx)
	if _, err := c.Txn(ctx).Then(clientv3.OpPut("mirror/x", "1"), clientv3.OpDelete("mirror/0000")).Commit(); err != nil {
		return err
	}
	for _, e := range (<-updates).Events {
		saw("%d keys, then %s %s", n, e.Type, e.Kv.Key)
	}
	return nil
}

// useLeasing has two clients own and give up cached keys.
func useLeasing(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	first, closeFirst, err := leasing.NewKV(c, "leasing/")
	if err != nil {
		return err
	}
	defer closeFirst()
	second, closeSecond, err := leasing.NewKV(c, "leasing/")
	if err != nil {
		return err
	}
	defer closeSecond()
	if _, err := c.Put(ctx, "owned", "1"); err != nil {
		return err
	}
	for _, kv := range []clientv3.KV{first, first, second} {
		r, err := kv.Get(ctx, "owned")
		if err != nil {
			return err
		}
		saw("read %s", r.Kvs[0].Value)
	}
	if _, err := second.Put(ctx, "owned", "2"); err != nil { // the owner must be asked to give it up
		return err
	}
	r, err := first.Get(ctx, "owned")
	if err != nil {
		return err
	}
	saw("read %s", r.Kvs[0].Value)
	t, err := first.Txn(ctx).If(clientv3.Compare(clientv3.Value("owned"), "=", "2")).Then(clientv3.OpDelete("owned")).Commit()
	if err != nil {
		return err
	}
	saw("deleted %t", t.Succeeded)
	r, err = second.Get(ctx, "owned")
	if err != nil {
		return err
	}
	saw("%d left", len(r.Kvs))
	return nil
}

func useNaming(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	m, err := endpoints.NewManager(c, "service")
	if err != nil {
		return err
	}
	updates, err := m.NewWatchChannel(ctx)
	if err != nil {
		return err
	}
	if err := m.AddEndpoint(ctx, "service/a", endpoints.Endpoint{Addr: "127.0.0.1:1", Metadata: "m"}); err != nil {
		return err
	}
	for _, u := range <-updates {
		saw("%v %s %s %v", u.Op, u.Key, u.Endpoint.Addr, u.Endpoint.Metadata)
	}
	raw, err := c.Get(ctx, "service/a")
	if err != nil {
		return err
	}
	saw("%s", raw.Kvs[0].Value)
	all, err := m.List(ctx)
	if err != nil {
		return err
	}
	saw("%v", all)
	return m.DeleteEndpoint(ctx, "service/a")
}

func useKubernetes(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	k := kubernetes.Client{Client: c}
	k.Kubernetes = k
	created, err := k.OptimisticPut(ctx, "/registry/pods/a", []byte("1"), 0, kubernetes.PutOptions{})
	if err != nil {
		return err
	}
	again, err := k.OptimisticPut(ctx, "/registry/pods/a", []byte("2"), 0, kubernetes.PutOptions{GetOnFailure: true})
	if err != nil {
		return err
	}
	saw("created %t, again %t, there is %s", created.Succeeded, again.Succeeded, again.KV.Value)
	updated, err := k.OptimisticPut(ctx, "/registry/pods/a", []byte("2"), again.KV.ModRevision, kubernetes.PutOptions{})
	if err != nil {
		return err
	}
	for i := range 5 {
		if _, err := k.OptimisticPut(ctx, fmt.Sprintf("/registry/pods/b%d", i), nil, 0, kubernetes.PutOptions{}); err != nil {
			return err
		}
	}
	page, err := k.List(ctx, "/registry/pods/", kubernetes.ListOptions{Limit: 2})
	if err != nil {
		return err
	}
	rest, err := k.List(ctx, "/registry/pods/", kubernetes.ListOptions{Continue: string(page.Kvs[1].Key) + "\x00", Revision: page.Revision})
	if err != nil {
		return err
	}
	count, err := k.Count(ctx, "/registry/pods/", kubernetes.CountOptions{})
	if err != nil {
		return err
	}
	saw("updated %t; %d of %d, then %d; count %d", updated.Succeeded, len(page.Kvs), page.Count, len(rest.Kvs), count)
	one, err := k.Get(ctx, "/registry/pods/a", kubernetes.GetOptions{})
	if err != nil {
		return err
	}
	stale, err := k.OptimisticDelete(ctx, "/registry/pods/a", one.KV.ModRevision-1, kubernetes.DeleteOptions{GetOnFailure: true})
	if err != nil {
		return err
	}
	deleted, err := k.OptimisticDelete(ctx, "/registry/pods/a", one.KV.ModRevision, kubernetes.DeleteOptions{})
	if err != nil {
		return err
	}
	saw("stale delete %t of %s; delete %t", stale.Succeeded, stale.KV.Value, deleted.Succeeded)
	return nil
}

func useRecipes(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	q := recipe.NewQueue(c, "queue")
	for _, v := range []string{"1", "2", "3"} {
		if err := q.Enqueue(v); err != nil {
			return err
		}
	}
	for range 3 {
		v, err := q.Dequeue()
		if err != nil {
			return err
		}
		saw("dequeued %s", v)
	}
	p := recipe.NewPriorityQueue(c, "priority")
	for i, v := range []string{"last", "middle", "first"} {
		if err := p.Enqueue(v, uint16(9-i)); err != nil {
			return err
		}
	}
	for range 3 {
		v, err := p.Dequeue()
		if err != nil {
			return err
		}
		saw("dequeued %s", v)
	}
	b := recipe.NewBarrier(c, "barrier")
	if err := b.Hold(); err != nil {
		return err
	}
	waited := make(chan error, 1)
	go func() { waited <- recipe.NewBarrier(c, "barrier").Wait() }()
	if err := errors.Join(b.Release(), <-waited); err != nil {
		return err
	}
	saw("released")
	var wg sync.WaitGroup
	var errs [3]error
	for i := range errs {
		s, err := concurrency.NewSession(c)
		if err != nil {
			return err
		}
		defer s.Close()
		wg.Go(func() {
			d := recipe.NewDoubleBarrier(s, "double", len(errs))
			errs[i] = errors.Join(d.Enter(), d.Leave())
			rw := recipe.NewRWMutex(s, "rw")
			errs[i] = errors.Join(errs[i], rw.RLock(), rw.RUnlock(), rw.Lock(), rw.Unlock())
		})
	}
	wg.Wait()
	left, err := c.Get(ctx, "rw", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return err
	}
	saw("through, %d keys left", left.Count)
	return errors.Join(errs[:]...)
}

func useLevels(ctx context.Context, c *clientv3.Client, saw func(string, ...any)) error {
	for _, level := range []concurrency.Isolation{
		concurrency.SerializableSnapshot, concurrency.Serializable, concurrency.RepeatableReads, concurrency.ReadCommitted,
	} {
		r, err := concurrency.NewSTM(c, func(s concurrency.STM) error {
			s.Put("level", s.Get("level")+"x")
			return nil
		}, concurrency.WithIsolation(level), concurrency.WithAbortContext(ctx))
		if err != nil {
			return err
		}
		saw("level %d: %t", level, r.Succeeded)
	}
	v, err := c.Get(ctx, "level")
	if err != nil {
		return err
	}
	saw("%s", v.Kvs[0].Value)
	return nil
}
