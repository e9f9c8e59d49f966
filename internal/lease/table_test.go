package lease

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/storage"
)

const testMinTTL = 2

func open(t testing.TB, fs vfs.FS) (*storage.Store, *Table) {
	store, err := storage.Open(storage.Options{FS: fs, Dir: "db"})
	if err != nil {
		t.Fatal(err)
	}
	table, err := Open(store, Options{MinTTL: testMinTTL})
	if err != nil {
		t.Fatal(err)
	}
	return store, table
}

func TestTableScript(t *testing.T) {
	fs := vfs.NewMem()
	store, table := open(t, fs)
	datadriven.RunTest(t, "testdata/table", func(t *testing.T, d *datadriven.TestData) string {
		var id, ttl, remaining int64
		var key string
		d.MaybeScanArgs(t, "id", &id)
		d.MaybeScanArgs(t, "ttl", &ttl)
		d.MaybeScanArgs(t, "remaining", &remaining)
		d.MaybeScanArgs(t, "key", &key)
		b := store.NewBatch()
		defer func() {
			if err := store.Commit(b); err != nil {
				t.Fatal(err)
			}
		}()
		switch d.Cmd {
		case "grant":
			got, err := table.Grant(b, id, ttl)
			if err != nil {
				return refused(t, err, b)
			}
			return fmt.Sprintf("ttl %d\n", got)
		case "revoke":
			if err := table.Revoke(b, id); err != nil {
				return refused(t, err, b)
			}
		case "checkpoint":
			return fmt.Sprintln(table.Checkpoint(b, id, remaining))
		case "attach":
			return fmt.Sprintln(table.Attach(id, []byte(key)))
		case "detach":
			table.Detach(id, []byte(key))
		case "keys":
			return fmt.Sprintf("%d: %q\n", table.KeyCount(id), table.Keys(id))
		case "list":
			return list(table)
		case "rows":
			var out strings.Builder
			if err := storage.Rows(store, storage.TableLease, func(name, value []byte) error {
				fmt.Fprintf(&out, "%x = %x\n", name, value)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			return out.String()
		case "reopen":
			b.Discard()
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			store, table = open(t, fs)
			b = store.NewBatch()
			return list(table)
		default:
			t.Fatalf("unknown command %s", d.Cmd)
		}
		return ""
	})
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func refused(t *testing.T, err error, b *storage.Batch) string {
	if !b.Empty() {
		t.Error("a refused command wrote something")
	}
	return err.Error() + "\n"
}

func list(table *Table) string {
	all := table.All()
	sort.Slice(all, func(i, j int) bool { return all[i].ID < all[j].ID })
	var out strings.Builder
	for _, l := range all {
		fmt.Fprintf(&out, "lease %x ttl %d", l.ID, l.TTL)
		if l.Remaining != 0 {
			fmt.Fprintf(&out, " remaining %d", l.Remaining)
		}
		out.WriteString("\n")
	}
	return out.String()
}

// model is the table as a reader of the specification would write it.
type model struct {
	leases map[int64]Lease
	keys   map[int64]map[string]bool
}

// TestModel runs random commands against a naive model, with restarts.
func TestModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	fs := vfs.NewMem()
	store, table := open(t, fs)
	m := model{map[int64]Lease{}, map[int64]map[string]bool{}}
	seen := map[string]int{}
	for range 20000 {
		id := rng.Int64N(12) - 2
		key := fmt.Sprintf("k%d", rng.IntN(30))
		b := store.NewBatch()
		_, exists := m.leases[id]
		switch op := rng.IntN(100); {
		case op < 10:
			ttl := []int64{-1, 0, 1, 2, 3, 600, MaxTTL, MaxTTL + 1}[rng.IntN(8)]
			got, err := table.Grant(b, id, ttl)
			var want error
			switch {
			case id == 0:
				want = ErrNotFound
			case ttl > MaxTTL:
				want = ErrTTLTooLarge
			case exists:
				want = ErrExists
			default:
				m.leases[id] = Lease{ID: id, TTL: max(ttl, testMinTTL)}
				m.keys[id] = map[string]bool{}
			}
			if !errors.Is(err, want) || err == nil && got != m.leases[id].TTL {
				t.Fatalf("grant %d %d: %d, %v, want %v", id, ttl, got, err, want)
			}
			seen[fmt.Sprint("grant ", want)]++
		case op < 15:
			err := table.Revoke(b, id)
			if (err == nil) != exists || err != nil && !errors.Is(err, ErrNotFound) {
				t.Fatalf("revoke %d: %v", id, err)
			}
			delete(m.leases, id)
			delete(m.keys, id)
			seen[fmt.Sprint("revoke ", exists)]++
		case op < 20:
			remaining := rng.Int64N(3) * 50
			if table.Checkpoint(b, id, remaining) != exists {
				t.Fatalf("checkpoint %d", id)
			}
			if exists {
				l := m.leases[id]
				l.Remaining = remaining
				m.leases[id] = l
			}
			seen[fmt.Sprint("checkpoint ", exists)]++
		case op < 70:
			if table.Attach(id, []byte(key)) != exists {
				t.Fatalf("attach %d", id)
			}
			if exists {
				m.keys[id][key] = true
			}
		default:
			table.Detach(id, []byte(key))
			delete(m.keys[id], key)
		}
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if rng.IntN(400) == 0 {
			seen["reopen"]++
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			store, table = open(t, fs)
			for id, keys := range m.keys {
				for key := range keys {
					table.Attach(id, []byte(key))
				}
			}
		}
		l, ok := table.Lookup(id)
		if want, exists := m.leases[id]; ok != exists || l != want || table.Len() != len(m.leases) {
			t.Fatalf("lease %d is %+v %v, want %+v %v", id, l, ok, want, exists)
		}
		want := slices.Sorted(maps.Keys(m.keys[id]))
		if fmt.Sprintf("%s", table.Keys(id)) != fmt.Sprint(want) || table.KeyCount(id) != len(want) {
			t.Fatalf("keys of %d: %s, want %s", id, table.Keys(id), want)
		}
		if len(want) > fewKeys {
			seen["many keys"]++
		}
		visited := map[string]bool{}
		every := table.EveryKey(id, func(k []byte) bool { visited[string(k)] = true; return string(k) != key })
		if every == slices.Contains(want, key) || every && len(visited) != len(want) {
			t.Fatalf("every key of %d but %s: %v after %v of %v", id, key, every, visited, want)
		}
	}
	for _, what := range []string{"grant <nil>", "grant " + ErrNotFound.Error(), "grant " + ErrExists.Error(), "grant " + ErrTTLTooLarge.Error(),
		"revoke true", "revoke false", "checkpoint true", "checkpoint false", "reopen", "many keys"} {
		if seen[what] == 0 {
			t.Errorf("%s never happened", what)
		}
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestReadersBeside reads while the applier changes a large lease.
func TestReadersBeside(t *testing.T) {
	store, table := open(t, vfs.NewMem())
	b := store.NewBatch()
	if _, err := table.Grant(b, 1, 60); err != nil {
		t.Fatal(err)
	}
	const n = 3 * chunk
	for i := range n {
		table.Attach(1, fmt.Appendf(nil, "stays%05d", i))
	}
	lessor := NewLessor(table, LessorOptions{Now: time.Now})
	lessor.Promote(time.Now(), 0)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				keys := table.Keys(1)
				staying := 0
				for _, k := range keys {
					if strings.HasPrefix(string(k), "stays") {
						staying++
					}
				}
				if staying != n || !slices.IsSortedFunc(keys, slices.Compare[[]byte]) {
					t.Errorf("%d keys of those that stay, want %d", staying, n)
				}
				table.All()
				lessor.IDs()
			}
		})
	}
	for i := range 20000 {
		key := fmt.Appendf(nil, "comes%05d", i%700)
		table.Attach(1, key)
		table.Detach(1, key)
		if id := int64(2 + i%5000); !table.Exists(id) {
			if _, err := table.Grant(b, id, 60); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(stop)
	readers.Wait()
	b.Discard()
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenRefusesGarbage(t *testing.T) {
	good := storage.RowOf(rowKey(7))
	for name, row := range map[string][2][]byte{
		"no value":       {good, nil},
		"other id":       {good, {0x08, 0x08}},
		"short name":     {good[1:], {0x08, 0x07}},
		"cut varint":     {good, {0x08, 0x87}},
		"not a message":  {good, {0xff}},
		"cut unknown":    {good, {0x08, 0x07, 0x22, 0x05}},
		"id as bytes":    {good, {0x0a, 0x01, 0x07}},
		"unknown passes": {good, {0x08, 0x07, 0x22, 0x01, 0x00}},
	} {
		store, _ := open(t, vfs.NewMem())
		b := store.NewBatch()
		b.Set(storage.RowKey(storage.TableLease, row[0]), row[1])
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(store, Options{}); (err == nil) != (name == "unknown passes") {
			t.Errorf("%s: %v", name, err)
		}
		if err := store.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// FuzzRow: a row that is read can be written, and then reads the same.
func FuzzRow(f *testing.F) {
	f.Add(storage.RowOf(rowKey(7)), encodeRow(Lease{ID: 7, TTL: 60, Remaining: 5}))
	f.Add(storage.RowOf(rowKey(-1)), encodeRow(Lease{ID: -1, TTL: MaxTTL}))
	f.Fuzz(func(t *testing.T, name, value []byte) {
		l, err := parseRow(name, value)
		if err != nil {
			return
		}
		again, err := parseRow(storage.RowOf(rowKey(l.ID)), encodeRow(l))
		if err != nil || again != l {
			t.Fatalf("row %x = %x is %+v, and then %+v, %v", name, value, l, again, err)
		}
	})
}

func BenchmarkAttach(b *testing.B) {
	store, table := open(b, vfs.NewMem())
	batch := store.NewBatch()
	if _, err := table.Grant(batch, 1, 60); err != nil {
		b.Fatal(err)
	}
	keys := make([][]byte, 1000)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "/registry/events/default/some-event-%d", i)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		table.Attach(1, keys[i%len(keys)])
		table.Detach(1, keys[(i+500)%len(keys)])
	}
	batch.Discard()
	if err := store.Close(); err != nil {
		b.Fatal(err)
	}
}
