package compat

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// ourEtcdctl is our tool under etcd's name.
func ourEtcdctl(t *testing.T) string {
	t.Helper()
	if programs.Engram == "" {
		return programs.Etcdctl
	}
	path := filepath.Join(t.TempDir(), "etcdctl")
	if err := os.Symlink(programs.Engram, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// runTool returns all that people and scripts see of one command line.
func runTool(tool string, args ...string) string {
	o, err := process.Command{Program: []string{tool}, Args: args}.Run()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("exit code %d\n%s%s", o.Code, o.Stdout, spaces.ReplaceAllString(saidLines(o.Stderr), " "))
}

// cannedCluster answers requests about the cluster always alike, with IDs that are long and short.
type cannedCluster struct {
	pb.UnimplementedClusterServer
	pb.UnimplementedMaintenanceServer
	endpoint string
	member   uint64 // who it is
}

const (
	cannedID    = 0xab12
	cannedShort = 0x7
	cannedLong  = 0xfedcba9876543210
)

func (c *cannedCluster) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: 0xc1, MemberId: c.member, RaftTerm: 3}
}

func (c *cannedCluster) members() []*pb.Member {
	return []*pb.Member{
		{ID: cannedShort, PeerURLs: []string{"http://s:1", "http://s:2"}, IsLearner: true},
		{ID: cannedID, Name: "one", PeerURLs: []string{"http://o:1"}, ClientURLs: []string{"http://" + c.endpoint}},
		{ID: cannedLong, Name: "a \"b\"", PeerURLs: []string{"http://l:1", "http://l:2"}, ClientURLs: []string{"http://" + c.endpoint, "http://" + c.endpoint}},
	}
}

func (c *cannedCluster) MemberList(context.Context, *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	return &pb.MemberListResponse{Header: c.header(), Members: c.members()}, nil
}

func (c *cannedCluster) MemberAdd(_ context.Context, r *pb.MemberAddRequest) (*pb.MemberAddResponse, error) {
	added := c.members()[0]
	if added.IsLearner = r.IsLearner; !r.IsLearner {
		added = c.members()[2]
		added.Name = ""
	}
	return &pb.MemberAddResponse{Header: c.header(), Member: added, Members: c.members()}, nil
}

func (c *cannedCluster) MemberRemove(context.Context, *pb.MemberRemoveRequest) (*pb.MemberRemoveResponse, error) {
	return &pb.MemberRemoveResponse{Header: c.header(), Members: c.members()}, nil
}

func (c *cannedCluster) MemberUpdate(context.Context, *pb.MemberUpdateRequest) (*pb.MemberUpdateResponse, error) {
	return &pb.MemberUpdateResponse{Header: c.header(), Members: c.members()}, nil
}

func (c *cannedCluster) MemberPromote(context.Context, *pb.MemberPromoteRequest) (*pb.MemberPromoteResponse, error) {
	return &pb.MemberPromoteResponse{Header: c.header(), Members: c.members()}, nil
}

func (c *cannedCluster) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	return &pb.StatusResponse{
		Header: c.header(), Version: "3.7.3", StorageVersion: "3.7.0", DbSize: 123456, DbSizeInUse: 1234, DbSizeQuota: 2 << 30, Leader: cannedID,
		RaftIndex: 100, RaftAppliedIndex: 99, RaftTerm: 4, IsLearner: true, Errors: []string{"etcdserver: no leader", "memberID:7 alarm:NOSPACE"},
		DowngradeInfo: &pb.DowngradeInfo{Enabled: true, TargetVersion: "3.6.0"},
	}, nil
}

func (c *cannedCluster) MoveLeader(context.Context, *pb.MoveLeaderRequest) (*pb.MoveLeaderResponse, error) {
	return &pb.MoveLeaderResponse{}, nil
}

func (c *cannedCluster) Downgrade(_ context.Context, r *pb.DowngradeRequest) (*pb.DowngradeResponse, error) {
	return &pb.DowngradeResponse{Header: &pb.ResponseHeader{ClusterId: 0xc1, MemberId: c.member, Revision: 7, RaftTerm: 3}, Version: "3.7"}, nil
}

func (c *cannedCluster) HashKV(context.Context, *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	return &pb.HashKVResponse{Header: c.header(), Hash: 4035840541, CompactRevision: -1, HashRevision: 12}, nil
}

func serveCanned(t *testing.T, member uint64) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, g := &cannedCluster{endpoint: l.Addr().String(), member: member}, grpc.NewServer()
	pb.RegisterClusterServer(g, c)
	pb.RegisterMaintenanceServer(g, c)
	go g.Serve(l)
	t.Cleanup(g.Stop)
	return l.Addr().String()
}

