package rpc

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// patterned is a Backup of bytes that follow from their place.
type patterned struct {
	ctx    context.Context
	size   int64
	fail   error // after half of it
	begun  func()
	closed func()
}

func (p *patterned) Size() int64     { return p.size }
func (p *patterned) Version() string { return "3.7.0" }
func (p *patterned) Close() error    { p.closed(); return nil }

func (p *patterned) WriteTo(w io.Writer) (n int64, err error) {
	if p.begun != nil {
		p.begun()
	}
	rng := rand.New(rand.NewPCG(uint64(p.size), 1))
	buf := make([]byte, 100_000)
	for n < p.size {
		if p.fail != nil && n >= p.size/2 {
			return n, p.fail
		}
		part := buf[:min(int64(len(buf)), p.size-n)]
		for i := 0; i < len(part); i += 8 {
			part[i] = byte(rng.Uint32())
		}
		k, err := w.Write(part)
		n += int64(k)
		if err != nil {
			return n, err
		}
	}
	return n, p.ctx.Err()
}

// backupEngine is Maintenance with backups of a kind.
type backupEngine struct {
	Maintenance
	make func(ctx context.Context) (*patterned, error)

	mu   sync.Mutex
	open int
	idle chan struct{} // gets one when the last is closed
}

func (e *backupEngine) Backup(ctx context.Context) (Backup, error) {
	p, err := e.make(ctx)
	if err != nil {
		return nil, err
	}
	p.ctx = ctx
	e.mu.Lock()
	defer e.mu.Unlock()
	e.open++
	p.closed = func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.open--; e.open == 0 {
			select {
			case e.idle <- struct{}{}:
			default:
			}
		}
	}
	return p, nil
}

func startBackups(t *testing.T, make func(context.Context) (*patterned, error)) (*served, *backupEngine) {
	t.Helper()
	e := &backupEngine{make: make, idle: newIdle()}
	m := start(t, func(o *Options) {
		e.Maintenance = o.Maintenance
		o.Maintenance = e
	})
	return m, e
}

func newIdle() chan struct{} { return make(chan struct{}, 1) }

// receive reads a backup and checks each message.
func receive(t *testing.T, stream pb.Maintenance_SnapshotClient, size int64) error {
	t.Helper()
	sum := sha256.New()
	var got int64
	var last []byte
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if last != nil {
			t.Fatal("a message follows the checksum")
		}
		if r.Header != nil || r.Version != "3.7.0" {
			t.Fatalf("header %v, version %q", r.Header, r.Version)
		}
		if got == size {
			last = r.Blob
			if len(last) != sha256.Size || r.RemainingBytes != 0 {
				t.Fatalf("the last message has %d bytes, %d remain", len(last), r.RemainingBytes)
			}
			continue
		}
		got += int64(len(r.Blob))
		sum.Write(r.Blob)
		if len(r.Blob) != blobBytes && got != size || r.RemainingBytes != uint64(size-got) {
			t.Fatalf("a blob of %d bytes, then %d remain of %d", len(r.Blob), r.RemainingBytes, size)
		}
	}
	if string(last) != string(sum.Sum(nil)) {
		t.Fatalf("checksum %x of %d bytes, want %x of %d", last, got, sum.Sum(nil), size)
	}
	return nil
}

