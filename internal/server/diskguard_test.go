package server

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/raftlog"
)

// fullFS is a disk of which so much is free.
type fullFS struct {
	vfs.FS
	free atomic.Uint64
}

func (fs *fullFS) GetDiskUsage(string) (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: fs.free.Load(), TotalBytes: 1 << 40}, nil
}

// twoDisks has one disk for a directory and another for the rest, of which so much is free.
type twoDisks struct {
	vfs.FS
	dir        string
	free, rest atomic.Uint64
}

func (fs *twoDisks) GetDiskUsage(path string) (vfs.DiskUsage, error) {
	free := &fs.rest
	if path == fs.dir {
		free = &fs.free
	}
	return vfs.DiskUsage{AvailBytes: free.Load(), TotalBytes: 1 << 40}, nil
}

// TestDiskGuardOfTheLog: with --wal-dir the log's disk counts as well, by a reserve of its own.
func TestDiskGuardOfTheLog(t *testing.T) {
	dir, wal := filepath.Join(t.TempDir(), "data"), filepath.Join(t.TempDir(), "wal")
	fs := &twoDisks{FS: vfs.Default, dir: wal}
	fs.rest.Store(1 << 30)
	fs.free.Store(logReserve)
	m, err := tryStartWith(t, dir, slog.New(slog.DiscardHandler), Seams{FS: fs}, "--wal-dir="+wal)
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, m)
	c := client(t, m)
	if _, err = c.Put(t.Context(), "a", "1"); err != nil {
		t.Fatal(err)
	}
	fs.free.Store(logReserve - 1)
	for m.guards.Gate() == nil {
		if t.Context().Err() != nil {
			t.Fatal("the guard does not look at the log's disk")
		}
		time.Sleep(time.Millisecond)
	}
	_, err = c.Put(t.Context(), "new", "1")
	if status.Code(err) != codes.ResourceExhausted && !errors.Is(err, rpctypes.ErrNoSpace) || !strings.Contains(err.Error(), "the disk of "+wal) || strings.Contains(err.Error(), "compact") {
		t.Errorf("a put with the log's disk full: %v", err)
	}
	// A delete of however many is one entry there.
	data, err := command.AppendMessage(nil, command.KindDeleteRange, command.Header{ID: 1}, &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("b")})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.guards.Pass(data, reckoned(1<<30)); err != nil {
		t.Errorf("a delete: %v", err)
	}
	if m.guard.Gate() != nil {
		t.Error("the store's disk counts as full")
	}
	ofLog := m.guards[1]
	for free, want := range map[uint64]bool{raftlog.DefaultSegmentBytes - 1: false, raftlog.DefaultSegmentBytes: true} {
		g := diskGuards{m.guard, {dir: wal, ofLog: true, reserve: ofLog.reserve, log: ofLog.log}}
		g[1].judge(free)
		if (g.LastGate() == nil) != want {
			t.Errorf("with %d free on the log's disk appends pass: %t", free, !want)
		}
	}
}