// TestCtlClusterAnswers gives both tools the same answers of a cluster, in every format: what they print must be equal to the byte.
func TestCtlClusterAnswers(t *testing.T) {
	ours := ourEtcdctl(t)
	leader, follower := serveCanned(t, cannedID), serveCanned(t, cannedShort)
	for _, format := range [][]string{{"simple"}, {"simple", "--hex"}, {"fields"}, {"fields", "--hex"}, {"json"}, {"json", "--hex"}, {"protobuf"}, {"table"}, {"table", "--hex"}, {"x"}} {
		t.Run(strings.Join(format, " "), func(t *testing.T) {
			t.Parallel()
			for _, c := range [][]string{
				ctlWords("member list"), ctlWords("member add new --peer-urls=http://z:2,http://a:1"),
				ctlWords("member add new --peer-urls=http://z:2,http://a:1 --learner"), {"member", "add", "two \"words\"", "--peer-urls=http://a:1"},
				ctlWords("member add new --peer-urls=http://z:2,,http://a:1"), ctlWords("member add new --peer-urls=http://a:1 --peer-urls=http://b:1"),
				ctlWords("member add new --peer-urls=http://a:1/path"), ctlWords("member add new"), ctlWords("member add"), ctlWords("member add a b --peer-urls=x"),
				ctlWords("member remove 7"), ctlWords("member remove fedcba9876543210"), ctlWords("member remove 0x7"), ctlWords("member remove"),
				ctlWords("member update 7 --peer-urls=http://b:1,http://a:1"), ctlWords("member update 7 --peer-urls=nonsense"), ctlWords("member update 7"),
				ctlWords("member promote 7"), ctlWords("member promote 7 8"), ctlWords("member promote zz"), ctlWords("member promote fffffffffffffffff"),
				ctlWords("move-leader 7"), ctlWords("move-leader fedcba9876543210"), ctlWords("move-leader zz"), ctlWords("move-leader"), ctlWords("move-leader 1 2"),
				ctlWords("move-leader 7 --endpoints=" + follower), ctlWords("move-leader 7 --endpoints=" + follower + "," + leader),
				ctlWords("move-leader 7 --endpoints=127.0.0.1:1," + leader + " --command-timeout=2s"), // in which a busy machine answers
				ctlWords("endpoint status"), ctlWords("endpoint status --cluster"), ctlWords("endpoint hashkv --cluster"),
				ctlWords("downgrade validate 3.6"), ctlWords("downgrade enable 3.6"), ctlWords("downgrade cancel"), ctlWords("downgrade cancel 3.6"),
				ctlWords("downgrade validate"), ctlWords("downgrade enable"), ctlWords("downgrade enable 3.6 3.5"),
			} {
				args := append([]string{"--write-out=" + format[0]}, append(format[1:], c...)...)
				if !strings.Contains(strings.Join(c, " "), "--endpoints") {
					args = append(args, "--endpoints="+leader)
				}
				if want, got := runTool(programs.Etcdctl, args...), runTool(ours, args...); want != got {
					t.Errorf("%q\netcdctl:\n%s\nours:\n%s", args, indent(want), indent(got))
				}
			}
		})
	}
}

var (
	clusterIDs     = regexp.MustCompile(` *\b[0-9a-f]{12,16}\b|\b[0-9]{17,20}\b`)
	clusterNumbers = regexp.MustCompile(`[0-9]+(\.[0-9]+)?( ?(kB|MB|GB|ms|µs|s|%)\b)?`)
)

