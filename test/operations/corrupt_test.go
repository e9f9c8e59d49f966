package operations

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// corrupt changes one byte of one value in the store of a member that does not
// run, with checksums that fit: what a fault of memory may do before a write.
func corrupt(dataDir, key string) (err error) {
	s, err := storage.Open(storage.Options{Dir: filepath.Join(dataDir, snapfile.StoreDir)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	lower, upper := storage.RevisionBounds(0, 0)
	iter, err := s.Iter(context.Background(), lower, upper)
	if err != nil {
		return err
	}
	var at, value []byte
	for ok := iter.First(); ok; ok = iter.Next() {
		if strings.Contains(string(iter.Value()), key) {
			at, value = append([]byte(nil), iter.Key()...), append([]byte(nil), iter.Value()...)
		}
	}
	if err := errors.Join(iter.Error(), iter.Close()); err != nil {
		return err
	}
	if at == nil {
		return fmt.Errorf("no record of key %q", key)
	}
	value[len(value)/2] ^= 1 // the values of this test are long
	b := s.NewBatch()
	b.Set(at, value)
	return s.Commit(b)
}

// badMember stops a member, changes a value of its store, and starts it again.
func (r *rig) badMember(m *cluster.Member) {
	r.Helper()
	r.must(m.Stop())
	r.must(corrupt(m.DataDir, "victim"))
}

func (r *rig) load() {
	r.Helper()
	c := r.client()
	for i := range 200 {
		if _, err := c.Put(r.ctx, fmt.Sprintf("key/%d", i), strings.Repeat("v", 100)); err != nil {
			r.Fatal(err)
		}
	}
	if _, err := c.Put(r.ctx, "victim", strings.Repeat("w", 500)); err != nil {
		r.Fatal(err)
	}
	_, err := r.c.Settle(r.ctx) // all of them have it
	r.must(err)
}

// TestCorruptMemberIsNamed: the periodic comparison finds the one member that is
// wrong, whether it follows or leads, and the alarm names it and stops writes.
func TestCorruptMemberIsNamed(t *testing.T) {
	for _, leads := range []bool{false, true} {
		t.Run(fmt.Sprintf("leads=%t", leads), func(t *testing.T) {
			r := begin(t, 3, "--corrupt-check-time=1s", "--feature-gates=InitialCorruptCheck=false")
			r.load()
			victim := r.c.Members()[1]
			r.badMember(victim)
			r.must(victim.Restart(r.ctx))
			if leads {
				r.must(r.c.MoveLeader(r.ctx, victim))
			}
			r.alarms(fmt.Sprintf("memberID:%d", victim.ID))
			got := strings.TrimSpace(r.typed("alarm", "list"))
			if want := fmt.Sprintf("memberID:%d alarm:CORRUPT", victim.ID); strings.Join(strings.Fields(got), " ") != want {
				t.Fatalf("alarms: %q, want %q", got, want)
			}
			if _, errs, err := r.try("put", "a", "b"); err == nil || !strings.Contains(errs, "corrupt cluster") {
				t.Fatalf("a put under the alarm: %v %s", err, errs)
			}
			if _, errs, err := r.try("endpoint", "health"); err == nil || !strings.Contains(errs, "CORRUPT") {
				t.Fatalf("health under the alarm: %v %s", err, errs)
			}
		})
	}
}

// TestCorruptMemberDoesNotServe: a member that finds at its start that the others
// have other data says so and ends; they go on.
func TestCorruptMemberDoesNotServe(t *testing.T) {
	r := begin(t, 3)
	r.load()
	victim := r.c.Members()[1]
	r.badMember(victim)
	r.must(victim.Spawn())
	select {
	case <-victim.Exited():
	case <-time.After(time.Minute):
		t.Fatal("it runs")
	}
	for _, want := range []string{"differ", "engram ctl rebuild"} {
		if log := victim.LogTail(); !strings.Contains(log, want) {
			t.Fatalf("its log does not say %q:\n%s", want, log)
		}
	}
	r.typed("put", "a", "b")
	// A good one serves as before.
	r.must(r.c.Members()[0].Stop())
	r.must(corrupt(victim.DataDir, "victim")) // back to what it was
	r.must(victim.Restart(r.ctx))
	r.must(r.c.Members()[0].Restart(r.ctx))
}

// TestWholeClusterStarts: members that start at the same time do not wait for each
// other's comparison.
func TestWholeClusterStarts(t *testing.T) {
	r := begin(t, 3)
	r.load()
	for _, m := range r.c.Members() {
		r.must(m.Stop())
	}
	began := time.Now()
	for _, m := range r.c.Members() {
		r.must(m.Spawn())
	}
	for _, m := range r.c.Members() {
		r.must(m.Ready(r.ctx))
	}
	if took := time.Since(began); took > time.Minute { // waiting for a comparison takes ten of them
		t.Fatalf("it took %v", took)
	}
	r.typed("get", "victim")
}
