package state

import (
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
)

// TestTokens: entries make and void tokens, whoever proposed them, and what fails
// does not.
func TestTokens(t *testing.T) {
	tokens := auth.NewTokens(0, time.Now)
	r := newRig(t, Options{Tokens: tokens})
	defer r.close()
	root := func() command.Header {
		return command.Header{Username: "root", AuthRevision: r.m.now.Load().auth.Revision()}
	}
	run := func(h command.Header, kind command.Kind, msg proto.Message) Result {
		t.Helper()
		r.propose(h, kind, msg)
		results, err := r.m.Apply(r.entries[len(r.entries)-1:])
		if err != nil {
			t.Fatal(err)
		}
		return results[0]
	}
	must := func(kind command.Kind, msg proto.Message) {
		t.Helper()
		if res := run(root(), kind, msg); res.Err != nil {
			t.Fatal(res.Err)
		}
	}
	login := func(user string) (token string) {
		t.Helper()
		res := run(command.Header{}, command.KindAuthenticate, &pb.InternalAuthenticateRequest{Name: user, SimpleToken: "abcdefghijklmnop"})
		if res.Err != nil {
			return ""
		}
		return res.Reply.Message.(*pb.AuthenticateResponse).Token
	}
	known := func(token, want string) {
		t.Helper()
		if user, _ := tokens.User(token); user != want {
			t.Errorf("token %s is %q's, want %q", token, user, want)
		}
	}
	for _, name := range []string{"root", "ann", "bob"} {
		must(command.KindAuthUserAdd, &pb.AuthUserAddRequest{Name: name, HashedPassword: "aGFzaA=="})
	}
	must(command.KindAuthUserAdd, &pb.AuthUserAddRequest{Name: "none", Options: &authpb.UserAddOptions{NoPassword: true}})
	must(command.KindAuthUserGrantRole, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
	if token := login("ann"); token != "" {
		t.Errorf("while auth is off: token %s", token)
	}
	must(command.KindAuthEnable, &pb.AuthEnableRequest{})
	for _, name := range []string{"none", "nobody"} {
		if token := login(name); token != "" {
			t.Errorf("%s got token %s", name, token)
		}
	}
	ann, bob := login("ann"), login("bob")
	if index, ok := auth.IssuedAt(ann); !ok || index != uint64(len(r.entries))-1 {
		t.Errorf("token %s of entry %d", ann, len(r.entries)-1)
	}
	known(ann, "ann")
	known(bob, "bob")

	// Refused, so nothing is void.
	bobs := command.Header{Username: "bob", AuthRevision: root().AuthRevision}
	for kind, msg := range map[command.Kind]proto.Message{
		command.KindAuthUserDelete:         &pb.AuthUserDeleteRequest{Name: "ann"},
		command.KindAuthUserChangePassword: &pb.AuthUserChangePasswordRequest{Name: "ann", HashedPassword: "aGFzaA=="},
		command.KindAuthDisable:            &pb.AuthDisableRequest{},
	} {
		if res := run(bobs, kind, msg); res.Err == nil {
			t.Errorf("%v by bob was done", kind)
		}
	}
	if res := run(root(), command.KindAuthUserChangePassword, &pb.AuthUserChangePasswordRequest{Name: "ann", HashedPassword: "!"}); res.Err == nil {
		t.Error("a hash that is none was taken")
	}
	known(ann, "ann")

	must(command.KindAuthUserChangePassword, &pb.AuthUserChangePasswordRequest{Name: "ann", HashedPassword: "aGFzaA=="})
	known(ann, "")
	known(bob, "bob")
	must(command.KindAuthUserDelete, &pb.AuthUserDeleteRequest{Name: "bob"})
	known(bob, "")
	ann = login("ann")
	must(command.KindAuthDisable, &pb.AuthDisableRequest{})
	known(ann, "")
	must(command.KindAuthEnable, &pb.AuthEnableRequest{})
	known(ann, "")
	known(login("ann"), "ann")
}
