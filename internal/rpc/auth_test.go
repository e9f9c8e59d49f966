package rpc

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
)

func withToken(t *testing.T, token string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), rpctypes.TokenFieldNameGRPC, token)
}

// TestAuthService sets users up, turns auth on, and calls with tokens.
func TestAuthService(t *testing.T) {
	m := start(t, func(o *Options) { o.BcryptCost = bcrypt.MinCost })
	m.put(t, "a", "1")
	users, ctx := pb.NewAuthClient(m.conn), t.Context()
	_, err := users.Authenticate(ctx, &pb.AuthenticateRequest{Name: "root", Password: "secret"})
	wantError(t, err, rpctypes.ErrGRPCAuthNotEnabled)
	_, err = users.AuthEnable(ctx, &pb.AuthEnableRequest{})
	wantError(t, err, rpctypes.ErrGRPCRootUserNotExist)
	added := must[*pb.AuthUserAddResponse](t)(users.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "secret"}))
	if want := headerAt(2); !proto.Equal(added.Header, want) {
		t.Errorf("header %v, want %v", added.Header, want)
	}
	if hash := m.root().User("root").GetPassword(); bcrypt.CompareHashAndPassword(hash, []byte("secret")) != nil {
		t.Errorf("the user's password is %q", hash)
	} else if cost, err := bcrypt.Cost(hash); err != nil || cost != bcrypt.MinCost {
		t.Errorf("cost %d, %v", cost, err)
	}
	must[*pb.AuthUserAddResponse](t)(users.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "none", Password: "p", Options: &authpb.UserAddOptions{NoPassword: true}}))
	must[*pb.AuthUserGrantRoleResponse](t)(users.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"}))
	must[*pb.AuthRoleAddResponse](t)(users.RoleAdd(ctx, &pb.AuthRoleAddRequest{Name: "few"}))
	must[*pb.AuthEnableResponse](t)(users.AuthEnable(ctx, &pb.AuthEnableRequest{}))
	for _, r := range []*pb.AuthenticateRequest{{Name: "root", Password: "wrong"}, {Name: "root"}, {Name: "nobody", Password: "secret"}} {
		_, err = users.Authenticate(ctx, r)
		wantError(t, err, rpctypes.ErrGRPCAuthFailed)
	}
	_, err = users.Authenticate(ctx, &pb.AuthenticateRequest{Name: "none", Password: "p"})
	wantError(t, err, errNoPassword)
	got := must[*pb.AuthenticateResponse](t)(users.Authenticate(withToken(t, "of no use here"), &pb.AuthenticateRequest{Name: "root", Password: "secret"}))
	if !regexp.MustCompile(`^[a-zA-Z]{16}\.[0-9]+$`).MatchString(got.Token) {
		t.Errorf("token %q", got.Token)
	}
	root := withToken(t, got.Token)
	list := must[*pb.AuthUserListResponse](t)(users.UserList(root, &pb.AuthUserListRequest{}))
	if strings.Join(list.Users, " ") != "none root" || list.Header.GetRevision() != 2 {
		t.Errorf("users: %v", list)
	}
	for _, ctx := range []context.Context{withToken(t, "wrong"), withToken(t, got.Token+"0")} {
		_, err = users.UserList(ctx, &pb.AuthUserListRequest{})
		wantError(t, err, rpctypes.ErrGRPCInvalidAuthToken)
		_, err = users.AuthStatus(ctx, &pb.AuthStatusRequest{})
		wantError(t, err, rpctypes.ErrGRPCInvalidAuthToken)
	}
	_, err = users.UserList(t.Context(), &pb.AuthUserListRequest{})
	wantError(t, err, rpctypes.ErrGRPCUserEmpty)
	state := must[*pb.AuthStatusResponse](t)(users.AuthStatus(t.Context(), &pb.AuthStatusRequest{}))
	if !state.Enabled || state.AuthRevision != 5 {
		t.Errorf("status: %v", state)
	}

	// A new password voids the tokens of the old one. With an empty one none is right.
	for _, password := range []string{"other", ""} {
		got = must[*pb.AuthenticateResponse](t)(users.Authenticate(ctx, &pb.AuthenticateRequest{Name: "root", Password: "secret"}))
		root = withToken(t, got.Token)
		must[*pb.AuthUserChangePasswordResponse](t)(users.UserChangePassword(root, &pb.AuthUserChangePasswordRequest{Name: "root", Password: password}))
		_, err = users.UserList(root, &pb.AuthUserListRequest{})
		wantError(t, err, rpctypes.ErrGRPCInvalidAuthToken)
		_, err = users.Authenticate(ctx, &pb.AuthenticateRequest{Name: "root", Password: "secret"})
		wantError(t, err, rpctypes.ErrGRPCAuthFailed)
		if password == "" {
			_, err = users.Authenticate(ctx, &pb.AuthenticateRequest{Name: "root"})
			wantError(t, err, rpctypes.ErrGRPCAuthFailed)
			break
		}
		got = must[*pb.AuthenticateResponse](t)(users.Authenticate(ctx, &pb.AuthenticateRequest{Name: "root", Password: password}))
		must[*pb.AuthUserChangePasswordResponse](t)(users.UserChangePassword(withToken(t, got.Token), &pb.AuthUserChangePasswordRequest{Name: "root", Password: "secret"}))
	}
}

