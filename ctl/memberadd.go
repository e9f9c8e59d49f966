package ctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	client, err := clientv3.New(cfg)
	if err != nil {
		return exit(exitConnection, err)
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
	return t.promoteWhenReady(client, p, r.Member.GetID())
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

// promoteWhenReady makes a voter of a learner as soon as the leader agrees that it has caught up, and tells how far it is.
func (t *tool) promoteWhenReady(client *clientv3.Client, p printer, id uint64) error {
	later := fmt.Sprintf("%s member promote %x", t.name, id)
	fmt.Fprintf(t.err, "\nStart member %x with the settings above. It is promoted to a voter when it has caught up.\n"+
		"Ctrl-C stops waiting, and nothing else; `%s` goes on later.\n", id, later)
	waiting, stop := t.interrupted()
	defer stop()
	said := ""
	for {
		ctx, cancel := context.WithTimeout(waiting, t.global.commandTimeout)
		r, err := client.MemberPromote(ctx, id)
		state := ""
		switch {
		case err == nil:
			cancel()
			return p.memberPromoted(id, r)
		case waiting.Err() != nil:
		case errors.Is(err, rpctypes.ErrMemberLearnerNotReady):
			state = t.learnerState(ctx, client, id)
		case transient(err):
			state = "tries again: " + err.Error()
		default:
			cancel()
			return fmt.Errorf("member %x stays a learner: %w", id, err)
		}
		cancel()
		if state != "" && state != said {
			said = state
			fmt.Fprintf(t.err, "member %x %s\n", id, state)
		}
		select {
		case <-waiting.Done():
			return fmt.Errorf("stopped waiting: member %x is a learner still; make a voter of it with `%s`", id, later)
		case <-time.After(promotePause):
		}
	}
}

// transient says that a change of the members may succeed if it is tried again.
func transient(err error) bool {
	for _, known := range []error{context.DeadlineExceeded, rpctypes.ErrUnhealthy, rpctypes.ErrNoLeader, rpctypes.ErrLeaderChanged, rpctypes.ErrTimeout,
		rpctypes.ErrTimeoutDueToLeaderFail, rpctypes.ErrTimeoutDueToConnectionLost} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// learnerState says in a few words how far a learner is.
func (t *tool) learnerState(ctx context.Context, client *clientv3.Client, id uint64) string {
	list, err := client.MemberList(ctx)
	if err != nil {
		return "catches up"
	}
	i := slices.IndexFunc(list.Members, func(m *etcdserverpb.Member) bool { return m.GetID() == id })
	if i < 0 || list.Members[i].GetName() == "" || len(list.Members[i].GetClientURLs()) == 0 {
		return "has not started yet"
	}
	learner, err := client.Status(ctx, list.Members[i].GetClientURLs()[0])
	if err != nil {
		return fmt.Sprintf("started, and does not answer at %s", list.Members[i].GetClientURLs()[0])
	}
	var last uint64
	for _, endpoint := range client.Endpoints() {
		if r, err := client.Status(ctx, endpoint); err == nil {
			last = max(last, r.RaftIndex)
		}
	}
	return fmt.Sprintf("catches up: it has applied index %d of %d", learner.RaftAppliedIndex, last)
}
