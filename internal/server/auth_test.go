package server

import (
	"context"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/metadata"

	"github.com/engram-kv/engram/internal/clock"
)

// ahead is the system's clock, ahead by as much as a test says.
type ahead struct {
	clock.Clock
	by atomic.Int64
}

func (c *ahead) Now() time.Time { return c.Clock.Now().Add(time.Duration(c.by.Load())) }

// logLines keeps what a member logs, from all its goroutines.
type logLines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logLines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// addRoot turns auth on and returns a token of root.
func addRoot(t *testing.T, c *clientv3.Client) string {
	t.Helper()
	ctx := t.Context()
	if _, err := c.UserAdd(ctx, "root", "secret"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.UserGrantRole(ctx, "root", "root"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.AuthEnable(ctx); err != nil {
		t.Fatal(err)
	}
	return login(t, c)
}

func login(t *testing.T, c *clientv3.Client) string {
	t.Helper()
	r, err := c.Authenticate(t.Context(), "root", "secret")
	if err != nil {
		t.Fatal(err)
	}
	return r.Token
}

// tryToken lists users with a token.
func tryToken(ctx context.Context, c *clientv3.Client, token string) error {
	ctx = metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token)
	_, err := pb.NewAuthClient(c.ActiveConnection()).UserList(ctx, &pb.AuthUserListRequest{})
	return rpctypes.Error(err)
}

// TestAuthFlags: --auth-token-ttl and --bcrypt-cost are honoured, and a restart
// forgets the tokens but not the users.
func TestAuthFlags(t *testing.T) {
	dir, now := filepath.Join(t.TempDir(), "data"), &ahead{Clock: clock.Real()}
	flags := []string{"--auth-token-ttl=60", "--bcrypt-cost=5"}
	m, err := tryStartWith(t, dir, slog.New(slog.DiscardHandler), Seams{Clock: now}, flags...)
	if err != nil {
		t.Fatal(err)
	}
	c := client(t, m)
	token := addRoot(t, c)
	users, _, _ := m.machine().Tables()
	if cost, err := bcrypt.Cost(users.User("root").GetPassword()); err != nil || cost != 5 {
		t.Errorf("cost %d, %v", cost, err)
	}
	for range 3 { // each use gives it its time anew
		now.by.Add(int64(50 * time.Second))
		if err := tryToken(t.Context(), c, token); err != nil {
			t.Fatal(err)
		}
	}
	now.by.Add(int64(60 * time.Second))
	if err := tryToken(t.Context(), c, token); err != rpctypes.ErrInvalidAuthToken {
		t.Errorf("a token that was unused for its time: %v", err)
	}
	token = login(t, c)
	_ = c.Close()
	stop(t, m)

	var log logLines
	m, err = tryStartWith(t, dir, slog.New(slog.NewTextHandler(&log, nil)), Seams{}, "--bcrypt-cost=32")
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, m)
	c = client(t, m)
	if err := tryToken(t.Context(), c, token); err != rpctypes.ErrInvalidAuthToken {
		t.Errorf("a token from before the restart: %v", err)
	}
	if err := tryToken(t.Context(), c, login(t, c)); err != nil {
		t.Error(err)
	}
	if m.bcryptCost() != bcrypt.DefaultCost || !strings.Contains(log.text(), "--bcrypt-cost is not between") {
		t.Errorf("cost %d, the log says %s", m.bcryptCost(), log.text())
	}
	// Probes need no token.
	if r, err := http.Get("http://" + strings.TrimPrefix(m.ClientAddrs()[0], "http://") + "/health"); err != nil || r.StatusCode != http.StatusOK {
		t.Errorf("/health: %v, %v", r, err)
	} else {
		_ = r.Body.Close()
	}
	// Another member that promotes for a client sends the client's token on.
	for token, want := range map[string]bool{login(t, c): true, "wrong": false, "": false, "abcdefghijklmnop.99999": false} {
		if err := m.mayAdminister(t.Context(), token); (err == nil) != want {
			t.Errorf("token %q: %v", token, err)
		}
	}
}
