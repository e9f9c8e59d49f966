package ctl

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
)

// growing is a cluster of one member and a learner, which catches up while it is asked.
type growing struct {
	etcdserverpb.UnimplementedClusterServer
	etcdserverpb.UnimplementedMaintenanceServer
	endpoint string

	mu       sync.Mutex
	learner  *etcdserverpb.Member // nil before it is added
	attempts int
	promote  func(attempt int) error // what an attempt to promote the learner ends with
	young    int                     // so many attempts to add fail, since too few have been connected for long enough
}

func startGrowing(t *testing.T, promote func(attempt int) error) (*growing, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, g := &growing{endpoint: l.Addr().String(), promote: promote}, grpc.NewServer()
	etcdserverpb.RegisterClusterServer(g, c)
	etcdserverpb.RegisterMaintenanceServer(g, c)
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return c, c.endpoint
}

func (c *growing) header() *etcdserverpb.ResponseHeader {
	return &etcdserverpb.ResponseHeader{ClusterId: 0xc, MemberId: 1}
}

func (c *growing) members() []*etcdserverpb.Member {
	all := []*etcdserverpb.Member{{ID: 1, Name: "one", PeerURLs: []string{"http://h:1"}, ClientURLs: []string{"http://" + c.endpoint}}}
	if c.learner != nil {
		all = append(all, c.learner)
	}
	return all
}

func (c *growing) MemberAdd(_ context.Context, r *etcdserverpb.MemberAddRequest) (*etcdserverpb.MemberAddResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.young--; c.young >= 0 {
		return nil, rpctypes.ErrGRPCUnhealthy
	}
	c.learner = &etcdserverpb.Member{ID: 0x2ed7, PeerURLs: r.PeerURLs, IsLearner: r.IsLearner}
	return &etcdserverpb.MemberAddResponse{Header: c.header(), Member: c.learner, Members: c.members()}, nil
}

func (c *growing) MemberPromote(_ context.Context, r *etcdserverpb.MemberPromoteRequest) (*etcdserverpb.MemberPromoteResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts++
	if c.attempts > 1 { // it has started meanwhile
		c.learner = &etcdserverpb.Member{ID: 0x2ed7, Name: "b", PeerURLs: c.learner.PeerURLs, ClientURLs: []string{"http://" + c.endpoint}, IsLearner: true}
	}
	if err := c.promote(c.attempts); err != nil {
		return nil, err
	}
	return &etcdserverpb.MemberPromoteResponse{Header: c.header(), Members: c.members()}, nil
}

func (c *growing) MemberList(context.Context, *etcdserverpb.MemberListRequest) (*etcdserverpb.MemberListResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &etcdserverpb.MemberListResponse{Header: c.header(), Members: c.members()}, nil
}

func (c *growing) Status(context.Context, *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	return &etcdserverpb.StatusResponse{Header: c.header(), RaftIndex: 90, RaftAppliedIndex: 40}, nil
}

func runAs(t *testing.T, name, endpoint string, args ...string) (out, told string, code int) {
	t.Helper()
	var o, e bytes.Buffer
	code = Run(t.Context(), name, append([]string{"--endpoints=" + endpoint}, args...), Streams{In: strings.NewReader(""), Out: &o, Err: &e})
	return o.String(), e.String(), code
}

// TestMemberAddMakesAVoter adds a member in the safe way: a learner first.
func TestMemberAddMakesAVoter(t *testing.T) {
	shortPauses(t)
	c, endpoint := startGrowing(t, func(attempt int) error {
		switch attempt {
		case 1, 2:
			return rpctypes.ErrGRPCLearnerNotReady
		case 3:
			return rpctypes.ErrGRPCUnhealthy
		}
		return nil
	})
	out, told, code := runAs(t, "engram ctl", endpoint, "member", "add", "b", "--peer-urls=http://b:1,http://b:2")
	if code != 0 || !c.learner.IsLearner || c.attempts != 4 {
		t.Errorf("exit code %d, member %v, %d attempts", code, c.learner, c.attempts)
	}
	want := `Member             2ed7 added as learner to cluster                c

ETCD_NAME="b"
ETCD_INITIAL_CLUSTER="one=http://h:1,b=http://b:1,b=http://b:2"
ETCD_INITIAL_ADVERTISE_PEER_URLS="http://b:1,http://b:2"
ETCD_INITIAL_CLUSTER_STATE="existing"
Member             2ed7 promoted in cluster                c
`
	if out != want {
		t.Errorf("printed\n%s\nwant\n%s", out, want)
	}
	wantTold := `
Start member 2ed7 with the settings above. It is promoted to a voter when it has caught up.
Ctrl-C stops waiting, and nothing else; ` + "`engram ctl member promote 2ed7`" + ` goes on later.
member 2ed7 has not started yet
member 2ed7 catches up: it has applied index 40 of 90
member 2ed7 tries again: etcdserver: unhealthy cluster
`
	if told != wantTold {
		t.Errorf("told\n%s\nwant\n%s", told, wantTold)
	}
}