// TestLongPassword: bcrypt's limit has etcd's answer, before it is asked who calls.
func TestLongPassword(t *testing.T) {
	m := start(t, nil)
	users, long := pb.NewAuthClient(m.conn), strings.Repeat("p", 73)
	m.authOn.Store(true)
	_, add := users.UserAdd(t.Context(), &pb.AuthUserAddRequest{Name: "u", Password: long})
	_, change := users.UserChangePassword(t.Context(), &pb.AuthUserChangePasswordRequest{Name: "u", Password: long})
	for _, err := range []error{add, change} {
		wantError(t, err, status.Error(codes.Unknown, "bcrypt: password length exceeds 72 bytes"))
	}
}

// TestNoPasswordInLog: what is proposed carries the hash alone.
func TestNoPasswordInLog(t *testing.T) {
	seen := &recorder{}
	m := start(t, func(o *Options) {
		o.BcryptCost = bcrypt.MinCost
		seen.Consensus, o.Consensus = o.Consensus, seen
	})
	users := pb.NewAuthClient(m.conn)
	const secret = "ThePasswordItself"
	must[*pb.AuthUserAddResponse](t)(users.UserAdd(t.Context(), &pb.AuthUserAddRequest{Name: "u", Password: secret}))
	must[*pb.AuthUserAddResponse](t)(users.UserAdd(t.Context(), &pb.AuthUserAddRequest{Name: "v", Password: secret, Options: &authpb.UserAddOptions{NoPassword: true}}))
	must[*pb.AuthUserChangePasswordResponse](t)(users.UserChangePassword(t.Context(), &pb.AuthUserChangePasswordRequest{Name: "u", Password: secret}))
	entries := seen.take()
	if len(entries) != 3 {
		t.Errorf("%d entries", len(entries))
	}
	for _, data := range entries {
		if strings.Contains(string(data), secret) {
			t.Errorf("the entry %q holds the password", data)
		}
	}
}

// recorder keeps what is proposed.
type recorder struct {
	Consensus
	mu   sync.Mutex
	data [][]byte
}

func (r *recorder) Propose(p Proposal) error {
	r.mu.Lock()
	r.data = append(r.data, append([]byte(nil), p.Data...))
	r.mu.Unlock()
	return r.Consensus.Propose(p)
}

// take returns what was proposed since the last take.
func (r *recorder) take() [][]byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	data := r.data
	r.data = nil
	return data
}

