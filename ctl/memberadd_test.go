package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
)

// growing is a cluster of one member or more and a learner, which catches up while it is asked. Each is served at an endpoint of its own.
type growing struct {
	etcdserverpb.UnimplementedClusterServer
	etcdserverpb.UnimplementedMaintenanceServer
	serve func(id uint64) string // makes an endpoint for a member

	mu       sync.Mutex
	served   map[string]uint64      // the member at an endpoint
	others   []*etcdserverpb.Member // beside the learner
	learner  *etcdserverpb.Member   // nil before it is added; it may be a voter by now
	removed  []uint64
	attempts int
	promote  func(attempt int) error // what an attempt to promote the learner ends with
	young    int                     // so many attempts to add fail, since too few have been connected for long enough
	unsure   map[string]int          // so many calls are answered with a timeout, and done
	alarms   []*etcdserverpb.AlarmMember
	hash     func(call int) (uint32, error) // what a call of HashKV ends with; nil means that all are equal
	hashes   int                            // calls of HashKV
}

func startGrowing(t *testing.T, promote func(attempt int) error) (*growing, string) {
	t.Helper()
	c, g := &growing{served: map[string]uint64{}, promote: promote}, grpc.NewServer()
	etcdserverpb.RegisterClusterServer(g, c)
	etcdserverpb.RegisterMaintenanceServer(g, c)
	ended := make(chan error)
	c.serve = func(id uint64) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Error(err)
			return ""
		}
		c.served[l.Addr().String()] = id
		go func() { ended <- g.Serve(l) }()
		return l.Addr().String()
	}
	one := c.started(1, "one", "http://h:1")
	c.others = append(c.others, one)
	t.Cleanup(func() {
		g.Stop()
		for range c.served {
			if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) { // stopped before it began
				t.Error(err)
			}
		}
	})
	return c, strings.TrimPrefix(one.ClientURLs[0], "http://")
}

func (c *growing) header(ctx context.Context) *etcdserverpb.ResponseHeader {
	p, _ := peer.FromContext(ctx)
	return &etcdserverpb.ResponseHeader{ClusterId: 0xc, MemberId: c.served[p.LocalAddr.String()]}
}

func (c *growing) members() []*etcdserverpb.Member {
	all := slices.Clone(c.others)
	if c.learner != nil {
		all = append(all, c.learner)
	}
	return all
}

// lost is the answer of a call that was done: an error, if that was wanted.
func (c *growing) lost(call string) error {
	if c.unsure[call] == 0 {
		return nil
	}
	c.unsure[call]--
	if call == "list" { // the client would try that one again
		return rpctypes.ErrGRPCNotLeader
	}
	return rpctypes.ErrGRPCTimeout
}

func (c *growing) MemberAdd(ctx context.Context, r *etcdserverpb.MemberAddRequest) (*etcdserverpb.MemberAddResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.young--; c.young >= 0 {
		return nil, rpctypes.ErrGRPCUnhealthy
	}
	for _, m := range c.members() {
		if sameSet(m.PeerURLs, r.PeerURLs) {
			return nil, rpctypes.ErrGRPCPeerURLExist
		}
	}
	c.learner = &etcdserverpb.Member{ID: 0x2ed7, PeerURLs: r.PeerURLs, IsLearner: r.IsLearner}
	return &etcdserverpb.MemberAddResponse{Header: c.header(ctx), Member: c.learner, Members: c.members()}, c.lost("add")
}

func (c *growing) MemberRemove(ctx context.Context, r *etcdserverpb.MemberRemoveRequest) (*etcdserverpb.MemberRemoveResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if memberOf(c.members(), r.ID) == nil {
		return nil, rpctypes.ErrGRPCMemberNotFound
	}
	c.removed = append(c.removed, r.ID)
	if c.learner.GetID() == r.ID {
		c.learner = nil
	}
	c.others = slices.DeleteFunc(c.others, func(m *etcdserverpb.Member) bool { return m.ID == r.ID })
	return &etcdserverpb.MemberRemoveResponse{Header: c.header(ctx), Members: c.members()}, c.lost("remove")
}