// TestDiskGuardOfTheLogKeepsASegment: on the log's disk nothing passes that may need another segment where there is no room for one, however small the
// reserve, and what makes space keeps its order.
func TestDiskGuardOfTheLogKeepsASegment(t *testing.T) {
	const segment = raftlog.DefaultSegmentBytes
	entry := func(kind command.Kind, msg proto.Message) []byte {
		data, err := command.AppendMessage(nil, kind, command.Header{ID: 1}, msg)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	compaction := entry(command.KindCompaction, &pb.CompactionRequest{Revision: 5})
	del := entry(command.KindDeleteRange, &pb.DeleteRangeRequest{Key: []byte("a")})
	for _, x := range []struct{ reserve, compactions, deletes uint64 }{
		{8 * segment, segment, 2 * segment}, // four at most
		{4 * segment, segment, 2 * segment},
		{segment * 5 / 2, segment, segment * 3 / 2},
		{segment, segment, segment},
		{segment / 2, segment / 2, segment / 2},
	} {
		fs := &fullFS{FS: vfs.NewMem()}
		g, err := newLogGuard(fs, "", int64(x.reserve), true, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		for _, free := range []uint64{0, segment/2 - 1, segment / 2, segment - 1, segment, segment*3/2 - 1, segment * 3 / 2, 2*segment - 1, 2 * segment, 4*segment - 1} {
			g.judge(0)
			g.judge(free)
			for name, c := range map[string]struct {
				err  error
				want uint64
			}{"appends": {g.LastGate(), x.compactions}, "compactions": {g.Pass(compaction, reckoned(0)), x.compactions}, "deletes": {g.Pass(del, reckoned(1<<40)), x.deletes}} {
				if (c.err == nil) != (free >= c.want) {
					t.Errorf("reserve %d, %d free: %s: %v", x.reserve, free, name, c.err)
				}
			}
		}
	}
}

// reckoned is a reckoner: deletes cost so much, and the key "there" exists.
type reckoned int64

func (r reckoned) DeleteCost(c *command.Command) int64 {
	if c.Kind == command.KindDeleteRange || c.Kind == command.KindLeaseRevoke {
		return int64(r)
	}
	return 0
}

func (r reckoned) Overwrites(c *command.Command) bool {
	if c.Kind == command.KindTxn {
		for _, op := range c.Txn.Success {
			if op.Kind == command.OpPut && string(op.Put.Key) != "there" {
				return false
			}
		}
		return true
	}
	return string(c.Put.Key) == "there"
}

// TestDiskGuardByRequest: what must be free for each request, and that nothing
// passes with less.
func TestDiskGuardByRequest(t *testing.T) {
	const reserve = 400 << 20
	const quarter, half = reserve / 4, reserve / 2
	fs := &fullFS{FS: vfs.NewMem()}
	fs.free.Store(reserve - 1)
	g, err := newDiskGuard(fs, "", reserve, true, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	put := func(key string, size int) *pb.PutRequest {
		return &pb.PutRequest{Key: []byte(key), Value: make([]byte, size)}
	}
	then := func(p *pb.PutRequest) *pb.TxnRequest {
		return &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: p}}}}
	}
	del := &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}
	for _, x := range []struct {
		name    string
		kind    command.Kind
		msg     proto.Message
		deletes reckoned
		want    uint64
	}{
		{"compaction", command.KindCompaction, &pb.CompactionRequest{Revision: 5}, 0, quarter},
		{"alarm off", command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, Alarm: pb.AlarmType_NOSPACE}, 0, quarter},
		{"alarm on", command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, Alarm: pb.AlarmType_CORRUPT}, 0, quarter},
		{"delete of few", command.KindDeleteRange, del, 1, half},
		{"delete of an eighth", command.KindDeleteRange, del, quarter / 2, half},
		{"delete of more", command.KindDeleteRange, del, quarter/2 + 5, half + 10},
		{"delete of too many", command.KindDeleteRange, del, reserve, never},
		{"revoke of few", command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 1}, 1, half},
		{"revoke of more", command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 1}, quarter, quarter + half},
		{"read through the log", command.KindTxn, &pb.TxnRequest{}, 0, half},
		{"compactor's txn", command.KindTxn, then(put("there", 20)), 0, half},
		{"txn that creates", command.KindTxn, then(put("new", 20)), 0, never},
		{"small overwrite", command.KindPut, put("there", 20), 0, half},
		{"put", command.KindPut, put("new", 20), 0, never},
		{"large overwrite", command.KindPut, put("there", 600), 0, never},
		{"grant", command.KindLeaseGrant, &pb.LeaseGrantRequest{TTL: 5}, 0, never},
	} {
		data, err := command.AppendMessage(nil, x.kind, command.Header{ID: 1}, x.msg)
		if err != nil {
			t.Fatal(err)
		}
		passes := func(free uint64) bool {
			g.judge(free)
			err := g.Pass(data, x.deletes)
			if err != nil && (status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "mvcc: database space exceeded")) {
				t.Errorf("%s: %v", x.name, err)
			}
			if err == nil && g.LastGate() != nil {
				t.Errorf("%s passes with %d free, and a follower with as much does not take it", x.name, free)
			}
			return err == nil
		}
		if x.want == never {
			if passes(reserve - 1) {
				t.Errorf("%s passes below the reserve", x.name)
			}
		} else if !passes(x.want) || passes(x.want-1) {
			t.Errorf("%s does not pass from %d bytes on", x.name, x.want)
		}
		// With space again everything does.
		g.judge(2 * reserve)
		if err := errors.Join(g.Gate(), g.LastGate(), g.Pass(data, x.deletes)); err != nil {
			t.Errorf("%s: %v", x.name, err)
		}
		g.judge(reserve - 1)
	}
	if err := g.Pass([]byte("no command"), reckoned(0)); err == nil {
		t.Error("what cannot be read passes")
	}

	// The reason is told, as it is now: there is room, but not for so many at a time.
	g.judge(reserve / 2)
	if err := g.Gate(); err == nil || !strings.Contains(err.Error(), "200 MiB free") {
		t.Errorf("with 200 MiB free: %v", err)
	}
	data, err := command.AppendMessage(nil, command.KindDeleteRange, command.Header{ID: 1}, del)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Pass(data, reckoned(reserve)); err == nil || !strings.Contains(err.Error(), "delete fewer keys at a time") || !strings.Contains(err.Error(), "400 MiB") {
		t.Errorf("a delete of too many: %v", err)
	}
}

// TestDiskGuardRoom: what need not be written leaves the last of the reserve.
func TestDiskGuardRoom(t *testing.T) {
	const reserve = 400 << 20
	g, err := newDiskGuard(&fullFS{FS: vfs.NewMem()}, "", reserve, true, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for free, want := range map[uint64]int64{0: 0, reserve / 4: 0, reserve/4 + 7: 7, 10 * reserve: 10*reserve - reserve/4} {
		g.judge(free)
		if got := g.Room(); got != want {
			t.Errorf("with %d free the room is %d, want %d", free, got, want)
		}
	}
	none, err := newDiskGuard(&fullFS{FS: vfs.NewMem()}, "", 0, true, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if none.Room() < 1<<60 || none.Gate() != nil || none.LastGate() != nil {
		t.Error("a member without a reserve is short of room")
	}
}
