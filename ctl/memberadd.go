package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// promotePause is the time between two attempts to make a voter of a learner. Tests shorten it.
var promotePause = time.Second

// addTries is how often adding is tried, promotePause apart: members want others to be connected for 5 s.
const addTries = 10

// addFlags are the flags of member add.
type addFlags struct {
	peerURLs       string
	learner, voter bool
}

func (t *tool) memberAddCommand() *cobra.Command {
	var f addFlags
	c := &cobra.Command{
		Use:   "add <name> --peer-urls=<URLs>",
		Short: "Adds a member into the cluster",
		RunE:  func(c *cobra.Command, args []string) error { return t.memberAdd(c, args, f) },
	}
	c.Flags().StringVar(&f.peerURLs, "peer-urls", "", "where other members will find it, separated by commas")
	c.Flags().BoolVar(&f.learner, "learner", false, "add a member that does not vote, and leave it so")
	if t.asEtcdctl() {
		return c
	}
	c.Long = `Adds a member into the cluster, as a learner, and promotes it to a voter when it has caught up. Until then the cluster needs no
vote of it, so a member that never starts stops nothing. An interrupt ends the waiting alone: the learner stays, and
"member promote" makes a voter of it later.`
	c.Flags().BoolVar(&f.voter, "voter", false, "add a voter at once, as etcdctl does without --learner")
	return c
}

// asEtcdctl says that the tool was called by etcd's name: it does what etcdctl does, and no more.
func (t *tool) asEtcdctl() bool { return t.name == "etcdctl" }

func (t *tool) memberAdd(c *cobra.Command, args []string, f addFlags) error {
	switch {
	case len(args) == 0:
		return badArguments("member name not provided")
	case len(args) > 1:
		return badArguments("too many arguments")
	case f.peerURLs == "":
		return badArguments("member peer urls not provided")
	case f.learner && f.voter:
		return badArguments("--learner and --voter exclude each other")
	}
	p, err := t.setup(c)
	if err != nil {
		return err
	}
	cfg, err := t.clientConfig(c)
	if err != nil {
		return err
	}
	promote := !t.asEtcdctl() && !f.learner && !f.voter
	if promote && !t.global.debug { // the client would warn of every attempt
		cfg.Logger = zap.NewNop()
	}
	client, err := dial(cfg)
	if err != nil {
		return err
	}
	defer closeClient(client)
	add := client.MemberAdd
	if f.learner || promote {
		add = client.MemberAddAsLearner
	}
	tries := 1
	if promote {
		tries = addTries
	}
	r, err := t.addMember(add, strings.Split(f.peerURLs, ","), tries)
	if err != nil {
		return err
	}
	if err := p.memberAdded(r); err != nil {
		return err
	}
	if t.global.writeOut == "simple" {
		t.writeStart(args[0], f.peerURLs, r)
	}
	if !promote {
		return nil
	}
	if err := t.out.Flush(); err != nil { // whoever is to start the member needs it now
		return err
	}
	return t.promoteWhenReady(client, p, r.Member.GetID(), false)
}

// addMember tries again while a member that has just come is not taken for healthy yet: the one added before, say.
func (t *tool) addMember(add func(context.Context, []string) (*clientv3.MemberAddResponse, error), urls []string, tries int) (*clientv3.MemberAddResponse, error) {
	for try := 1; ; try++ {
		ctx, cancel := t.commandContext()
		r, err := add(ctx, urls)
		cancel()
		if err == nil || try >= tries || !errors.Is(err, rpctypes.ErrUnhealthy) {
			return r, err
		}
		if try == 1 {
			fmt.Fprintln(t.err, "Too few voters have been connected for the last 5 s to add a member: trying again for some seconds.")
		}
		select {
		case <-t.ctx.Done():
			return nil, t.ctx.Err()
		case <-time.After(promotePause):
		}
	}
}

// writeStart writes the environment in which the new member starts.
func (t *tool) writeStart(name, peerURLs string, r *clientv3.MemberAddResponse) {
	var cluster []string
	for _, m := range r.Members {
		of := m.GetName()
		if m.GetID() == r.Member.GetID() {
			of = name
		}
		for _, u := range m.GetPeerURLs() {
			cluster = append(cluster, of+"="+u)
		}
	}
	fmt.Fprintln(t.out)
	fmt.Fprintf(t.out, "ETCD_NAME=%q\n", name)
	fmt.Fprintf(t.out, "ETCD_INITIAL_CLUSTER=%q\n", strings.Join(cluster, ","))
	fmt.Fprintf(t.out, "ETCD_INITIAL_ADVERTISE_PEER_URLS=%q\n", peerURLs)
	fmt.Fprintln(t.out, `ETCD_INITIAL_CLUSTER_STATE="existing"`)
}