// TestMemberAddAsAsked adds what was asked for, and waits for nothing.
func TestMemberAddAsAsked(t *testing.T) {
	for _, c := range []struct {
		name    string
		flag    string
		learner bool
	}{
		{"etcdctl", "--hex=false", false}, {"etcdctl", "--learner", true}, {"engram ctl", "--voter", false}, {"engram ctl", "--learner", true},
	} {
		cluster, endpoint := startGrowing(t, func(int) error { return fmt.Errorf("nobody is to be promoted") })
		out, told, code := runAs(t, c.name, endpoint, "member", "add", "b", "--peer-urls=http://b:1", c.flag)
		if code != 0 || told != "" || cluster.attempts != 0 || cluster.learner.IsLearner != c.learner || !strings.Contains(out, "ETCD_INITIAL_CLUSTER_STATE") {
			t.Errorf("%s %s: exit code %d, member %v, %d attempts to promote it; it told %q", c.name, c.flag, code, cluster.learner, cluster.attempts, told)
		}
	}
	if _, told, code := runAs(t, "etcdctl", "127.0.0.1:1", "member", "add", "b", "--peer-urls=http://b:1", "--voter"); code != exitFailed || !strings.Contains(told, "unknown flag: --voter") {
		t.Errorf("etcdctl has no --voter: exit code %d, %s", code, told)
	}
	if _, told, code := runAs(t, "engram ctl", "127.0.0.1:1", "member", "add", "b", "--peer-urls=http://b:1", "--voter", "--learner"); code != exitArguments || !strings.Contains(told, "exclude each other") {
		t.Errorf("both: exit code %d, %s", code, told)
	}
}

// TestMemberAddAfterAnother: a member that was added a moment ago does not keep the next one out, for some seconds; as etcdctl it does.
func TestMemberAddAfterAnother(t *testing.T) {
	shortPauses(t)
	for _, c := range []struct {
		name  string
		young int
		added bool
	}{{"engram ctl", addTries - 1, true}, {"engram ctl", addTries, false}, {"etcdctl", 1, false}} {
		cluster, endpoint := startGrowing(t, func(int) error { return nil })
		cluster.young = c.young
		_, told, code := runAs(t, c.name, endpoint, "member", "add", "b", "--peer-urls=http://b:1")
		if (code == 0) != c.added || (cluster.learner != nil) != c.added || c.added == strings.Contains(told, "Error: etcdserver: unhealthy cluster") {
			t.Errorf("%s after %d refusals: exit code %d, member %v, %s", c.name, c.young, code, cluster.learner, told)
		}
	}
}

// TestMemberAddGivesUp ends the waiting: by the person who waits, and by an error that waiting does not heal.
func TestMemberAddGivesUp(t *testing.T) {
	shortPauses(t)
	_, endpoint := startGrowing(t, func(int) error { return rpctypes.ErrGRPCMemberNotFound })
	_, told, code := runAs(t, "engram ctl", endpoint, "member", "add", "b", "--peer-urls=http://b:1")
	if code != exitFailed || !strings.Contains(told, "Error: member 2ed7 stays a learner: etcdserver: member not found\nHint: ") {
		t.Errorf("removed meanwhile: exit code %d, %s", code, told)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, endpoint = startGrowing(t, func(attempt int) error {
		if attempt == 3 {
			cancel()
		}
		return rpctypes.ErrGRPCLearnerNotReady
	})
	var out, errors bytes.Buffer
	code = Run(ctx, "engram ctl", []string{"--endpoints=" + endpoint, "member", "add", "b", "--peer-urls=http://b:1"},
		Streams{In: strings.NewReader(""), Out: &out, Err: &errors})
	if want := "stopped waiting: member 2ed7 is a learner still; make a voter of it with `engram ctl member promote 2ed7`"; code != exitFailed ||
		!strings.Contains(errors.String(), want) {
		t.Errorf("interrupted: exit code %d, %s", code, &errors)
	}
}

// TestClusterHints tells cause and cure of refusals, whatever the tool's name.
func TestClusterHints(t *testing.T) {
	for _, err := range []error{
		rpctypes.ErrMemberNotEnoughStarted, rpctypes.ErrUnhealthy, rpctypes.ErrMemberLearnerNotReady, rpctypes.ErrTooManyLearners, rpctypes.ErrMemberNotLearner,
		rpctypes.ErrMemberNotFound, rpctypes.ErrPeerURLExist, rpctypes.ErrMemberBadURLs, rpctypes.ErrNotLeader, rpctypes.ErrBadLeaderTransferee,
		rpctypes.ErrWrongDowngradeVersionFormat, rpctypes.ErrInvalidDowngradeTargetVersion, rpctypes.ErrDowngradeInProcess,
	} {
		for _, name := range []string{"engram ctl", "etcdctl"} {
			d := (&tool{name: name}).diagnose(err)
			if d.hint == "" || d.what != "" || strings.Contains(d.hint, "$tool") {
				t.Errorf("%v: %s tells %+v", err, name, d)
			}
		}
	}
}

func shortPauses(t *testing.T) {
	was := promotePause
	promotePause /= 100
	t.Cleanup(func() { promotePause = was })
}
