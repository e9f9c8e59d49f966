package snapfile

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	bolt "go.etcd.io/bbolt"
)

type row struct{ key, value []byte }

// writeBucket lays out a file of one bucket, in two passes as Plan does.
func writeBucket(t testing.TB, rows []row) string {
	t.Helper()
	var root [2]uint64
	var count [2]uint64
	var body bytes.Buffer
	for pass := range 2 {
		p := &pages{next: pageFirst}
		if pass == 1 {
			p.w = &body
		}
		bucket := &tree{pages: p}
		for _, r := range rows {
			if err := bucket.add(0, r.key, r.value); err != nil {
				t.Fatal(err)
			}
		}
		id, err := bucket.finish()
		if err != nil {
			t.Fatal(err)
		}
		list := &tree{pages: p}
		if err := list.add(elementBucket, []byte("b"), appendBucket(nil, id)); err != nil {
			t.Fatal(err)
		}
		if root[pass], err = list.finish(); err != nil {
			t.Fatal(err)
		}
		count[pass] = p.next
	}
	if root[0] != root[1] || count[0] != count[1] || int(count[0]-pageFirst)*pageSize != body.Len() {
		t.Fatalf("planned root %d of %d pages, wrote %d of %d in %d bytes", root[0], count[0], root[1], count[1], body.Len())
	}
	plan := &Plan{ctx: t.Context(), root: root[0], count: count[0]}
	path := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, append(plan.head(), body.Bytes()...), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// readBucket reads bucket b of a file with our own reader.
func readBucket(t testing.TB, path string) (rows []row) {
	t.Helper()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := openBolt(bytes.NewReader(whole), int64(len(whole)))
	if err != nil {
		t.Fatal(err)
	}
	buckets, err := f.buckets(t.Context(), func(name []byte) bool { return string(name) == "b" })
	if err != nil {
		t.Fatal(err)
	}
	if err := f.rows(t.Context(), buckets["b"], func(key, value []byte) error {
		rows = append(rows, row{bytes.Clone(key), bytes.Clone(value)})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return rows
}

func equalBuckets(t testing.TB, want, got []row) {
	t.Helper()
	if !slices.EqualFunc(want, got, func(a, b row) bool { return bytes.Equal(a.key, b.key) && bytes.Equal(a.value, b.value) }) {
		t.Fatalf("%d rows were written, others, or %d, are read", len(want), len(got))
	}
}

// TestTree lays out rows of random and of critical sizes and numbers. bbolt
// must find no fault, and both readers the same rows.
func TestTree(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	numbered := func(n, keySize int, valueSize func(i int) int) (rows []row) {
		for i := range n {
			key := fmt.Appendf(make([]byte, 0, keySize), "%08d", i)
			for len(key) < keySize {
				key = append(key, 'k')
			}
			rows = append(rows, row{key, random(rng, valueSize(i))})
		}
		return rows
	}
	upTo := func(n int) func(int) int { return func(int) int { return rng.IntN(n + 1) } }
	exactly := func(n int) func(int) int { return func(int) int { return n } }
	cases := map[string][]row{
		"none":                numbered(0, 8, nil),
		"empty values":        numbered(40_000, 8, exactly(0)), // 3 levels
		"large keys":          numbered(300, 3000, upTo(10)),
		"largest keys":        numbered(50, maxKeySize, upTo(10)),
		"large values":        numbered(30, 8, upTo(200_000)),
		"one page each":       numbered(200, 8, exactly(pageSize-pageHeaderSize-elementSize-8)),
		"a byte over a page":  numbered(200, 8, exactly(pageSize-pageHeaderSize-elementSize-8+1)),
		"two pages each":      numbered(200, 8, exactly(2*pageSize-pageHeaderSize-elementSize-8)),
		"a byte over two":     numbered(200, 8, exactly(2*pageSize-pageHeaderSize-elementSize-8+1)),
		"keys around a page":  numbered(100, pageSize-pageHeaderSize-elementSize, exactly(0)),
		"keys over a page":    numbered(100, pageSize-pageHeaderSize-elementSize+1, exactly(1)),
		"keys of half a page": numbered(100, (pageSize-pageHeaderSize)/2-elementSize, exactly(0)),
	}
	// One leaf page per row: numbers of children around what branch pages take.
	const perBranch = (pageSize - pageHeaderSize) / (elementSize + 8)
	for _, n := range []int{
		1, 2, 3, 4, perBranch - 1, perBranch, perBranch + 1, perBranch + 2, perBranch + 3, 2*perBranch - 1, 2 * perBranch, 2*perBranch + 1,
		2*perBranch + 2, perBranch*perBranch + 1,
	} {
		cases[fmt.Sprintf("%d leaf pages", n)] = numbered(n, 8, exactly(pageSize-pageHeaderSize-elementSize-8))
	}
	for i := range 30 {
		n := 1 << rng.IntN(12)
		cases[fmt.Sprintf("random %d", i)] = numbered(rng.IntN(n)+1, 8+rng.IntN(60), upTo(1<<rng.IntN(13)))
	}
	for name, rows := range cases {
		t.Run(name, func(t *testing.T) {
			path := writeBucket(t, rows)
			equalBuckets(t, rows, readBucket(t, path))
			checkTree(t, path)
			if len(rows) < 5000 {
				checkBolt(t, path)
			}
			db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = db.Close() }()
			var got []row
			if err := db.View(func(tx *bolt.Tx) error {
				for err := range tx.Check() {
					t.Error(err)
				}
				return tx.Bucket([]byte("b")).ForEach(func(k, v []byte) error {
					got = append(got, row{bytes.Clone(k), bytes.Clone(v)})
					return nil
				})
			}); err != nil {
				t.Fatal(err)
			}
			equalBuckets(t, rows, got)
		})
	}
}

// checkTree asks what bbolt does not: no branch page has less than two children,
// and pages are filled.
func checkTree(t *testing.T, path string) {
	t.Helper()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for id := uint64(pageFirst); id < uint64(len(whole)/pageSize); {
		h := parsePageHeader(whole[id*pageSize:])
		if h.id != id {
			t.Fatalf("page %d says that it is %d", id, h.id)
		}
		if h.flags == flagBranch && h.count < minChildren {
			t.Errorf("branch page %d has %d children", id, h.count)
		}
		id += uint64(h.overflow) + 1
	}
}

// TestReadBolt reads files that bbolt wrote, with pages freed and buckets inline.
func TestReadBolt(t *testing.T) {
	for _, o := range []bolt.Options{
		{NoFreelistSync: true, FreelistType: bolt.FreelistMapType, NoSync: true, NoGrowSync: true},
		{NoSync: true, NoGrowSync: true},
		{PageSize: 16384, NoSync: true, NoGrowSync: true},
		{PageSize: 1024, NoSync: true, NoGrowSync: true},
	} {
		t.Run(fmt.Sprintf("freelist %t, page size %d", !o.NoFreelistSync, o.PageSize), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(13, 14))
			path := filepath.Join(t.TempDir(), "db")
			db, err := bolt.Open(path, 0o600, &o)
			if err != nil {
				t.Fatal(err)
			}
			for round := range 40 {
				var want []row
				if err := db.Update(func(tx *bolt.Tx) error {
					b, err := tx.CreateBucketIfNotExists([]byte("b"))
					if err != nil {
						return err
					}
					for range rng.IntN(1 + round*round) {
						key := fmt.Appendf(nil, "%05d", rng.IntN(3000))
						if rng.IntN(3) == 0 {
							err = b.Delete(key)
						} else {
							err = b.Put(key, random(rng, rng.IntN(1<<rng.IntN(14))))
						}
						if err != nil {
							return err
						}
					}
					if _, err := tx.CreateBucketIfNotExists(fmt.Appendf(nil, "other%d", round)); err != nil {
						return err
					}
					return b.ForEach(func(k, v []byte) error {
						want = append(want, row{bytes.Clone(k), bytes.Clone(v)})
						return nil
					})
				}); err != nil {
					t.Fatal(err)
				}
				equalBuckets(t, want, readBucket(t, path))
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// FuzzReadBolt walks whatever bytes: our reader may refuse, not panic.
func FuzzReadBolt(f *testing.F) {
	for _, n := range []int{0, 3, 400} {
		var rows []row
		for i := range n {
			rows = append(rows, row{fmt.Appendf(nil, "%06d", i), make([]byte, 20)})
		}
		b, err := os.ReadFile(writeBucket(f, rows))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := openBolt(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			return
		}
		buckets, err := file.buckets(context.Background(), func([]byte) bool { return true })
		if err != nil {
			return
		}
		for _, bucket := range buckets {
			_ = file.rows(context.Background(), bucket, func(_, _ []byte) error { return nil })
		}
	})
}