// promoteWhenReady makes a voter of a learner as soon as the leader agrees that it has caught up, and tells how far it is. runs says that
// nobody needs to start it.
func (t *tool) promoteWhenReady(client *clientv3.Client, p printer, id uint64, runs bool) error {
	later := fmt.Sprintf("%s member promote %x", t.name, id)
	state := fmt.Sprintf("Start member %x with the settings above.", id)
	if runs {
		state = fmt.Sprintf("Member %x runs, as a learner.", id)
	}
	fmt.Fprintf(t.err, "\n%s It is promoted to a voter when it has caught up.\nCtrl-C stops waiting, and nothing else; `%s` goes on later.\n", state, later)
	waiting, stop := t.interrupted()
	defer stop()
	var answer *clientv3.MemberPromoteResponse
	said := ""
	err := t.change(waiting, client, memberChange{
		attempt: func(ctx context.Context) (err error) {
			answer, err = client.MemberPromote(ctx, id)
			return err
		},
		made: func(list *clientv3.MemberListResponse) bool {
			m := memberOf(list.Members, id)
			answer = (*clientv3.MemberPromoteResponse)(&etcdserverpb.MemberPromoteResponse{Header: list.Header, Members: list.Members})
			return m != nil && !m.GetIsLearner()
		},
		again: func(ctx context.Context, err error) {
			state := "tries again: " + err.Error()
			if errors.Is(err, rpctypes.ErrMemberLearnerNotReady) {
				state = t.learnerState(ctx, client, id)
			}
			if state != said {
				said = state
				fmt.Fprintf(t.err, "member %x %s\n", id, state)
			}
		},
	})
	switch {
	case err == nil:
		return p.memberPromoted(id, answer)
	case waiting.Err() != nil:
		return fmt.Errorf("stopped waiting: member %x is a learner still; make a voter of it with `%s`", id, later)
	}
	return fmt.Errorf("member %x stays a learner: %w", id, err)
}

// memberChange is a change of the members that is tried until it is made.
type memberChange struct {
	attempt func(context.Context) error
	// made says by the list of the members whether the change is made. It is asked after each attempt that failed.
	made func(*clientv3.MemberListResponse) bool
	// again is told why there will be another attempt.
	again func(context.Context, error)
}

// change tries c until it is made, an attempt is refused for good, or the waiting ends. An attempt that fails may be applied all the
// same, or be applied later and have the next one refused: so the members' list says what came of it.
func (t *tool) change(waiting context.Context, client *clientv3.Client, c memberChange) error {
	for {
		ctx, cancel := context.WithTimeout(waiting, t.global.commandTimeout)
		failed := c.attempt(ctx)
		cancel()
		if failed == nil {
			return nil
		}
		ctx, cancel = context.WithTimeout(waiting, t.global.commandTimeout)
		list, err := client.MemberList(ctx)
		made := err == nil && c.made(list)
		again := !made && transient(failed) && waiting.Err() == nil
		if again {
			c.again(ctx, failed)
		}
		cancel()
		switch {
		case made:
			return nil
		case waiting.Err() != nil:
			return waiting.Err()
		case !again:
			return failed
		}
		select {
		case <-waiting.Done():
			return waiting.Err()
		case <-time.After(promotePause):
		}
	}
}

// transient says that a change of the members may succeed if it is tried again.
func transient(err error) bool {
	for _, known := range []error{context.DeadlineExceeded, rpctypes.ErrUnhealthy, rpctypes.ErrMemberLearnerNotReady, rpctypes.ErrNoLeader, rpctypes.ErrLeaderChanged,
		rpctypes.ErrTimeout, rpctypes.ErrTimeoutDueToLeaderFail, rpctypes.ErrTimeoutDueToConnectionLost} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// memberOf returns the member of an ID, or nil.
func memberOf(members []*etcdserverpb.Member, id uint64) *etcdserverpb.Member {
	for _, m := range members {
		if m.GetID() == id {
			return m
		}
	}
	return nil
}

// reach asks a member for its status, at all its client URLs at once, and returns the one at which it answers first. Another member's answer
// is none: a URL may mean another host here than it does there.
func (t *tool) reach(ctx context.Context, client *clientv3.Client, m *etcdserverpb.Member) (at string, status *clientv3.StatusResponse, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.global.commandTimeout)
	defer cancel()
	type answer struct {
		at     string
		status *clientv3.StatusResponse
		err    error
	}
	answers := make(chan answer, len(m.GetClientURLs()))
	for _, u := range m.GetClientURLs() {
		go func() {
			s, err := client.Status(ctx, u)
			if err == nil && s.Header.GetMemberId() != m.GetID() {
				err = fmt.Errorf("member %x answers there", s.Header.GetMemberId())
			}
			answers <- answer{u, s, err}
		}()
	}
	err = errors.New("it has not started")
	for i := range cap(answers) {
		a := <-answers
		switch {
		case a.err == nil:
			return a.at, a.status, nil
		case i == 0:
			err = fmt.Errorf("%s: %w", a.at, a.err)
		default:
			err = fmt.Errorf("%w; %s: %w", err, a.at, a.err)
		}
	}
	return "", nil, err
}

// learnerState says in a few words how far a learner is.
func (t *tool) learnerState(ctx context.Context, client *clientv3.Client, id uint64) string {
	list, err := client.MemberList(ctx)
	if err != nil {
		return "catches up"
	}
	m := memberOf(list.Members, id)
	if m.GetName() == "" || len(m.GetClientURLs()) == 0 {
		return "has not started yet"
	}
	_, learner, err := t.reach(ctx, client, m)
	if err != nil {
		return fmt.Sprintf("started, and does not answer at %s", strings.Join(m.GetClientURLs(), ", "))
	}
	var last uint64
	for _, endpoint := range client.Endpoints() {
		if r, err := client.Status(ctx, endpoint); err == nil {
			last = max(last, r.RaftIndex)
		}
	}
	return fmt.Sprintf("catches up: it has applied index %d of %d", learner.RaftAppliedIndex, last)
}
