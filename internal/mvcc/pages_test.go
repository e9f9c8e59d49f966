package mvcc

import (
	"context"
	"fmt"
	"testing"
)

// Pages at a fixed revision read from the index of that revision, until its
// minute is over or others take its place, with the same answers.
func TestPages(t *testing.T) {
	f := newFixture(t, nil)
	for i := range 100 {
		f.put(fmt.Sprintf("k%02d", i), "1")
	}
	page := func(from string, rev int64) RangeResult {
		t.Helper()
		v := f.View(f.Root())
		defer v.Release()
		res, err := v.Range(context.Background(), []byte(from), []byte{0}, RangeOptions{Limit: 40, Revision: rev})
		f.check(err)
		return res
	}
	if res := page("k00", 0); !res.More || res.Count != 100 {
		t.Fatalf("first page: %+v", res)
	}
	rev := f.Root().Revision()
	f.put("k50", "2", "k999", "2")
	f.del("k60")
	if _, ok := f.pages.find(rev); !ok {
		t.Fatal("the revision is not kept")
	}
	check := func(name string) {
		t.Helper()
		res := page("k40", rev)
		if !res.More || res.Count != 60 || string(ValueOf(res.KVs[10])) != "1" || string(keyOf(res.KVs[20])) != "k60" {
			t.Errorf("%s: second page: more %v count %d", name, res.More, res.Count)
		}
	}
	check("kept")
	f.now = f.now.Add(pageAge)
	f.put("z", "1")
	if _, ok := f.pages.find(rev); ok {
		t.Error("kept for more than its age")
	}
	check("expired")

	for range 2 * maxPages {
		f.put("z", "1")
		page("k00", 0)
	}
	if n := len(f.pages.pages); n != maxPages {
		t.Errorf("%d revisions kept", n)
	}
	if _, ok := f.pages.find(f.Root().Revision()); !ok {
		t.Error("the newest is not kept")
	}
}

// The moment inside a transaction is not what its revision will be.
func TestPagesNotInsideBatch(t *testing.T) {
	f := newFixture(t, nil)
	f.put("a", "1", "b", "1")
	f.apply(func(w *Writer) {
		w.Begin()
		w.Put([]byte("c"), nil, 0)
		v := w.View()
		res, err := v.Range(context.Background(), []byte("a"), []byte{0}, RangeOptions{Limit: 1})
		if err != nil || !res.More {
			t.Fatal(res, err)
		}
		w.Put([]byte("d"), nil, 0)
		v.Release()
		w.End()
	})
	if _, ok := f.pages.find(f.Root().Revision()); ok {
		t.Error("the middle of a transaction was kept as its revision")
	}
}
