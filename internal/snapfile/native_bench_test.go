package snapfile

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"

	"github.com/engram-kv/engram/internal/storage"
)

// BenchmarkReadNative reads 200 MB of records of about 1 KiB.
func BenchmarkReadNative(b *testing.B) {
	src, err := storage.Open(storage.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	load := src.NewLoader()
	value := make([]byte, 1024)
	for i := range int64(200_000) {
		for j := range 512 {
			value[j] = byte(rng.Uint32())
		}
		if err := load.Set(storage.AppendRevisionKey(nil, i+2, 0), storage.AppendRevisionValue(nil, storage.RevisionRecord{KV: value})); err != nil {
			b.Fatal(err)
		}
	}
	if err := load.Finish(); err != nil {
		b.Fatal(err)
	}
	var stream bytes.Buffer
	if err := WriteNative(context.Background(), &stream, Source{Reader: src}); err != nil {
		b.Fatal(err)
	}
	if err := src.Close(); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(stream.Len()))
	for b.Loop() {
		into, err := storage.Open(storage.Options{Dir: b.TempDir()})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := ReadNative(context.Background(), bytes.NewReader(stream.Bytes()), into); err != nil {
			b.Fatal(err)
		}
		if err := into.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