func TestSnapshotStream(t *testing.T) {
	for _, size := range []int64{0, 1, blobBytes - 1, blobBytes, blobBytes + 1, 3 << 20} {
		m, _ := startBackups(t, func(context.Context) (*patterned, error) { return &patterned{size: size}, nil })
		stream := must[pb.Maintenance_SnapshotClient](t)(pb.NewMaintenanceClient(m.conn).Snapshot(t.Context(), &pb.SnapshotRequest{}))
		if err := receive(t, stream, size); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// TestSnapshotFails tells the client when the store cannot be read, and never
// ends such a stream as a whole one.
func TestSnapshotFails(t *testing.T) {
	broken := errors.New("block 7 is damaged")
	for _, c := range []struct {
		name string
		make func(context.Context) (*patterned, error)
	}{
		{"at once", func(context.Context) (*patterned, error) { return nil, broken }},
		{"halfway", func(context.Context) (*patterned, error) { return &patterned{size: 1 << 20, fail: broken}, nil }},
	} {
		m, _ := startBackups(t, c.make)
		stream := must[pb.Maintenance_SnapshotClient](t)(pb.NewMaintenanceClient(m.conn).Snapshot(t.Context(), &pb.SnapshotRequest{}))
		if err := receive(t, stream, 1<<20); status.Convert(err).Message() != broken.Error() {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestSnapshotLimit bounds those at once, and gives back the places of clients
// that leave.
func TestSnapshotLimit(t *testing.T) {
	m, e := startBackups(t, func(context.Context) (*patterned, error) { return &patterned{size: 1 << 40}, nil })
	maintenance := pb.NewMaintenanceClient(m.conn)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range maxBackups {
		stream := must[pb.Maintenance_SnapshotClient](t)(maintenance.Snapshot(ctx, &pb.SnapshotRequest{}))
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	stream := must[pb.Maintenance_SnapshotClient](t)(maintenance.Snapshot(t.Context(), &pb.SnapshotRequest{}))
	if _, err := stream.Recv(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one too many: %v", err)
	}
	cancel()
	<-e.idle
	for {
		stream := must[pb.Maintenance_SnapshotClient](t)(maintenance.Snapshot(t.Context(), &pb.SnapshotRequest{}))
		_, err := stream.Recv()
		if err == nil {
			break
		}
		if status.Code(err) != codes.ResourceExhausted { // the slot is given back a moment after Close
			t.Fatal(err)
		}
	}
}

// TestSnapshotMemory sends much to a client that does not read: the server waits
// and holds little.
func TestSnapshotMemory(t *testing.T) {
	began := make(chan struct{})
	m, e := startBackups(t, func(context.Context) (*patterned, error) {
		return &patterned{size: 1 << 40, begun: sync.OnceFunc(func() { close(began) })}, nil
	})
	before := heap()
	ctx, cancel := context.WithCancel(t.Context())
	stream := must[pb.Maintenance_SnapshotClient](t)(pb.NewMaintenanceClient(m.conn).Snapshot(ctx, &pb.SnapshotRequest{}))
	<-began
	// Some of it read, so that windows open and fill again.
	for range 1000 {
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if grown := heap() - before; grown > 24<<20 {
		t.Errorf("%d MiB more in use", grown>>20)
	}
	cancel()
	<-e.idle
}

func heap() int64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// TestSnapshotAccess lets only the role root have it, and a learner serve it.
func TestSnapshotAccess(t *testing.T) {
	if !learnerServes["/etcdserverpb.Maintenance/Snapshot"] {
		t.Error("a learner does not serve it")
	}
	e := &backupEngine{make: func(context.Context) (*patterned, error) { return &patterned{size: 100}, nil }, idle: newIdle()}
	m := start(t, func(o *Options) {
		o.BcryptCost = bcrypt.MinCost
		e.Maintenance, o.Maintenance = o.Maintenance, e
	})
	users, ctx := pb.NewAuthClient(m.conn), t.Context()
	for _, name := range []string{"root", "other"} {
		must[*pb.AuthUserAddResponse](t)(users.UserAdd(ctx, &pb.AuthUserAddRequest{Name: name, Password: name}))
	}
	must[*pb.AuthUserGrantRoleResponse](t)(users.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"}))
	must[*pb.AuthEnableResponse](t)(users.AuthEnable(ctx, &pb.AuthEnableRequest{}))
	snapshot := func(ctx context.Context) error {
		return receive(t, must[pb.Maintenance_SnapshotClient](t)(pb.NewMaintenanceClient(m.conn).Snapshot(ctx, &pb.SnapshotRequest{})), 100)
	}
	token := func(name string) string {
		return must[*pb.AuthenticateResponse](t)(users.Authenticate(ctx, &pb.AuthenticateRequest{Name: name, Password: name})).Token
	}
	root, other := token("root"), token("other")
	m.authOn.Store(true) // the rules of this engine's views
	for who, ctx := range map[string]context.Context{"nobody": ctx, "other": withToken(t, other)} {
		if err := snapshot(ctx); status.Convert(err).Message() != "denied" {
			t.Errorf("%s: %v", who, err)
		}
	}
	if err := snapshot(withToken(t, root)); err != nil {
		t.Error(err)
	}
}