// TestAuthenticateAgain: who authenticates while users change is checked anew.
func TestAuthenticateAgain(t *testing.T) {
	seen := &recorder{}
	moving := &movingAuth{moves: 2}
	m := start(t, func(o *Options) {
		o.BcryptCost = bcrypt.MinCost
		seen.Consensus, o.Consensus = o.Consensus, seen
		moving.Auth, o.Auth = o.Auth, moving
	})
	users := pb.NewAuthClient(m.conn)
	must[*pb.AuthUserAddResponse](t)(users.UserAdd(t.Context(), &pb.AuthUserAddRequest{Name: "root", Password: "r"}))
	must[*pb.AuthUserGrantRoleResponse](t)(users.UserGrantRole(t.Context(), &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"}))
	must[*pb.AuthEnableResponse](t)(users.AuthEnable(t.Context(), &pb.AuthEnableRequest{}))
	seen.take()
	must[*pb.AuthenticateResponse](t)(users.Authenticate(t.Context(), &pb.AuthenticateRequest{Name: "root", Password: "r"}))
	entries := seen.take()
	if asked := moving.asked.Load(); len(entries) != 3 || asked != 3 {
		t.Errorf("%d entries, the password was looked up %d times", len(entries), asked)
	}
	for _, data := range entries {
		var c command.Command
		if err := command.Decode(data, &c); err != nil || c.Kind != command.KindAuthenticate || c.Header.Username != "" {
			t.Errorf("%v %+v, %v", c.Kind, c.Header, err)
		}
	}
}

// movingAuth is an Auth whose revision moves between a look-up and the next
// question for it, the first times.
type movingAuth struct {
	Auth
	moves int64
	asked atomic.Int64
}

func (a *movingAuth) Password(name string) ([]byte, uint64, error) {
	hash, revision, err := a.Auth.Password(name)
	if a.asked.Add(1) <= a.moves {
		revision--
	}
	return hash, revision, err
}

// TestTokenAhead: calls with a token of an entry that is not applied yet wait for
// it, all kinds of them, and do not take a forged one for good.
func TestTokenAhead(t *testing.T) {
	calls := map[string]func(*testing.T, *served, context.Context) error{
		"Put": func(_ *testing.T, m *served, ctx context.Context) error {
			_, err := m.kv.Put(ctx, &pb.PutRequest{Key: []byte("root/a")})
			return err
		},
		"Range": func(_ *testing.T, m *served, ctx context.Context) error {
			_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a"), Serializable: true})
			return err
		},
		"RangeStream": func(_ *testing.T, m *served, ctx context.Context) error {
			stream, err := m.kv.RangeStream(ctx, &pb.RangeRequest{Key: []byte("a"), Serializable: true})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"Compact": func(_ *testing.T, m *served, ctx context.Context) error {
			_, err := m.kv.Compact(ctx, &pb.CompactionRequest{Revision: 2})
			return err
		},
		"LeaseGrant": func(_ *testing.T, m *served, ctx context.Context) error {
			_, err := pb.NewLeaseClient(m.conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: 100})
			return err
		},
		"LeaseKeepAlive": func(t *testing.T, m *served, ctx context.Context) error {
			_, err := m.keepAlive(ctx, t, 1).Recv()
			return err
		},
		"Watch": func(_ *testing.T, m *served, ctx context.Context) error {
			stream, err := pb.NewWatchClient(m.conn).Watch(ctx)
			if err != nil {
				return err
			}
			r := &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("a")}}}
			if err := stream.Send(r); err != nil {
				return err
			}
			answer, err := stream.Recv()
			if err == nil && answer.CancelReason != "" {
				err = rpctypes.ErrGRPCInvalidAuthToken
				if answer.CancelReason != err.Error() {
					err = status.Error(codes.Unknown, answer.CancelReason)
				}
			}
			return err
		},
		"HashKV": func(_ *testing.T, m *served, ctx context.Context) error {
			_, err := pb.NewMaintenanceClient(m.conn).HashKV(ctx, &pb.HashKVRequest{})
			return err
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			m := start(t, nil)
			m.put(t, "a", "1")
			m.put(t, "a", "2")
			m.authOn.Store(true)
			hold := make(chan struct{})
			m.readHold.Store(&hold)
			m.caughtUp.Store(false)
			done := make(chan error, 1)
			go func() { done <- call(t, m, withToken(t, "ahead of root")) }()
			select {
			case err := <-done:
				t.Fatalf("answered before the round of reading: %v", err)
			case <-m.asking: // for a round of reading
			}
			close(hold)
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		t.Run(name+" forged", func(t *testing.T) {
			m := start(t, func(o *Options) { o.Auth = forged{o.Auth} })
			m.put(t, "a", "1")
			m.authOn.Store(true)
			wantError(t, call(t, m, withToken(t, "abc.99")), rpctypes.ErrGRPCInvalidAuthToken)
		})
	}
}

// forged is an Auth to whom every token may come yet.
type forged struct{ Auth }

func (forged) Identify(string) (Identity, error) { return Identity{}, auth.ErrTokenAhead }

// TestRequestNames: the types of auth requests in metrics are those of package
// command.
func TestRequestNames(t *testing.T) {
	for kind := command.KindAuthEnable; kind <= command.KindAuthRoleRevokePermission; kind++ {
		name := strings.ToLower(requestNames[requestOf(kind)])
		if want := strings.ReplaceAll(kind.String(), "_", ""); name != want {
			t.Errorf("%v is named %s", kind, name)
		}
	}
	if last := requestOf(command.KindAuthRoleRevokePermission); last != requestKinds-1 {
		t.Errorf("the last one is %d of %d", last, requestKinds)
	}
}

// TestHasherBound: more calls than may wait are turned away at once.
func TestHasherBound(t *testing.T) {
	h := newHasher(bcrypt.MinCost)
	for range cap(h.places) {
		h.places <- struct{}{}
	}
	h.waiting.Store(maxHashing)
	if _, err := h.hash(t.Context(), "p"); err != errTooManyRequests {
		t.Errorf("hash: %v", err)
	}
	h.waiting.Store(0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.compare(ctx, nil, "p"); err != context.Canceled {
		t.Errorf("compare: %v", err)
	}
	if n := h.waiting.Load(); n != 0 {
		t.Errorf("%d wait", n)
	}
	<-h.places
	hash, err := bcrypt.GenerateFromPassword([]byte("p"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.compare(t.Context(), hash, "p"); err != nil {
		t.Error(err)
	}
}