func (c *growing) MemberPromote(ctx context.Context, r *etcdserverpb.MemberPromoteRequest) (*etcdserverpb.MemberPromoteResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempts++
	if !c.learner.GetIsLearner() {
		return nil, rpctypes.ErrGRPCMemberNotLearner
	}
	if c.attempts > 1 { // it has started meanwhile
		c.learner = c.started(0x2ed7, "b", c.learner.PeerURLs[0])
		c.learner.IsLearner = true
	}
	if err := c.promote(c.attempts); err != nil {
		return nil, err
	}
	c.learner = c.started(0x2ed7, "b", c.learner.PeerURLs[0])
	return &etcdserverpb.MemberPromoteResponse{Header: c.header(ctx), Members: c.members()}, c.lost("promote")
}

// started is a voter that serves.
func (c *growing) started(id uint64, name, peerURL string) *etcdserverpb.Member {
	return &etcdserverpb.Member{ID: id, Name: name, PeerURLs: []string{peerURL}, ClientURLs: []string{"http://" + c.serve(id)}}
}

func (c *growing) MemberList(ctx context.Context, _ *etcdserverpb.MemberListRequest) (*etcdserverpb.MemberListResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &etcdserverpb.MemberListResponse{Header: c.header(ctx), Members: c.members()}, c.lost("list")
}

func (c *growing) Alarm(ctx context.Context, _ *etcdserverpb.AlarmRequest) (*etcdserverpb.AlarmResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &etcdserverpb.AlarmResponse{Header: c.header(ctx), Alarms: c.alarms}, nil
}

func (c *growing) HashKV(ctx context.Context, _ *etcdserverpb.HashKVRequest) (*etcdserverpb.HashKVResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hashes++
	var hash uint32
	if c.hash != nil {
		var err error
		if hash, err = c.hash(c.hashes); err != nil {
			return nil, err
		}
	}
	return &etcdserverpb.HashKVResponse{Header: c.header(ctx), Hash: hash, HashRevision: 9, CompactRevision: -1}, nil
}

func (c *growing) Status(ctx context.Context, _ *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return &etcdserverpb.StatusResponse{Header: c.header(ctx), Leader: 1, RaftIndex: 90, RaftAppliedIndex: 40}, nil
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
	if code != 0 || c.learner.IsLearner || c.attempts != 4 {
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
	var out, said bytes.Buffer
	code = Run(ctx, "engram ctl", []string{"--endpoints=" + endpoint, "member", "add", "b", "--peer-urls=http://b:1"},
		Streams{In: strings.NewReader(""), Out: &out, Err: &said})
	if want := "stopped waiting: member 2ed7 is a learner still; make a voter of it with `engram ctl member promote 2ed7`"; code != exitFailed ||
		!strings.Contains(said.String(), want) {
		t.Errorf("interrupted: exit code %d, %s", code, &said)
	}
}

// TestMemberAddUnsure has promotions that time out and are done all the same: at once by the list of the members, or, where that could
// not be had, by what the next attempt is told.
func TestMemberAddUnsure(t *testing.T) {
	shortPauses(t)
	for lists, attempts := range []int{1, 2} {
		c, endpoint := startGrowing(t, func(int) error { return nil })
		c.unsure = map[string]int{"promote": 1, "list": lists}
		out, told, code := runAs(t, "engram ctl", endpoint, "member", "add", "b", "--peer-urls=http://b:1")
		if code != 0 || !strings.HasSuffix(out, "Member             2ed7 promoted in cluster                c\n") || c.attempts != attempts {
			t.Errorf("%d lists lost: exit code %d after %d attempts, %s%s", lists, code, c.attempts, out, told)
		}
	}
}

// rebuilding makes of c a cluster of three voters, of which the third is the one in question.
func (c *growing) rebuilding() {
	c.others = append(c.others, c.started(2, "two", "http://h:2"), c.started(3, "three", "http://h:3"))
}

// TestRebuildGoesOn: a member that an earlier run has added is not replaced, whatever that run was interrupted in, nor is a voter with which
// nothing is wrong, unless that is what was asked for.
func TestRebuildGoesOn(t *testing.T) {
	shortPauses(t)
	learner := func(c *growing, urls ...string) {
		c.others = c.others[:2]
		c.learner = c.started(0x2ed7, "three", "http://h:3")
		c.learner.IsLearner = true
		if len(urls) > 0 {
			c.learner.ClientURLs = urls
		}
	}
	dead := func() string { return "http://" + deadAddress(t) }
	stranger := func(c *growing) string { return c.others[0].ClientURLs[0] }
	named := func(c *growing, id uint64) {
		c.alarms = []*etcdserverpb.AlarmMember{{MemberID: id, Alarm: etcdserverpb.AlarmType_CORRUPT}}
	}
	// differ lets hashes of calls differ from each other, be equal, or fail: D, E and F. The last goes for all that follow.
	differ := func(calls string) func(*growing) {
		return func(c *growing) {
			c.hash = func(call int) (uint32, error) {
				switch calls[min(call, len(calls))-1] {
				case 'D':
					return uint32(call), nil
				case 'F':
					return 0, errors.New("it has no time")
				}
				return 0, nil
			}
		}
	}
	for _, c := range []struct {
		name    string
		which   string
		state   func(*growing)
		flags   []string
		removed []uint64
		starts  bool // the commands to start it are shown
		fails   bool
		hashes  int // that are asked for at most; 0 means any number
		want    string
	}{
		{name: "a learner that has not started", which: "2ed7", starts: true, want: "is rebuilt", state: func(c *growing) {
			c.others = c.others[:2]
			c.learner = &etcdserverpb.Member{ID: 0x2ed7, PeerURLs: []string{"http://h:3"}, IsLearner: true}
		}},
		{name: "a learner that catches up", which: "2ed7", want: "is rebuilt", state: func(c *growing) { learner(c) }},
		{name: "a learner with a URL that nobody reaches", which: "2ed7", want: "is rebuilt", state: func(c *growing) {
			learner(c)
			c.learner.ClientURLs = append([]string{dead()}, c.learner.ClientURLs...)
		}},
		{name: "a learner that is down", which: "2ed7", fails: true, want: "--anew", state: func(c *growing) { learner(c, dead()) }},
		{name: "a learner that is down, at whose URL another one is", which: "2ed7", fails: true, want: "member 1 answers there", state: func(c *growing) {
			learner(c, stranger(c))
		}},
		{name: "a learner that is down all the same", which: "2ed7", flags: []string{"--anew"}, removed: []uint64{0x2ed7}, starts: true, want: "is rebuilt", state: func(c *growing) {
			learner(c, stranger(c))
		}},
		{name: "a learner with an alarm", which: "2ed7", removed: []uint64{0x2ed7}, starts: true, want: "is rebuilt", state: func(c *growing) {
			learner(c)
			named(c, 0x2ed7)
		}},
		{name: "a learner with an alarm that is down", which: "2ed7", removed: []uint64{0x2ed7}, starts: true, want: "is rebuilt", state: func(c *growing) {
			learner(c, stranger(c))
			named(c, 0x2ed7)
		}},
		{name: "a voter", which: "3", want: "Member 3 (three) is sound: at revision 9 "},
		{name: "a voter with a URL that nobody reaches", which: "3", want: "Member 3 (three) is sound: at revision 9 ", state: func(c *growing) {
			for _, m := range c.others {
				m.ClientURLs = append([]string{dead()}, m.ClientURLs...)
			}
		}},
		{name: "a voter all the same", which: "3", flags: []string{"--anew"}, removed: []uint64{3}, starts: true, want: "is rebuilt"},
		{name: "a voter that is down", which: "three", removed: []uint64{3}, starts: true, want: "is rebuilt", state: func(c *growing) {
			c.others[2].ClientURLs = []string{dead()}
		}},
		{name: "a voter that is down, and others whose first URL nobody reaches", which: "three", removed: []uint64{3}, starts: true, want: "is rebuilt", state: func(c *growing) {
			c.others[2].ClientURLs = []string{stranger(c)}
			for _, m := range c.others[:2] {
				m.ClientURLs = append([]string{dead()}, m.ClientURLs...)
			}
		}},
		{name: "a voter that is down, and one more", which: "three", fails: true, want: "1 healthy voters of 3", state: func(c *growing) {
			c.others[2].ClientURLs = []string{stranger(c)}
			c.others[1].ClientURLs = []string{stranger(c)}
		}},
		{name: "a voter with an alarm", which: "three", removed: []uint64{3}, starts: true, want: "is rebuilt", state: func(c *growing) { named(c, 3) }},
		{name: "a voter that differs", which: "three", removed: []uint64{3}, starts: true, fails: true, hashes: 12,
			want: "could not be found equal to the others': data differs: ", state: differ("D")},
		{name: "a voter that differs until it is replaced", which: "three", removed: []uint64{3}, starts: true, hashes: 9, want: "is rebuilt", state: differ("DDDDDDE")},
		{name: "a voter that differs, and is busy now and then", which: "three", removed: []uint64{3}, starts: true, want: "is rebuilt", state: differ("DDFDDFFDDE")},
		{name: "a voter that differs twice", which: "three", hashes: 7, want: "Member 3 (three) is sound: at revision 9 ", state: differ("DDDDE")},
		{name: "a voter that differs twice, and is busy from then on", which: "three", fails: true, want: "in 2 of 30 comparisons data differs: ", state: differ("DDDDF")},
	} {
		t.Run(c.name, func(t *testing.T) {
			cluster, endpoint := startGrowing(t, func(int) error { return nil })
			cluster.rebuilding()
			if c.state != nil {
				c.state(cluster)
			}
			out, told, code := runAs(t, "engram ctl", endpoint, append([]string{"rebuild", "--yes", c.which}, c.flags...)...)
			if (code == 0) == c.fails || !slices.Equal(cluster.removed, c.removed) || !strings.Contains(out+told, c.want) || strings.Contains(out, "--initial-cluster-state=existing") != c.starts {
				t.Errorf("exit code %d, removed %x\n%s%s", code, cluster.removed, out, told)
			}
			if c.hashes > 0 && cluster.hashes > c.hashes {
				t.Errorf("%d hashes were asked for, want %d at most\n%s%s", cluster.hashes, c.hashes, out, told)
			}
			for _, m := range cluster.members() {
				if m.IsLearner && code == 0 {
					t.Errorf("%v is a learner still", m)
				}
			}
		})
	}
}

// TestRebuildUnsure has each change of the members time out and be done all the same.
func TestRebuildUnsure(t *testing.T) {
	shortPauses(t)
	for _, unsure := range []string{"remove", "add", "promote"} {
		for lists := range 2 { // the first list is the one that finds the member
			c, endpoint := startGrowing(t, func(int) error { return nil })
			c.rebuilding()
			c.unsure = map[string]int{unsure: 1}
			c.promote = func(int) error {
				if unsure == "promote" {
					c.unsure["list"] = lists
				}
				return nil
			}
			out, told, code := runAs(t, "engram ctl", endpoint, "rebuild", "--yes", "--anew", "three")
			if code != 0 || !slices.Equal(c.removed, []uint64{3}) || c.learner.GetIsLearner() || len(c.members()) != 3 || !strings.Contains(out, "Member 2ed7 (three) is rebuilt") {
				t.Errorf("%s: exit code %d, removed %x, members %v\n%s%s", unsure, code, c.removed, c.members(), out, told)
			}
		}
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
