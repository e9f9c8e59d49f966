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

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/leader"
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
			last := putKeys(ctx, t, cli)
			victim := all[1]
			own := dialMembers(t, victim)
			waitRevision(ctx, t, victim, last)
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

// TestChecksWhileRunning: a member whose keys differ, and which does not look by itself, is found by either comparison that the leader
// makes, and named by the alarm; the cluster takes no more writes until that is settled.
func TestChecksWhileRunning(t *testing.T) {
	t.Parallel()
	for kind, flags := range map[string][]string{
		leader.CheckStore:      {"--corrupt-check-time=1s", "--feature-gates=InitialCorruptCheck=false,CompactHashCheck=false"},
		leader.CheckCompaction: {"--corrupt-check-time=0s", "--compact-hash-check-time=1s", "--feature-gates=InitialCorruptCheck=false"},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			all := []*clusterMember{newClusterMember(t, "a"), newClusterMember(t, "b"), newClusterMember(t, "c")}
			for _, m := range all {
				m.start(all, "new", flags...)
			}
			cli, victim := dialMembers(t, all...), all[1]
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			last := putKeys(ctx, t, cli)
			for _, m := range all {
				waitRevision(ctx, t, m, last)
			}
			checked := func(m *clusterMember, result string) float64 {
				return metric(ctx, t, m.client, fmt.Sprintf("engram_hash_checks_total{kind=%q,result=%q}", kind, result))
			}
			compacted := func(rev int64) {
				t.Helper()
				if _, err := cli.Compact(ctx, rev, clientv3.WithCompactPhysical()); err != nil {
					t.Fatal(err)
				}
			}
			compacted(last - 10)
			for sum := 0.0; sum == 0; { // all is well so far
				for _, m := range all {
					sum += checked(m, "equal")
				}
			}
			victim.close()
			spoil(t, victim.dir, "key17")
			victim.start(all, "new", flags...)
			waitServes(ctx, t, dialMembers(t, victim))
			compacted(last)
			members, err := cli.MemberList(ctx)
			if err != nil {
				t.Fatal(err)
			}
			var id uint64
			for _, m := range members.Members {
				if m.Name == victim.name {
					id = m.ID
				}
			}
			var alarms *clientv3.AlarmResponse
			for alarms == nil || len(alarms.Alarms) == 0 {
				if alarms, err = cli.AlarmList(ctx); err != nil {
					t.Fatalf("no alarm is raised: %v", err)
				}
			}
			if a := alarms.Alarms; len(a) != 1 || a[0].Alarm != pb.AlarmType_CORRUPT || a[0].MemberID != id {
				t.Fatalf("alarms %v, want that %x is corrupt", a, id)
			}
			if _, err := dialMembers(t, all[0]).Put(ctx, "after", "x"); !errors.Is(err, rpctypes.ErrCorrupt) {
				t.Errorf("a put ends with %v", err)
			}
			found := 0.0
			for _, m := range all {
				found += checked(m, "different")
			}
			if found != 1 {
				t.Errorf("%v comparisons counted as different, want the one that raised the alarm", found)
			}
		})
	}
}

// putKeys puts key0 to key19, with long values, and returns the last revision.
func putKeys(ctx context.Context, t *testing.T, cli *clientv3.Client) (last int64) {
	t.Helper()
	for i := range 20 {
		p, err := cli.Put(ctx, fmt.Sprintf("key%d", i), strings.Repeat("v", 500))
		if err != nil {
			t.Fatal(err)
		}
		last = p.Header.Revision
	}
	return last
}

// waitRevision waits until a member has a revision.
func waitRevision(ctx context.Context, t *testing.T, m *clusterMember, revision int64) {
	t.Helper()
	own := dialMembers(t, m)
	for rev := int64(0); rev < revision; {
		r, err := own.Get(ctx, "k", clientv3.WithSerializable())
		if err != nil {
			t.Fatal(err)
		}
		rev = r.Header.Revision
	}
}

// metric reads one series that a member shows.
func metric(ctx context.Context, t *testing.T, member, series string) (value float64) {
	t.Helper()
	for _, line := range strings.Split(metrics(ctx, t, member), "\n") {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			if _, err := fmt.Sscan(rest, &value); err != nil {
				t.Fatal(err)
			}
			return value
		}
	}
	t.Fatalf("%s has no %s", member, series)
	return 0
}

func metrics(ctx context.Context, t *testing.T, member string) string {
	t.Helper()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, member+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
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
	if n := metric(ctx, t, all[0].client, `engram_hash_checks_total{kind="initial",result="equal"}`); n != 0 {
		t.Errorf("%v comparisons that never were are counted", n)
	}
}
