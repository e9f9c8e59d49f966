package compat

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/test/internal/cluster"
)

// TestMixedFeatureLevel: three Engram members agree on a feature level above etcd's, which a member of etcd takes from them
// until it is gone. It reads the entries that carry the level, again after a restart too, and no client of it can raise the level.
func TestMixedFeatureLevel(t *testing.T) {
	t.Parallel() // it waits more than it works
	if programs.Engram == "" {
		return
	}
	ctx := mixedContext(t)
	e := cluster.Program{Name: "engram", Path: programs.Engram}
	c := newCluster(t, quick...)
	check(t, c.Start(ctx, e, e, e))
	ours := c.Members()
	levels := func(when string, want float64) {
		t.Helper()
		check(t, eventually(ctx, when, func() error {
			for _, m := range ours {
				if level, err := metric(m, "engram_cluster_feature_level"); err != nil || level != want {
					return fmt.Errorf("%v has level %v, want %v: %v", m, level, want, err)
				}
			}
			return nil
		}))
	}
	put := func(key string, m *cluster.Member) {
		t.Helper()
		client, err := m.Client()
		check(t, err)
		_, err = client.Put(ctx, key, "v")
		check(t, err)
	}
	levels("among Engram members", 1)
	put("before", ours[0])

	real, err := c.Add(ctx, reference(t), true)
	check(t, err)
	levels("with a learner of etcd", 0)
	put("learner", ours[1])
	_, err = c.CheckHash(ctx)
	check(t, err)
	check(t, c.Promote(ctx, real))
	forgeLevel(t, ctx, real)
	put("voter", real)
	levels("after a client of etcd asked for it", 0)
	check(t, real.Stop())
	check(t, real.Restart(ctx))
	put("restarted", real)
	_, err = c.CheckHash(ctx)
	check(t, err)

	check(t, c.Remove(ctx, real))
	levels("after the member of etcd", 1)
	put("after", ours[2])
	for _, m := range ours {
		check(t, m.Ready(ctx))
	}
	_, err = c.CheckHash(ctx)
	check(t, err)
}

// forgeLevel sends to a real member what its log entry keeps: fields that it does not know. In the header they would set level 1.
func forgeLevel(t *testing.T, ctx context.Context, m *cluster.Member) {
	t.Helper()
	client, err := m.Client()
	check(t, err)
	list, err := client.MemberList(ctx)
	check(t, err)
	r := &etcdserverpb.AlarmRequest{}
	r.ProtoReflect().SetUnknown(levelField(list))
	_, err = etcdserverpb.NewMaintenanceClient(client.ActiveConnection()).Alarm(ctx, r)
	check(t, err)
}

func levelField(list *clientv3.MemberListResponse) []byte {
	var ids []uint64
	for _, m := range list.Members {
		ids = append(ids, m.ID)
	}
	slices.Sort(ids)
	b := binary.BigEndian.AppendUint64(nil, uint64(len(ids)))
	for _, id := range ids {
		b = binary.BigEndian.AppendUint64(b, id)
	}
	sum := sha256.Sum256(b)
	return protowire.AppendBytes(protowire.AppendTag(nil, 50051, protowire.BytesType), append(binary.BigEndian.AppendUint64(nil, 1), sum[:8]...))
}
