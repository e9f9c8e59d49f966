package rpc

import (
	"crypto/sha256"
	"io"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// blobBytes is what one message of a backup carries, as in etcd.
	blobBytes = 32 << 10
	// maxBackups bounds those that run at once. Each pins a moment of the store,
	// whose space does not come back meanwhile, and reads all of it twice.
	maxBackups = 4
)

// Backup is a moment of the store on its way into a backup: etcd's database file.
type Backup interface {
	// Size is how many bytes WriteTo writes.
	Size() int64
	// Version is that of the file's form, "3.7.0", or "" for that of 3.5.
	Version() string
	io.WriterTo
	// Close lets go of the moment.
	Close() error
}

// backups counts those that run, up to maxBackups.
type backups struct {
	slots   chan struct{}
	running sync.WaitGroup
}

func newBackups() *backups { return &backups{slots: make(chan struct{}, maxBackups)} }

func (b *backups) begin() error {
	select {
	case b.slots <- struct{}{}:
		b.running.Add(1)
		return nil
	default:
		return status.Errorf(codes.ResourceExhausted,
			"etcdserver: too many snapshots at once: this member sends %d already; try again when one is done, or ask another member", maxBackups)
	}
}

func (b *backups) end() {
	<-b.slots
	b.running.Done()
}

// Snapshot streams the store of one moment as etcd's database, and behind it the
// SHA-256 of that. Nothing is written to disk, and writes go on.
func (m *maintenanceService) Snapshot(_ *pb.SnapshotRequest, stream pb.Maintenance_SnapshotServer) (err error) {
	ctx := stream.Context()
	if _, err := m.s.admin(ctx); err != nil {
		return err
	}
	if err := m.s.backups.begin(); err != nil {
		return err
	}
	defer m.s.backups.end()
	b, err := m.s.o.Maintenance.Backup(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := b.Close(); err == nil {
			err = closeErr
		}
	}()
	w := &blobWriter{stream: stream, version: b.Version(), left: b.Size(), blob: make([]byte, 0, blobBytes)}
	sum := sha256.New()
	if _, err := b.WriteTo(io.MultiWriter(w, sum)); err != nil {
		return err
	}
	if err := w.flush(); err != nil {
		return err
	}
	return stream.Send(&pb.SnapshotResponse{Blob: sum.Sum(nil), Version: w.version})
}

// blobWriter sends what is written in messages of blobBytes.
type blobWriter struct {
	stream  pb.Maintenance_SnapshotServer
	version string
	left    int64 // bytes that were not sent
	blob    []byte
}

func (w *blobWriter) Write(b []byte) (n int, err error) {
	for n < len(b) {
		took := min(len(b)-n, blobBytes-len(w.blob))
		w.blob = append(w.blob, b[n:n+took]...)
		n += took
		if len(w.blob) == blobBytes {
			if err := w.flush(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// flush sends what there is. The message's bytes are encoded before Send returns.
func (w *blobWriter) flush() error {
	if len(w.blob) == 0 {
		return nil
	}
	w.left -= int64(len(w.blob))
	err := w.stream.Send(&pb.SnapshotResponse{RemainingBytes: uint64(w.left), Blob: w.blob, Version: w.version})
	w.blob = w.blob[:0]
	return err
}
