// Package cluster runs clusters of real processes, each member of any program that speaks etcd's protocol: etcd, Engram,
// or the one beside the other.
//
// It knows what operators do to a cluster, not what clients ask of it. Cluster is the main type, Member one of its
// processes. Invariants:
//
//	C1: members listen on loopback, or in a network namespace of their own, only.
//	C2: a process is ended by its own process id, never by name.
//	C3: what waits ends with its context, and the error then says what each member said last.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

const (
	readyWithin = time.Minute
	callWithin  = 5 * time.Second
	poll        = 20 * time.Millisecond // of another process: there is no event to wait for
	maxMessage  = 64 << 20
)

// Program is one server program.
type Program struct {
	Name  string // for names of members and messages: etcd, etcd36, engram
	Path  string
	Flags []string // that only members of this program get
}

// Host is where a member runs. The zero value is loopback, with data below the cluster's directory.
type Host struct {
	Namespace string // network namespace
	Address   string // in it
	Dir       string // for data
}

// Cluster is a number of members. Its methods are for one goroutine, apart from Client, Clients and Members.
type Cluster struct {
	Flags  []string // of every member
	Listen []string // URLs on which members listen for clients besides their own
	Env    []string // added to every member's environment
	User   string   // of clients that are made from now on, with Password; empty without auth
	Pass   string
	// PeerTLS has members talk over TLS, with the files that Flags name. PeerHashKV, and with it CheckHash, has no certificate to ask with.
	PeerTLS bool
	// Discovery, if set, are the flags by which the members that Start begins find each other, in place of --initial-cluster.
	Discovery []string
	// Hosts, if set, says where the n-th member runs that is ever started.
	Hosts func(n int) Host
	// Front, if set, gives the address under which others reach what listens at an address for members: that of a proxy.
	Front func(listen string) (advertised string, err error)

	dir string

	mu      sync.Mutex
	members []*Member // that were not removed
	serial  int
	races   []error // of processes that have ended
}

// Member is one member and its process.
type Member struct {
	Name      string
	Program   Program
	ID        uint64
	ClientURL string
	PeerURL   string
	DataDir   string

	c              *Cluster
	host           Host
	listenPeer     string // PeerURL, or what lies behind a proxy at PeerURL
	initial, state string

	mu      sync.Mutex
	cmd     *exec.Cmd
	exited  chan struct{} // closed when the process has ended
	exitErr error
	paused  bool
	learner bool
	leaving bool // clients shall not use it any more
	client  *clientv3.Client
}

func (m *Member) String() string { return m.Name }

// Host is where the member runs.
func (m *Member) Host() Host { return m.host }

// Endpoint is the address for clients without a scheme.
func (m *Member) Endpoint() string { return strings.TrimPrefix(m.ClientURL, "http://") }

// New returns a cluster without members that keeps its files below dir.
func New(dir string) *Cluster { return &Cluster{dir: dir} }

// Start begins a new cluster with a member of each program, and waits until all of them serve.
func (c *Cluster) Start(ctx context.Context, programs ...Program) error {
	var initial []string
	for _, p := range programs {
		m, err := c.newMember(p, "new")
		if err != nil {
			return err
		}
		initial = append(initial, m.Name+"="+m.PeerURL)
		c.join(m)
	}
	for _, m := range c.Members() {
		m.initial = strings.Join(initial, ",")
		if err := m.spawn(); err != nil {
			return err
		}
	}
	for _, m := range c.Members() {
		if err := m.Ready(ctx); err != nil {
			return err
		}
	}
	_, err := c.Leader(ctx)
	return err
}

func (c *Cluster) newMember(p Program, state string) (*Member, error) {
	c.mu.Lock()
	n := c.serial
	c.serial++
	c.mu.Unlock()
	var h Host
	if c.Hosts != nil {
		h = c.Hosts(n)
	}
	address := h.Address
	if address == "" {
		address = "127.0.0.1"
	}
	client, peer := "2379", "2380" // a namespace has all ports to itself
	if h.Namespace == "" {
		var err error
		if client, err = FreePort(); err != nil {
			return nil, err
		}
		if peer, err = FreePort(); err != nil {
			return nil, err
		}
	}
	m := &Member{
		Name: fmt.Sprintf("%s-%d", p.Name, n), Program: p, c: c, host: h, state: state,
		ClientURL: "http://" + net.JoinHostPort(address, client), PeerURL: "http://" + net.JoinHostPort(address, peer),
	}
	if c.PeerTLS {
		m.PeerURL = "https://" + net.JoinHostPort(address, peer)
	}
	m.listenPeer = m.PeerURL
	if c.Front != nil {
		advertised, err := c.Front(strings.TrimPrefix(m.listenPeer, "http://"))
		if err != nil {
			return nil, err
		}
		m.PeerURL = "http://" + advertised
	}
	dir := h.Dir
	if dir == "" {
		dir = c.dir
	}
	m.DataDir = filepath.Join(dir, m.Name+".data")
	return m, os.MkdirAll(c.dir, 0o700)
}

func (m *Member) isLearner() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.learner
}

func (c *Cluster) join(m *Member) {
	c.mu.Lock()
	c.members = append(c.members, m)
	c.mu.Unlock()
}

// Members are all members that were not removed.
func (c *Cluster) Members() []*Member {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.members)
}

// Running are the members whose process is there and not paused.
func (c *Cluster) Running() []*Member {
	return slices.DeleteFunc(c.Members(), func(m *Member) bool { return !m.Running() })
}

// Of is the first member of a program.
func (c *Cluster) Of(program string) *Member {
	for _, m := range c.Members() {
		if m.Program.Name == program {
			return m
		}
	}
	return nil
}

// Close ends all processes, and reports those that did not end and what the race detector has found in any.
func (c *Cluster) Close() error {
	var errs []error
	for _, m := range c.Members() {
		m.closeClient()
		errs = append(errs, m.close())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(append(errs, c.races...)...)
}

// found keeps a race that a process of m has run into; nil is none.
func (c *Cluster) found(m *Member, race error) {
	if race == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.races = append(c.races, fmt.Errorf("%v: %w", m, race))
}

// Logs is the end of every member's log, for a failure.
func (c *Cluster) Logs() string {
	var b strings.Builder
	for _, m := range c.Members() {
		fmt.Fprintf(&b, "--- the log of %v ends:\n%s\n", m, m.LogTail())
	}
	return b.String()
}

// Restart runs an ended member again on its data.
func (m *Member) Restart(ctx context.Context) error {
	if err := m.spawn(); err != nil {
		return err
	}
	return m.Ready(ctx)
}

// Spawn runs an ended member again and does not wait for it to serve.
func (m *Member) Spawn() error { return m.spawn() }

// Ready waits until the member has a leader, has told the others its name and, unless it is a learner, answers a
// linearizable read.
func (m *Member) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	exited := m.Exited()
	err := m.until(ctx, exited, m.serves)
	if err != nil {
		return fmt.Errorf("%v (%s) did not become ready: %w; its log ends:\n%s", m, m.Program.Path, err, m.LogTail())
	}
	return nil
}

func (m *Member) until(ctx context.Context, exited <-chan struct{}, f func(context.Context) error) error {
	for {
		err := f(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-exited:
			return fmt.Errorf("the process ended, before: %w", err)
		case <-ctx.Done():
			return err
		case <-time.After(poll):
		}
	}
}

func (m *Member) serves(ctx context.Context) error {
	s, err := m.Status(ctx)
	if err != nil {
		return err
	}
	if m.ID = s.Header.MemberId; s.Leader == 0 {
		return errors.New("it has no leader")
	}
	if s.IsLearner {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	client, err := m.Client()
	if err != nil {
		return err
	}
	list, err := client.MemberList(call)
	if err != nil {
		return err
	}
	for _, other := range list.Members {
		if other.ID == m.ID && len(other.ClientURLs) == 0 {
			return errors.New("it has not told its name yet")
		}
	}
	return nil
}

// Status asks the member itself.
func (m *Member) Status(ctx context.Context) (*clientv3.StatusResponse, error) {
	client, err := m.Client()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callWithin)
	defer cancel()
	return client.Status(ctx, m.ClientURL)
}

// Client is a client of this member alone. It is closed with the member.
func (m *Member) Client() (*clientv3.Client, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.client != nil && m.client.Username == m.c.User {
		return m.client, nil
	}
	client, err := m.c.Dial(m.ClientURL)
	if err != nil {
		return nil, fmt.Errorf("%v: %w", m, err)
	}
	if m.client != nil {
		m.client.Close()
	}
	m.client = client
	return client, nil
}

func (m *Member) closeClient() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.client != nil {
		m.client.Close()
		m.client = nil
	}
}

// Dial makes a client of some members, which the caller closes.
func (c *Cluster) Dial(urls ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: urls, Username: c.User, Password: c.Pass, Logger: zap.NewNop(),
		DialTimeout: callWithin, DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage))},
	})
}

// Endpoints are the client addresses of the running voters that stay.
func (c *Cluster) Endpoints() (urls []string) {
	for _, m := range c.Serving() {
		urls = append(urls, m.ClientURL)
	}
	return urls
}

// Serving are the running voters that stay: those for clients to use.
func (c *Cluster) Serving() []*Member {
	return slices.DeleteFunc(c.Running(), func(m *Member) bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.leaving || m.learner
	})
}

// some is a client of the serving members but one.
func (c *Cluster) some(but *Member) (*clientv3.Client, error) {
	var failed error
	for _, m := range c.Serving() {
		if m == but {
			continue
		}
		client, err := m.Client()
		if err == nil {
			return client, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, fmt.Errorf("no member serves: %w", failed)
}

// Leader waits until a majority of the members agrees on one leader, and all that run.
func (c *Cluster) Leader(ctx context.Context) (*Member, error) {
	return c.leaderOf(ctx, c.Running())
}

// LeaderOf waits until the given members agree on one leader, which is one of them.
func (c *Cluster) LeaderOf(ctx context.Context, members ...*Member) (*Member, error) {
	return c.leaderOf(ctx, members)
}

func (c *Cluster) leaderOf(ctx context.Context, members []*Member) (leader *Member, err error) {
	err = wait(ctx, "one leader", func(ctx context.Context) error {
		leader = nil
		var id uint64
		var said []string
		for _, m := range members {
			s, err := m.Status(ctx)
			if err != nil {
				return err
			}
			said = append(said, fmt.Sprintf("%v says %x in term %d", m, s.Leader, s.RaftTerm))
			if id == 0 {
				id = s.Leader
			}
			if s.Leader != id || id == 0 {
				return errors.New(strings.Join(said, ", "))
			}
			if m.ID = s.Header.MemberId; m.ID == id {
				leader = m
			}
		}
		if leader == nil {
			return fmt.Errorf("the leader %x does not run: %s", id, strings.Join(said, ", "))
		}
		return nil
	})
	return leader, err
}

// MoveLeader hands leadership to a member, and waits until all know of it.
func (c *Cluster) MoveLeader(ctx context.Context, to *Member) error {
	return wait(ctx, "leadership of "+to.Name, func(ctx context.Context) error {
		leader, err := c.Leader(ctx)
		if err != nil || leader == to {
			return err
		}
		client, err := leader.Client()
		if err != nil {
			return err
		}
		if _, err = client.MoveLeader(ctx, to.ID); err != nil {
			return err
		}
		if leader, err = c.Leader(ctx); err == nil && leader != to {
			return fmt.Errorf("%v leads", leader)
		}
		return err
	})
}

// Add adds a member of a program, waits until the cluster lets it, starts it and waits until it serves.
func (c *Cluster) Add(ctx context.Context, p Program, learner bool) (*Member, error) {
	m, err := c.Announce(ctx, p, learner)
	if err != nil {
		return nil, err
	}
	if err := m.spawn(); err != nil {
		return nil, err
	}
	return m, m.Ready(ctx)
}

// Announce adds a member without starting it; Restart or Spawn start it.
func (c *Cluster) Announce(ctx context.Context, p Program, learner bool) (*Member, error) {
	m, err := c.newMember(p, "existing")
	if err != nil {
		return nil, err
	}
	m.learner = learner
	initial := []string{m.Name + "=" + m.PeerURL}
	for _, other := range c.Members() {
		initial = append(initial, other.Name+"="+other.PeerURL)
	}
	m.initial = strings.Join(initial, ",")
	err = wait(ctx, "adding "+m.Name, func(ctx context.Context) error {
		client, err := c.some(nil)
		if err != nil {
			return err
		}
		add := client.MemberAdd
		if learner {
			add = client.MemberAddAsLearner
		}
		r, err := add(ctx, []string{m.PeerURL})
		if errors.Is(err, rpctypes.ErrPeerURLExist) { // by a try whose answer was lost
			list, err := client.MemberList(ctx)
			if err != nil {
				return err
			}
			for _, other := range list.Members {
				if slices.Contains(other.PeerURLs, m.PeerURL) {
					m.ID = other.ID
				}
			}
			return nil
		}
		if err == nil {
			m.ID = r.Member.ID
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, other := range c.Serving() { // whoever it asks at its start must know of it
		if err := wait(ctx, "word of "+m.Name+" at "+other.Name, func(ctx context.Context) error { return other.knows(ctx, m) }); err != nil {
			return nil, err
		}
	}
	c.join(m)
	return m, nil
}

// knows is nil if the member itself, which may be without a quorum, has heard of another one.
func (m *Member) knows(ctx context.Context, other *Member) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	list, err := etcdserverpb.NewClusterClient(client.ActiveConnection()).MemberList(ctx, &etcdserverpb.MemberListRequest{})
	if err == nil && !slices.ContainsFunc(list.Members, func(o *etcdserverpb.Member) bool { return o.ID == other.ID }) {
		err = fmt.Errorf("%v has %d members, without %x", m, len(list.Members), other.ID)
	}
	return err
}

// Promote makes a voter of a learner as soon as it has caught up.
func (c *Cluster) Promote(ctx context.Context, m *Member) error {
	err := wait(ctx, "promoting "+m.Name, func(ctx context.Context) error {
		client, err := c.some(m)
		if err != nil {
			return err
		}
		_, err = client.MemberPromote(ctx, m.ID)
		if errors.Is(err, rpctypes.ErrMemberNotLearner) { // a try before, whose answer was lost
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := wait(ctx, "voter "+m.Name, func(ctx context.Context) error { // clients may use it once it knows itself
		s, err := m.Status(ctx)
		if err == nil && s.IsLearner {
			err = errors.New("it takes itself for a learner")
		}
		return err
	}); err != nil {
		return err
	}
	m.mu.Lock()
	m.learner = false
	m.mu.Unlock()
	return m.Ready(ctx)
}

// Retire takes a member out of Serving, so that clients leave it before it is removed.
func (m *Member) Retire() {
	m.mu.Lock()
	m.leaving = true
	m.mu.Unlock()
}

// Remove removes a member. One that runs must end by itself.
func (c *Cluster) Remove(ctx context.Context, m *Member) error {
	m.Retire()
	err := wait(ctx, "removing "+m.Name, func(ctx context.Context) error {
		client, err := c.some(m)
		if err != nil {
			return err
		}
		if _, err = client.MemberRemove(ctx, m.ID); errors.Is(err, rpctypes.ErrMemberNotFound) {
			return nil // a try before, whose answer was lost
		}
		return err
	})
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.members = slices.DeleteFunc(c.members, func(o *Member) bool { return o == m })
	c.mu.Unlock()
	m.closeClient()
	if m.Running() {
		return m.waitExit("its removal")
	}
	return m.close()
}

// Replace adds a member of a program, waits until it serves, and removes an old one. Leadership moves away first.
func (c *Cluster) Replace(ctx context.Context, old *Member, p Program, learner bool) (*Member, error) {
	m, err := c.Add(ctx, p, learner)
	if err != nil {
		return nil, err
	}
	if learner {
		if err := c.Promote(ctx, m); err != nil {
			return nil, err
		}
	}
	old.Retire()
	leader, err := c.Leader(ctx)
	if err != nil {
		return nil, err
	}
	if leader == old {
		if err := c.MoveLeader(ctx, m); err != nil {
			return nil, err
		}
	}
	return m, c.Remove(ctx, old)
}

// wait calls f until it is content or ctx ends, for a minute at most.
func wait(ctx context.Context, what string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for {
		call, done := context.WithTimeout(ctx, 2*callWithin)
		err := f(call)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no %s: %w", what, err)
		case <-time.After(poll):
		}
	}
}