// TestCtlCluster changes a cluster of three real members with etcdctl and then with our tool, step by step alike: both must tell the same.
func TestCtlCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // of which a quiet machine needs a fraction
	defer cancel()
	c := newCluster(t, quick...)
	check(t, c.Start(ctx, reference(t), reference(t), reference(t)))
	all := "--endpoints=" + strings.Join(c.Endpoints(), ",")
	tools := []string{programs.Etcdctl, ourEtcdctl(t)}
	var seen [2]strings.Builder
	// Everything that differs from run to run has a name or is a number that may differ.
	names := []string{}
	for i, m := range c.Members() {
		names = append(names, m.ClientURL, fmt.Sprintf("$client%d", i), strings.TrimPrefix(m.ClientURL, "http://"), fmt.Sprintf("$client%d", i),
			m.PeerURL, fmt.Sprintf("$peer%d", i), fmt.Sprintf("%x", m.ID), fmt.Sprintf("$m%d", i))
	}
	say := func(i int, args ...string) {
		line := append([]string{"--command-timeout=20s"}, args...)
		if !strings.HasPrefix(args[len(args)-1], "--endpoints") {
			line = append(line, all)
		}
		text := sortCluster(runTool(tools[i], line...))
		text = clusterIDs.ReplaceAllString(strings.NewReplacer(names...).Replace(text), " ~")
		if args[0] == "endpoint" || args[0] == "move-leader" { // who leads differs
			text = regexp.MustCompile(`\$m[0-9]|true|false`).ReplaceAllString(clusterNumbers.ReplaceAllString(text, "N"), "?")
		}
		fmt.Fprintf(&seen[i], "%s\n%s\n", clusterIDs.ReplaceAllString(strings.Join(args[:2], " "), " ~"), text)
	}
	passes := 0
	pass := func(i int) (moved error) {
		passes++
		leader, err := c.Leader(ctx)
		check(t, err)
		follower := c.Members()[0]
		if follower == leader {
			follower = c.Members()[1]
		}
		say(i, "member", "list")
		say(i, "endpoint", "status", "--cluster")
		say(i, "endpoint", "health", "--cluster")
		say(i, "endpoint", "hashkv", "--cluster")
		say(i, "move-leader", fmt.Sprintf("%x", follower.ID))
		now, err := c.Leader(ctx)
		check(t, err)
		if now != follower {
			moved = fmt.Errorf("after move-leader %v leads, want %v", now, follower)
		}
		say(i, "move-leader", "1")
		say(i, "move-leader", fmt.Sprintf("%x", leader.ID), "--endpoints="+leader.ClientURL)
		say(i, "downgrade", "validate", "3.6")
		say(i, "downgrade", "validate", "3.5")
		say(i, "downgrade", "cancel")

		// The cluster lets a member in once all have been connected for some seconds.
		m, err := c.Add(ctx, reference(t), true)
		check(t, err)
		names = append(names, m.ClientURL, "$client", m.PeerURL, "$peer", m.Name, "$name")
		check(t, caughtUp(ctx, c, m))
		say(i, "member", "promote", fmt.Sprintf("%x", m.ID))
		say(i, "member", "list", "--consistency=s")
		check(t, c.Remove(ctx, m))

		// Distinct URLs, since an ID is made of them and of the second.
		url := fmt.Sprintf("http://127.77.0.%d:1", passes) // where nobody listens
		names = append(names, url, "$new")
		say(i, "member", "add", "new", "--peer-urls="+url, "--learner")
		say(i, "member", "add", "more", "--peer-urls="+url+"5", "--learner")
		say(i, "member", "add", "more", "--peer-urls="+c.Members()[0].PeerURL)
		say(i, "member", "list")
		id := unstarted(t, ctx, c)
		say(i, "member", "promote", id)
		say(i, "member", "update", id, "--peer-urls="+url+"0")
		say(i, "member", "update", id, "--peer-urls="+c.Members()[0].PeerURL)
		say(i, "member", "remove", id)
		say(i, "member", "remove", id)
		say(i, "member", "remove", "1")
		say(i, "member", "promote", fmt.Sprintf("%x", leader.ID))
		return moved
	}
	for i := range tools {
		// A pass during which members of a busy machine elect unasked is made again. One election it asks for.
		for tries := 1; ; tries++ {
			before := term(t, ctx, c)
			moved := pass(i)
			after := term(t, ctx, c)
			if after == before+1 {
				check(t, moved)
				break
			}
			if tries == 3 {
				t.Fatalf("the term went from %d to %d, and leadership was moved once", before, after)
			}
			t.Logf("the term went from %d to %d, and leadership was moved once", before, after)
			seen[i].Reset()
		}
	}
	if seen[0].String() != seen[1].String() {
		t.Errorf("etcdctl:\n%s\nours:\n%s", indent(seen[0].String()), indent(seen[1].String()))
	}
}

var initialCluster = regexp.MustCompile(`(?m)^(ETCD_INITIAL_CLUSTER=")(.*)(")$`)

// sortCluster brings lines, and the members of a line, in an order that does not depend on their IDs.
func sortCluster(text string) string {
	text = initialCluster.ReplaceAllStringFunc(text, func(line string) string {
		part := initialCluster.FindStringSubmatch(line)
		members := strings.Split(part[2], ",")
		slices.Sort(members)
		return part[1] + strings.Join(members, ",") + part[3]
	})
	lines := strings.Split(text, "\n")
	slices.SortStableFunc(lines, func(a, b string) int {
		_, a, _ = strings.Cut(a, ", ") // behind the ID
		_, b, _ = strings.Cut(b, ", ")
		return strings.Compare(a, b)
	})
	return strings.Join(lines, "\n")
}

// term is the term of the leader.
func term(t *testing.T, ctx context.Context, c *cluster.Cluster) uint64 {
	t.Helper()
	leader, err := c.Leader(ctx)
	check(t, err)
	s, err := leader.Status(ctx)
	check(t, err)
	return s.RaftTerm
}

// unstarted is the ID of the member that has not started.
func unstarted(t *testing.T, ctx context.Context, c *cluster.Cluster) string {
	t.Helper()
	client, err := c.Dial(c.Endpoints()...)
	check(t, err)
	defer client.Close()
	list, err := client.MemberList(ctx)
	check(t, err)
	for _, m := range list.Members {
		if m.Name == "" {
			return fmt.Sprintf("%x", m.ID)
		}
	}
	t.Fatalf("all have started: %v", list.Members)
	return ""
}

// caughtUp waits until a learner has applied what the leader had.
func caughtUp(ctx context.Context, c *cluster.Cluster, learner *cluster.Member) error {
	leader, err := c.Leader(ctx)
	if err != nil {
		return err
	}
	has, err := leader.Status(ctx)
	if err != nil {
		return err
	}
	return eventually(ctx, "the learner to catch up", func() error {
		is, err := learner.Status(ctx)
		if err == nil && is.RaftAppliedIndex < has.RaftIndex {
			err = fmt.Errorf("it is at index %d of %d", is.RaftAppliedIndex, has.RaftIndex)
		}
		return err
	})
}
