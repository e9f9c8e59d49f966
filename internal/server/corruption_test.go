package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/server"
	"github.com/engram-kv/engram/internal/storage"
)

// gate is a log that holds whoever writes a message until it is opened.
type gate struct {
	slog.Handler
	message string
	reached chan struct{} // gets one for each
	open    chan struct{} // closed
}

func (g *gate) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == g.message {
		g.reached <- struct{}{}
		<-g.open
	}
	return g.Handler.Handle(ctx, r)
}

// TestInitialCheckBesideCalls: a member with more data than is read before it serves compares itself beside the first calls. Held in the
// midst of that, it serves; if it differs, it ends for that reason, and otherwise goes on.
func TestInitialCheckBesideCalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, held string
		spoil      bool
	}{
		{"equal", "keys are those of the other members", false},
		{"different", "keys seem to differ from those of other members, the comparison is repeated", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := []*clusterMember{newClusterMember(t, "a"), newClusterMember(t, "b"), newClusterMember(t, "c")}
			for _, m := range all {
				m.start(all, "new")
			}
			cli := dialMembers(t, all...)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var last int64
			for i := range 20 {
				p, err := cli.Put(ctx, fmt.Sprintf("key%d", i), strings.Repeat("v", 500))
				if err != nil {
					t.Fatal(err)
				}
				last = p.Header.Revision
			}
			victim := all[1]
			own := dialMembers(t, victim)
			for rev := int64(0); rev < last; { // it has all of them
				r, err := own.Get(ctx, "key0", clientv3.WithSerializable())
				if err != nil {
					t.Fatal(err)
				}
				rev = r.Header.Revision
			}
			victim.close()
			if c.spoil {
				spoil(t, victim.dir, "key7")
			}
			g := &gate{slog.NewTextHandler(testWriter{t, "b"}, nil), c.held, make(chan struct{}, 10), make(chan struct{})}
			victim.seams, victim.log = server.Seams{InitialHashBytes: 1}, slog.New(g)
			victim.start(all, "new")
			open := sync.OnceFunc(func() { close(g.open) })
			t.Cleanup(open) // before the member is stopped, which waits for who is held
			select {
			case <-g.reached:
			case err := <-victim.ended:
				t.Fatalf("it ended: %v", err)
			case <-ctx.Done():
				t.Fatal("it compares nothing")
			}
			waitServes(ctx, t, own) // it has to connect anew
			p, err := own.Put(ctx, "while it compares", "x")
			if err != nil {
				t.Fatalf("a put while it compares: %v", err)
			}
			if r, err := own.Get(ctx, "while it compares"); err != nil || r.Count != 1 || r.Header.Revision < p.Header.Revision {
				t.Fatalf("a read while it compares: %v %v", r, err)
			}
			open()
			if c.spoil {
				select {
				case err := <-victim.ended:
					if !errors.Is(err, server.ErrDiffers) || !strings.Contains(err.Error(), "engram ctl rebuild") {
						t.Fatalf("it ended with %v", err)
					}
				case <-ctx.Done():
					t.Fatal("it differs, and runs")
				}
				if _, err := dialMembers(t, all[0], all[2]).Put(ctx, "after", "x"); err != nil {
					t.Fatal(err)
				}
				return
			}
			if _, err := own.Put(ctx, "after", "x"); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// spoil changes one byte of a value in the store of a member that does not run, with checksums that fit.
func spoil(t *testing.T, dir, key string) {
	t.Helper()
	s, err := storage.Open(storage.Options{Dir: filepath.Join(dir, "store")})
	if err != nil {
		t.Fatal(err)
	}
	lower, upper := storage.RevisionBounds(0, 0)
	iter, err := s.Iter(t.Context(), lower, upper)
	if err != nil {
		t.Fatal(err)
	}
	b, found := s.NewBatch(), false
	for ok := iter.First(); ok; ok = iter.Next() {
		if strings.Contains(string(iter.Value()), key) {
			value := append([]byte(nil), iter.Value()...)
			value[len(value)/2] ^= 1 // of this test's values, which are long
			b.Set(append([]byte(nil), iter.Key()...), value)
			found = true
		}
	}
	if err := errors.Join(iter.Error(), iter.Close(), s.Commit(b), s.Close()); err != nil || !found {
		t.Fatalf("spoiling %s: %v, found %t", key, err, found)
	}
}

// TestInitialCheckAlone: a member whose peers are away compares with nobody, and does not count that.
func TestInitialCheckAlone(t *testing.T) {
	all := []*clusterMember{newClusterMember(t, "a"), newClusterMember(t, "b")}
	for _, m := range all {
		m.start(all, "new")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := dialMembers(t, all...).Put(ctx, "key", "v"); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		m.close()
	}
	open := make(chan struct{})
	close(open)
	compared := &gate{slog.NewTextHandler(testWriter{t, "a"}, nil), "keys are those of the other members", make(chan struct{}, 10), open}
	alone := &gate{compared, "no other member had keys to compare with those of this one", make(chan struct{}, 10), open}
	all[0].log = slog.New(alone)
	all[0].start(all, "new")
	select {
	case <-alone.reached:
	case <-compared.reached:
		t.Error("it compared with a member that is away")
	case <-ctx.Done():
		t.Fatal("it does not check")
	}
	all[1].start(all, "new")
	if _, err := dialMembers(t, all[0]).Put(ctx, "both", "v"); err != nil {
		t.Fatal(err)
	}
	r, err := http.Get(all[0].client + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if want := `engram_hash_checks_total{kind="initial",result="equal"} 0`; err != nil || !strings.Contains(string(body), want) {
		t.Errorf("the metrics lack %s (%v)", want, err)
	}
}
