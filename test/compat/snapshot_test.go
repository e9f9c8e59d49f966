package compat

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/broken"
)

// TestSnapshot reads the backup stream: its messages, its checksum, and that etcdutl takes it.
func TestSnapshot(t *testing.T) {
	pair, err := process.StartPair(programs.Etcd, subject, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer pair.Close()
	var seen [2]string
	for i, s := range pair {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		for n := range 200 {
			key := fmt.Appendf(nil, "key%03d", n)
			if _, err := etcdserverpb.NewKVClient(s.Conn()).Put(ctx, &etcdserverpb.PutRequest{Key: key, Value: make([]byte, 1000)}); err != nil {
				t.Fatal(err)
			}
		}
		if seen[i], err = readSnapshot(ctx, s, filepath.Join(t.TempDir(), "snapshot")); err != nil {
			t.Fatalf("%s: %v", []string{"reference", "subject"}[i], err)
		}
	}
	if seen[0] != seen[1] {
		t.Error(broken.Errorf("the snapshots differ:\nreference: %s\nsubject:   %s", seen[0], seen[1]))
	}
}

func readSnapshot(ctx context.Context, s *process.Side, path string) (string, error) {
	stream, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Snapshot(ctx, &etcdserverpb.SnapshotRequest{})
	if err != nil {
		return "", err
	}
	file, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	sum := sha256.New()
	var last []byte
	var version string
	var size uint64
	for n := 0; ; n++ {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", err
		}
		if _, err := file.Write(m.Blob); err != nil {
			return "", err
		}
		sum.Write(last)
		last, version = m.Blob, m.Version
		switch {
		case m.Header != nil:
			return "", broken.Errorf("message %d has a header", n)
		case n == 0:
			size = m.RemainingBytes + uint64(len(m.Blob))
		}
	}
	if got := sum.Sum(nil); string(got) != string(last) {
		return "", broken.Errorf("the last message %x is not the checksum %x of the %d bytes before", last, got, size)
	}
	status, err := process.Command{Program: []string{programs.Etcdutl}, Args: []string{"snapshot", "status", "-w", "json", path}}.Run()
	if err != nil || status.Code != 0 {
		return "", fmt.Errorf("etcdutl snapshot status: exit code %d, %w\n%s", status.Code, err, status.Stderr)
	}
	var a struct {
		Revision int64
		Version  string
	}
	if err := json.Unmarshal([]byte(status.Stdout), &a); err != nil {
		return "", err
	}
	return fmt.Sprintf("version %s, whole pages: %t; etcdutl finds revision %d, version %s", version, size%4096 == 0, a.Revision, a.Version), nil
}
