package server_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/encoding/protowire"
)

// featureLevel is what a member's metrics say.
func featureLevel(ctx context.Context, m *clusterMember) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, m.client+"/metrics", nil)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if level, ok := strings.CutPrefix(lines.Text(), "engram_cluster_feature_level "); ok {
			return level, nil
		}
	}
	return "", fmt.Errorf("%s has no metric of the feature level", m.name)
}

func waitLevel(ctx context.Context, t *testing.T, want string, members ...*clusterMember) {
	t.Helper()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for _, m := range members {
		for {
			level, err := featureLevel(ctx, m)
			if err == nil && level == want {
				break
			}
			select {
			case <-again.C:
			case <-ctx.Done():
				t.Fatalf("%s: level %q, %v; want %s", m.name, level, err, want)
			}
		}
	}
}

// TestFeatureLevelOfMembers: a cluster of Engram members agrees on level 1, keeps
// it over a stop, loses it to a member that has not started, and has it again
// once that one tells what it is. No client can set it.
func TestFeatureLevelOfMembers(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	members := []*clusterMember{newClusterMember(t, "m0"), newClusterMember(t, "m1"), newClusterMember(t, "m2")}
	for _, m := range members {
		m.start(members, "new", "--strict-reconfig-check=false") // which wants all connected for a while
	}
	waitLevel(ctx, t, "1", members...)
	cli := dialMembers(t, members...)
	waitServes(ctx, t, cli)
	list, err := cli.MemberList(ctx)
	if err != nil {
		t.Fatal(err)
	}
	forge(ctx, t, cli, list)
	waitLevel(ctx, t, "1", members...)

	members[2].close()
	members[2].start(members, "new")
	waitLevel(ctx, t, "1", members[2])

	added := newClusterMember(t, "m3")
	if _, err := cli.MemberAddAsLearner(ctx, []string{added.peer}); err != nil {
		t.Fatal(err)
	}
	waitLevel(ctx, t, "0", members...)
	members = append(members, added)
	added.start(members, "existing")
	waitLevel(ctx, t, "1", members...)
}

// forge sends, as a client, what would set a level that no member knows, at which
// all would stop.
func forge(ctx context.Context, t *testing.T, cli *clientv3.Client, list *clientv3.MemberListResponse) {
	t.Helper()
	var ids []uint64
	for _, m := range list.Members {
		ids = append(ids, m.ID)
	}
	slices.Sort(ids)
	b := binary.BigEndian.AppendUint64(nil, uint64(len(ids)))
	for _, id := range ids {
		b = binary.BigEndian.AppendUint64(b, id)
	}
	fingerprint := sha256.Sum256(b)
	value := append(binary.BigEndian.AppendUint64(nil, 2), fingerprint[:8]...)
	field := protowire.AppendBytes(protowire.AppendTag(nil, 50051, protowire.BytesType), value)
	for _, unknown := range [][]byte{
		field, // in the request
		protowire.AppendBytes(protowire.AppendTag(nil, 100, protowire.BytesType), field), // as if the request were the entry
	} {
		r := &pb.AlarmRequest{}
		r.ProtoReflect().SetUnknown(unknown)
		if _, err := pb.NewMaintenanceClient(cli.ActiveConnection()).Alarm(ctx, r); err != nil {
			t.Fatal(err)
		}
		if _, err := cli.Put(ctx, "after", "v"); err != nil {
			t.Fatalf("after a forged level: %v", err)
		}
	}
}
