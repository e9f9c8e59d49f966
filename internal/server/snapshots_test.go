package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
)

// TestSnapshotForms: etcd's form cannot say that there is a feature level, so it
// is not sent while there is one.
func TestSnapshotForms(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	m := start(t, t.TempDir())
	defer func() {
		stopped, stop := context.WithCancel(t.Context())
		stop()
		if err := m.Wait(stopped); err != nil {
			t.Error(err)
		}
	}()
	send := func(native bool) error {
		out, err := snapshots{m}.Open(ctx, &raftpb.Message{Type: raftpb.MsgSnap.Enum(), To: proto.Uint64(0x2b)}, native)
		if err != nil {
			return err
		}
		return out.Close()
	}
	for _, level := range []uint64{1, 0} { // from now on it may go up again by itself: 0 comes last
		if err := m.proposeFeatureLevel(ctx, command.FeatureLevel{Level: level, Fingerprint: m.root().Fingerprint()}); err != nil {
			t.Fatal(err)
		}
		err := send(false)
		if now := m.root().FeatureLevel(); level == 1 && (now != 1 || err == nil || !strings.Contains(err.Error(), "member 2b")) || level == 0 && now == 0 && err != nil {
			t.Errorf("at level %d: in etcd's form: %v", now, err)
		}
		if err := send(true); err != nil {
			t.Errorf("in Engram's form: %v", err)
		}
	}
}

// shutting calls shut at one of its reads.
type shutting struct {
	r    io.Reader
	at   int // 0 is the first
	shut func()
}

func (s *shutting) Read(b []byte) (int, error) {
	if s.at--; s.at < 0 {
		s.shut()
	}
	return s.r.Read(b)
}

// snapshotOf is what m sends in one of the forms, whatever the feature level.
func snapshotOf(t *testing.T, m *Member, native bool) (*raftpb.Message, *bytes.Buffer) {
	t.Helper()
	msg, body := &raftpb.Message{Type: raftpb.MsgSnap.Enum(), To: proto.Uint64(0x2b)}, &bytes.Buffer{}
	if native {
		out, err := snapshots{m}.Open(t.Context(), msg, true)
		if err != nil {
			t.Fatal(err)
		}
		_, err = out.WriteTo(body)
		if err := errors.Join(err, out.Close()); err != nil {
			t.Fatal(err)
		}
		return out.Message(), body
	}
	pinned := m.machine().Snapshot()
	plan, err := planEtcd(t.Context(), m.pace, pinned)
	if err == nil {
		_, err = plan.WriteTo(body)
	}
	if err := errors.Join(err, pinned.Store.Close()); err != nil {
		t.Fatal(err)
	}
	return withSnapshot(msg, pinned.Applied, pinned.Term, pinned.Members), body
}

// TestDropSnapshot: what raft did not take is deleted, unless it was there before.
func TestDropSnapshot(t *testing.T) {
	dir := t.TempDir()
	m := start(t, dir)
	defer stop(t, m)
	msg, body := snapshotOf(t, m, true)
	found := func() []string { names, _ := filepath.Glob(filepath.Join(dir, snapshotPrefix+"*")); return names }
	drop, err := snapshots{m}.Receive(t.Context(), msg, true, bytes.NewReader(body.Bytes()))
	if err != nil || len(found()) != 1 {
		t.Fatal(found(), err)
	}
	again, err := snapshots{m}.Receive(t.Context(), msg, true, body)
	if err != nil {
		t.Fatal(err)
	}
	if err := again(); err != nil || len(found()) != 1 {
		t.Fatal(found(), err)
	}
	if err := drop(); err != nil || len(found()) != 0 {
		t.Fatal(found(), err)
	}
}

// TestReceiveBesideStale: a snapshot that comes while old ones are being deleted waits for that.
func TestReceiveBesideStale(t *testing.T) {
	m := start(t, t.TempDir())
	defer stop(t, m)
	msg, body := snapshotOf(t, m, true)
	m.receiving.Lock()
	go m.receiving.Unlock()
	if _, err := (snapshots{m}).Receive(t.Context(), msg, true, body); err != nil {
		t.Fatal(err)
	}
}

// TestSnapshotOnFullDisk: a snapshot of either form ends when the disk gets full,
// while it comes in or while it is read, and leaves nothing.
func TestSnapshotOnFullDisk(t *testing.T) {
	dir, fs := t.TempDir(), &fullFS{FS: vfs.Default}
	fs.free.Store(1 << 40)
	m, err := tryStartWith(t, dir, slog.New(slog.DiscardHandler), Seams{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, m)
	left := func(free uint64) {
		fs.free.Store(free)
		m.guard.judge(free)
	}
	for _, x := range []struct {
		name   string
		native bool
		ends   bool // with its last byte
	}{{"etcd's comes in", false, false}, {"etcd's is read", false, true}, {"ours comes in", true, false}} {
		msg, body := snapshotOf(t, m, x.native)
		half := body.Len() / 2
		from := io.MultiReader(bytes.NewReader(body.Bytes()[:half]), &shutting{bytes.NewReader(body.Bytes()[half:]), 0, func() { left(1 << 20) }})
		if x.ends {
			from = io.MultiReader(body, &shutting{bytes.NewReader(nil), 0, func() { left(1 << 20) }})
		}
		_, err = snapshots{m}.Receive(t.Context(), msg, x.native, from)
		if err == nil || !strings.Contains(err.Error(), "1.0 MiB free") {
			t.Errorf("%s: %v", x.name, err)
		}
		if found, _ := filepath.Glob(filepath.Join(dir, snapshotPrefix+"*")); len(found) > 0 {
			t.Errorf("%s: %q is left", x.name, found)
		}
		left(1 << 40)
	}
}
