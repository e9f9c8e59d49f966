package compat

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const guest = "guest"

// enableAuth sets up root and a user of few rights, and makes clients come as root from then on.
func enableAuth(ctx context.Context, c *cluster.Cluster) error {
	client, err := c.Serving()[0].Client()
	if err != nil {
		return err
	}
	for _, f := range []func() error{
		func() error { _, err := client.UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := client.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := client.UserAdd(ctx, guest, "pass0"); return err },
		func() error { _, err := client.RoleAdd(ctx, "few"); return err },
		func() error { _, err := client.UserGrantRole(ctx, guest, "few"); return err },
		func() error { _, err := client.AuthEnable(ctx); return err },
	} {
		if err := f(); err != nil && !errors.Is(err, rpctypes.ErrRoleAlreadyExist) {
			return err
		}
	}
	c.User, c.Pass = "root", "secret"
	_, err = c.Settle(ctx)
	return err
}

// changeAuth gives the guest other rights, through one member after the other, and looks that all members keep to them and
// tell the same of users and roles.
func changeAuth(ctx context.Context, c *cluster.Cluster, turn int) error {
	members := c.Serving()
	at := func(i int) *clientv3.Client {
		client, err := members[(turn+i)%len(members)].Client()
		if err != nil {
			panic(err) // it was connected before
		}
		return client
	}
	before, now := fmt.Sprintf("turn%d/", turn-1), fmt.Sprintf("turn%d/", turn)
	read := clientv3.PermissionType(clientv3.PermReadWrite)
	if _, err := at(0).RoleGrantPermission(ctx, "few", now, clientv3.GetPrefixRangeEnd(now), read); err != nil {
		return err
	}
	if turn > 1 {
		if _, err := at(1).RoleRevokePermission(ctx, "few", before, clientv3.GetPrefixRangeEnd(before)); err != nil {
			return err
		}
	}
	if _, err := at(2).UserChangePassword(ctx, guest, fmt.Sprint("pass", turn)); err != nil {
		return err
	}
	if _, err := at(0).UserAddWithOptions(ctx, now+"nobody", "", &clientv3.UserAddOptions{NoPassword: true}); err != nil {
		return err
	}
	if turn > 1 {
		if _, err := at(1).UserDelete(ctx, before+"nobody"); err != nil {
			return err
		}
	}
	if _, err := c.Settle(ctx); err != nil {
		return err
	}
	if err := sameUsers(ctx, members); err != nil {
		return err
	}
	return guestRights(ctx, members, turn, now, before)
}

// sameUsers compares what the members tell of users, roles and the revision of both.
func sameUsers(ctx context.Context, members []*cluster.Member) error {
	var first []string
	for _, m := range members {
		client, err := m.Client()
		if err != nil {
			return err
		}
		auth := etcdserverpb.NewAuthClient(client.ActiveConnection())
		var said []string
		for _, ask := range []func() (proto.Message, error){
			func() (proto.Message, error) { return auth.UserList(ctx, &etcdserverpb.AuthUserListRequest{}) },
			func() (proto.Message, error) { return auth.RoleList(ctx, &etcdserverpb.AuthRoleListRequest{}) },
			func() (proto.Message, error) { return auth.UserGet(ctx, &etcdserverpb.AuthUserGetRequest{Name: guest}) },
			func() (proto.Message, error) { return auth.RoleGet(ctx, &etcdserverpb.AuthRoleGetRequest{Role: "few"}) },
			func() (proto.Message, error) { return auth.AuthStatus(ctx, &etcdserverpb.AuthStatusRequest{}) },
		} {
			answer, err := ask()
			if err != nil {
				return fmt.Errorf("%v: %w", m, err)
			}
			answer.(interface {
				GetHeader() *etcdserverpb.ResponseHeader
			}).GetHeader().Reset() // names the member, and keys may change
			said = append(said, (&wire.Names{}).Text(answer))
		}
		if first == nil {
			first = said
		}
		if !slices.Equal(first, said) {
			return broken.Errorf("of users and roles %v tells\n%s\n%v tells\n%s", members[0], strings.Join(first, "\n"), m, strings.Join(said, "\n"))
		}
	}
	return nil
}

// guestRights uses a token of each member at every other, with which the guest can do what its role lets it and no more.
func guestRights(ctx context.Context, members []*cluster.Member, turn int, now, before string) error {
	for _, from := range members {
		issuer, err := grpc.NewClient(strings.TrimPrefix(from.ClientURL, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return err
		}
		defer issuer.Close()
		auth := etcdserverpb.NewAuthClient(issuer)
		if _, err := auth.Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: guest, Password: fmt.Sprint("pass", turn-1)}); err == nil {
			return broken.Errorf("%v takes the password of before", from)
		}
		token, err := auth.Authenticate(ctx, &etcdserverpb.AuthenticateRequest{Name: guest, Password: fmt.Sprint("pass", turn)})
		if err != nil {
			return fmt.Errorf("%v: %w", from, err)
		}
		for _, to := range members {
			conn, err := grpc.NewClient(strings.TrimPrefix(to.ClientURL, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return err
			}
			defer conn.Close()
			with := metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token.Token)
			kv := etcdserverpb.NewKVClient(conn)
			if err := eventually(ctx, fmt.Sprintf("token of %v at %v", from, to), func() error { // the token may be on its way
				_, err := kv.Put(with, &etcdserverpb.PutRequest{Key: []byte(now + "key")})
				return err
			}); err != nil {
				return err
			}
			if _, err := kv.Range(with, &etcdserverpb.RangeRequest{Key: []byte(now + "key"), Serializable: true}); err != nil {
				return fmt.Errorf("token of %v at %v: a serializable read: %w", from, to, err)
			}
			for what, try := range map[string]func() error{
				"put": func() error {
					_, err := kv.Put(with, &etcdserverpb.PutRequest{Key: []byte(before + "key")})
					return err
				},
				"range": func() error {
					_, err := kv.Range(with, &etcdserverpb.RangeRequest{Key: []byte(before), RangeEnd: []byte{0}})
					return err
				},
				"txn": func() error {
					_, err := kv.Txn(with, &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{{
						Request: &etcdserverpb.RequestOp_RequestDeleteRange{RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{Key: []byte("a")}}}}})
					return err
				},
			} {
				switch err := try(); {
				case err == nil:
					return broken.Errorf("token of %v at %v: a %s beyond the role is let through", from, to, what)
				case rpctypes.Error(err) != rpctypes.ErrPermissionDenied:
					return fmt.Errorf("token of %v at %v: a %s beyond the role is answered with %w", from, to, what, err)
				}
			}
		}
	}
	return nil
}
