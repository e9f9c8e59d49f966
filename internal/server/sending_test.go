package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/config"
)

// startAlone starts a member of a cluster of one.
func startAlone(t *testing.T, ctx context.Context, dir string, log *slog.Logger) *Member {
	t.Helper()
	cfg, err := config.Parse("engram", []string{
		"--data-dir=" + dir, "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0",
		"--listen-peer-urls=http://127.0.0.1:0", "--memory-budget=64MiB",
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := Start(ctx, cfg, log)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func stopAlone(t *testing.T, m *Member) {
	t.Helper()
	stopped, stop := context.WithCancel(context.Background())
	stop()
	if err := m.Wait(stopped); err != nil {
		t.Error(err)
	}
}

// TestSendingDirectory: the files of a snapshot in Engram's own form are there
// until it is closed, and what a crash left of them is deleted at the next start.
func TestSendingDirectory(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	dir := t.TempDir()
	sending := func() []string {
		t.Helper()
		found, err := filepath.Glob(filepath.Join(dir, sendingPrefix+"*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	m := startAlone(t, ctx, dir, slog.New(slog.DiscardHandler))
	msg := &raftpb.Message{Type: raftpb.MsgSnap.Enum(), To: proto.Uint64(2)}
	out, err := snapshots{m}.Open(ctx, msg, true)
	if err != nil {
		t.Fatal(err)
	}
	another, err := snapshots{m}.Open(ctx, msg, true)
	if err != nil {
		t.Fatal(err)
	}
	if got := sending(); len(got) != 2 {
		t.Errorf("two are sent out of %q", got)
	}
	if err := another.Close(); err != nil {
		t.Fatal(err)
	}
	var body bytes.Buffer
	if n, err := out.WriteTo(&body); err != nil || n != int64(body.Len()) {
		t.Fatalf("wrote %d of %d bytes: %v", n, body.Len(), err)
	}
	if got := sending(); len(got) != 1 {
		t.Errorf("one is sent out of %q", got)
	}
	meta := out.Message().GetSnapshot().GetMetadata()
	if err := out.Close(); err != nil || len(sending()) > 0 {
		t.Fatalf("%v: %q is left", err, sending())
	}

	// What cannot be read leaves nothing, and what can has an index.
	damaged := bytes.Clone(body.Bytes())
	damaged[len(damaged)/2] ^= 1
	unsent := proto.CloneOf(meta)
	unsent.Index = proto.Uint64(meta.GetIndex() + 1)
	received := func() []string { found, _ := filepath.Glob(filepath.Join(dir, snapshotPrefix+"*")); return found }
	receive := func(meta *raftpb.SnapshotMetadata, body io.Reader) error {
		_, err := snapshots{m}.Receive(ctx, &raftpb.Message{Snapshot: &raftpb.Snapshot{Metadata: meta}}, true, body)
		return err
	}
	full := errors.New("full")
	for name, err := range map[string]error{
		"damaged":       receive(meta, bytes.NewReader(damaged)),
		"cut":           receive(meta, bytes.NewReader(body.Bytes()[:body.Len()-1])),
		"another index": receive(unsent, bytes.NewReader(body.Bytes())),
		"not read":      receive(meta, io.MultiReader(bytes.NewReader(body.Bytes()[:100]), failingReader{full})),
	} {
		if err == nil || !strings.Contains(err.Error(), "snapshot of index") || len(received()) > 0 {
			t.Errorf("%s: %v, %q is left", name, err, received())
		}
	}
	if err := receive(meta, &body); err != nil {
		t.Fatal(err)
	}
	if got := received(); len(got) != 1 {
		t.Errorf("received into %q", got)
	} else if _, err := os.Stat(filepath.Join(got[0], indexDir, "index.checkpoint")); err != nil {
		t.Error(err)
	}
	stopAlone(t, m)

	if err := os.MkdirAll(filepath.Join(dir, sendingPrefix+"7", storeDir), 0o700); err != nil {
		t.Fatal(err)
	}
	m = startAlone(t, ctx, dir, slog.New(slog.DiscardHandler))
	if got := append(sending(), received()...); len(got) > 0 {
		t.Errorf("after a start there is %q", got)
	}
	stopAlone(t, m)
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }
