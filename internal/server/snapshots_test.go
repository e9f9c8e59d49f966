package server

import (
	"context"
	"strings"
	"testing"
	"time"

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
