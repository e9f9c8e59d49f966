//go:build cgo && linux

package storage

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// TestSharedArena: threads that read blocks have no arenas of their own, where these could only grow.
func TestSharedArena(t *testing.T) {
	s, err := Open(Options{Dir: t.TempDir(), Manual: true, CacheBytes: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	before := arenas(t)
	b := s.NewBatch()
	for rev := range int64(10_000) {
		b.SetRevision(rev+2, 0, RevisionRecord{KV: fmt.Appendf(nil, "%01000d", rev)})
	}
	if err := s.Commit(b); err != nil {
		t.Fatal(err)
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	var all, done sync.WaitGroup
	const threads = 8
	all.Add(threads)
	for range threads {
		done.Go(func() {
			runtime.LockOSThread() // and ends with it
			all.Done()
			all.Wait()
			lower, upper := RevisionBounds(0, 0)
			it, err := s.Iter(t.Context(), lower, upper)
			if err != nil {
				t.Error(err)
				return
			}
			n := 0
			for ok := it.First(); ok; ok = it.Next() {
				n++
			}
			if err := it.Close(); err != nil || n != 10_000 {
				t.Errorf("%d records, %v", n, err)
			}
		})
	}
	done.Wait()
	if after := arenas(t); after > before {
		t.Errorf("%d arenas before, %d after eight threads read blocks", before, after)
	}
}

// arenas counts what looks like an arena of the GNU C library: 64 MiB, and at a multiple of that, first in use, the rest reserved.
func arenas(t *testing.T) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	const size = 64 << 20
	var used, end uint64
	for line := range strings.Lines(string(text)) {
		parts := regexp.MustCompile(`^([0-9a-f]+)-([0-9a-f]+) (....)`).FindStringSubmatch(line)
		from, err := strconv.ParseUint(parts[1], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		to, err := strconv.ParseUint(parts[2], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case parts[3] == "rw-p" && from%size == 0:
			used, end = from, to
		case parts[3] == "---p" && from == end && to == used+size:
			n++
		}
	}
	return n
}
