package raftlog

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// BenchmarkAppend writes and syncs 64 entries of 300 bytes at a time, on disk and
// in memory, and compacts as a member does.
func BenchmarkAppend(b *testing.B) {
	for _, c := range []struct {
		name string
		fs   vfs.FS
	}{{"disk", vfs.Default}, {"memory", vfs.NewMem()}} {
		b.Run(c.name, func(b *testing.B) {
			o := Options{FS: c.fs, Dir: "/raft", SegmentBytes: 16 << 20, CacheBytes: 4 << 20}
			if c.name == "disk" {
				o.Dir = c.fs.PathJoin(b.TempDir(), "raft")
			}
			l := mustOpen(b, o)
			next := uint64(1)
			b.SetBytes(64 * 300)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				es := entries(next, next+63, 1, 300)
				next += 64
				b.StartTimer()
				if _, err := l.Write([]Append{{Entries: es, HardState: hard(1, 1, next-64)}}); err != nil {
					b.Fatal(err)
				}
				if err := l.Sync(); err != nil {
					b.Fatal(err)
				}
				if next%(64*1024) == 1 {
					if err := l.Compact(next - 2000); err != nil {
						b.Fatal(err)
					}
				}
			}
			if err := l.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkOpen opens a log of 100,000 entries of 300 bytes.
func BenchmarkOpen(b *testing.B) {
	o := Options{FS: vfs.Default, Dir: vfs.Default.PathJoin(b.TempDir(), "raft"), SegmentBytes: 16 << 20}
	l := mustOpen(b, o)
	for i := range uint64(100) {
		write(b, l, Append{Entries: entries(i*1000+1, i*1000+1000, 1, 300)})
	}
	if err := l.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		l := mustOpen(b, o)
		if last, _ := l.LastIndex(); last != 100000 {
			b.Fatalf("last is %d", last)
		}
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
