package snapfile

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"path/filepath"
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
	sending := b.TempDir()
	if err := src.Checkpoint(filepath.Join(sending, StoreDir)); err != nil {
		b.Fatal(err)
	}
	files, err := OpenFiles(storage.DefaultFS, sending)
	if err != nil {
		b.Fatal(err)
	}
	var stream bytes.Buffer
	if err := errors.Join(files.WriteNative(context.Background(), &stream, nil), src.Close()); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(stream.Len()))
	for b.Loop() {
		into := b.TempDir()
		for _, sub := range []string{StoreDir, IndexDir} {
			if err := storage.DefaultFS.MkdirAll(filepath.Join(into, sub), 0o700); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := ReadNative(context.Background(), bytes.NewReader(stream.Bytes()), storage.DefaultFS, into); err != nil {
			b.Fatal(err)
		}
	}
}
