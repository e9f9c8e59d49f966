package ctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// rebuildFlags are the flags of rebuild.
type rebuildFlags struct {
	dataDir string
	yes     bool
	anew    bool
}

func (t *tool) rebuildCommand() *cobra.Command {
	var f rebuildFlags
	c := &cobra.Command{
		Use:   "rebuild <member ID or name>",
		Short: "Leads through the rebuild of one member from its peers",
		Long: `Rebuilds a member whose data is damaged, differs from the others', or is lost: checks that the others can do without it, removes
it, adds it anew as a learner, says which directory to move aside and how to start it, waits, makes a voter of it, and compares
its data with the others'.

--endpoints should name the other members. Nothing is changed before the question is answered with yes, or --yes is given. An
interrupt stops the waiting alone: the same command with the new ID goes on where it stopped. So a learner is not replaced unless
an alarm names it, nor is a voter that answers, unless an alarm names it or its data differs; --anew replaces these, too.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("rebuild needs one member, by ID or name")
			}
			return t.rebuild(c, args[0], f)
		},
	}
	c.Flags().StringVar(&f.dataDir, "data-dir", "", "the member's data directory on its host, for the commands that are shown")
	c.Flags().BoolVar(&f.yes, "yes", false, "do not ask before members are changed")
	c.Flags().BoolVar(&f.anew, "anew", false, "replace the member even if nothing is found to be wrong with it")
	return c
}

// rebuild is one run of the command.
func (t *tool) rebuild(c *cobra.Command, which string, f rebuildFlags) error {
	p, err := t.setup(c)
	if err != nil {
		return err
	}
	cfg, err := t.clientConfig(c)
	if err != nil {
		return err
	}
	if !t.global.debug { // the client would warn of the member that is away
		cfg.Logger = zap.NewNop()
	}
	client, err := dial(cfg)
	if err != nil {
		return err
	}
	defer closeClient(client)
	r := &rebuilding{t: t, client: client, dataDir: f.dataDir}
	if err := r.find(which); err != nil {
		return err
	}
	away := r.answers(r.member)
	replace, runs := true, away == nil
	switch {
	case f.anew:
	case r.member.GetIsLearner(): // one that has not started, or catches up, was added by an earlier run
		if replace, err = r.named(); err != nil {
			return err
		}
		if !replace && !runs && started(r.member) == "started" {
			return fmt.Errorf("nothing was changed: member %x (%s) is a learner that has started, and does not answer: %w; start it again as it was, and this goes on; --anew replaces it",
				r.member.GetID(), r.name, away)
		}
	case runs:
		if sound, err := r.sound(); err != nil {
			return err
		} else if sound {
			return r.disarm()
		}
	}
	if replace {
		if err := r.check(); err != nil {
			return err
		}
		if !f.yes {
			if err := r.ask(); err != nil {
				return err
			}
		}
		if err := r.replace(); err != nil {
			return err
		}
		runs = false
	}
	if !runs {
		r.tellStart()
		if err := t.out.Flush(); err != nil { // whoever is to start the member needs it now
			return err
		}
	}
	if err := t.promoteWhenReady(client, p, r.member.GetID(), runs); err != nil {
		return err
	}
	at, err := r.compare()
	if err != nil {
		return fmt.Errorf("member %x is a voter again, but its data could not be found equal to the others': %w", r.member.GetID(), err)
	}
	fmt.Fprintf(t.out, "Member %x (%s) is rebuilt: at revision %d its data is that of the other members.\n", r.member.GetID(), r.name, at)
	return r.disarm()
}

// rebuilding is what is known of the member at hand.
type rebuilding struct {
	t       *tool
	client  *clientv3.Client
	dataDir string

	members []*etcdserverpb.Member
	member  *etcdserverpb.Member
	name    string
}

// find finds the member.
func (r *rebuilding) find(which string) error {
	if err := r.list(); err != nil {
		return err
	}
	id, parseErr := strconv.ParseUint(which, 16, 64)
	var known []string
	for _, m := range r.members {
		if m.GetName() == which || parseErr == nil && m.GetID() == id {
			if r.member != nil {
				return badArguments("%q means members %x and %x: give an ID", which, r.member.GetID(), m.GetID())
			}
			r.member, r.name = m, m.GetName()
		}
		known = append(known, fmt.Sprintf("%x (%s)", m.GetID(), m.GetName()))
	}
	if r.member == nil {
		return badArguments("there is no member %q; there are %s", which, strings.Join(known, ", "))
	}
	return nil
}

func (r *rebuilding) list() error {
	ctx, cancel := r.t.commandContext()
	defer cancel()
	list, err := r.client.MemberList(ctx)
	if err != nil {
		return fmt.Errorf("asking for the members: %w", err)
	}
	r.members = list.Members
	return nil
}

// sound says whether a voter that answers may stay as it is: no alarm names it, and its data is that of the others. One that an
// earlier run has rebuilt is such a voter.
func (r *rebuilding) sound() (bool, error) {
	if named, err := r.named(); err != nil || named {
		return false, err
	}
	fmt.Fprintf(r.t.err, "Member %x (%s) answers, and no alarm names it: before anything is changed its data is compared with the others'.\n", r.member.GetID(), r.name)
	at, err := r.compare()
	switch {
	case errors.Is(err, errDiffers):
		fmt.Fprintf(r.t.err, "Member %x (%s): %v.\n", r.member.GetID(), r.name, err)
		return false, nil
	case err != nil:
		return false, fmt.Errorf("nothing was changed: member %x answers, and could not be compared with the others: %w; --anew replaces it without", r.member.GetID(), err)
	}
	fmt.Fprintf(r.t.out, "Member %x (%s) is sound: at revision %d its data is that of the other members. Nothing was changed; --anew replaces it all the same.\n",
		r.member.GetID(), r.name, at)
	return true, nil
}

// check refuses what the cluster would not survive.
func (r *rebuilding) check() error {
	voters, healthy := 0, 0
	var away []string
	for _, m := range r.members {
		if m.GetIsLearner() {
			if m.GetID() == r.member.GetID() {
				continue
			}
			return fmt.Errorf("member %x (%s) is a learner, and there can be one alone: promote or remove it first", m.GetID(), m.GetName())
		}
		voters++
		if m.GetID() == r.member.GetID() {
			continue
		}
		if err := r.answers(m); err != nil {
			away = append(away, fmt.Sprintf("member %x (%s): %v", m.GetID(), m.GetName(), err))
			continue
		}
		healthy++
	}
	if need := voters/2 + 1; healthy < need && !r.member.GetIsLearner() {
		why := fmt.Sprintf("without member %x there are %d healthy voters of %d, and %d are needed to change members", r.member.GetID(), healthy, voters, need)
		if len(away) > 0 {
			why += "; " + strings.Join(away, "; ")
		}
		return fmt.Errorf("%s: bring the others back first, or restore a backup if they are lost", why)
	}
	fmt.Fprintf(r.t.err, "%d of %d voters are healthy without member %x (%s): the cluster goes on while it is rebuilt.\n", healthy, voters, r.member.GetID(), r.name)
	return nil
}

// answers says whether a member serves and knows a leader.
func (r *rebuilding) answers(m *etcdserverpb.Member) error {
	_, s, err := r.t.reach(r.t.ctx, r.client, m)
	if err == nil && s.Leader == 0 {
		err = errors.New("it knows no leader")
	}
	return err
}

func (r *rebuilding) ask() error {
	fmt.Fprintf(r.t.err, "Member %x (%s) will be removed, and added anew with the same peer URLs (%s). All that its data directory holds is given up.\nType yes to go on: ",
		r.member.GetID(), r.name, strings.Join(r.member.GetPeerURLs(), ","))
	line, err := r.t.in.ReadString('\n')
	if strings.TrimSpace(line) != "yes" {
		if err != nil && line == "" {
			return errors.New("nothing was changed: nobody answered; --yes goes on without asking")
		}
		return errors.New("nothing was changed: the answer was not yes")
	}
	return nil
}

// replace takes the member out and adds one with the same peer URLs, as a learner.
func (r *rebuilding) replace() error {
	id, urls := r.member.GetID(), r.member.GetPeerURLs()
	waiting, stop := r.t.interrupted()
	defer stop()
	said := ""
	again := func(_ context.Context, err error) {
		if text := err.Error(); text != said {
			said = text
			fmt.Fprintf(r.t.err, "Trying again: %s\n", text)
		}
	}
	err := r.t.change(waiting, r.client, memberChange{
		attempt: func(ctx context.Context) error {
			_, err := r.client.MemberRemove(ctx, id)
			return err
		},
		made:  func(list *clientv3.MemberListResponse) bool { return memberOf(list.Members, id) == nil },
		again: again,
	})
	switch {
	case err != nil && waiting.Err() != nil:
		return fmt.Errorf("stopped while member %x was being removed: `%s member list` tells whether it is", id, r.t.name)
	case err != nil:
		return fmt.Errorf("removing member %x: %w", id, err)
	}
	fmt.Fprintf(r.t.err, "Member %x is removed; if it runs, it ends by itself.\n", id)
	err = r.t.change(waiting, r.client, memberChange{
		attempt: func(ctx context.Context) error {
			added, err := r.client.MemberAddAsLearner(ctx, urls)
			if err == nil {
				r.member, r.members = added.Member, added.Members
			}
			return err
		},
		made: func(list *clientv3.MemberListResponse) bool {
			i := slices.IndexFunc(list.Members, func(m *etcdserverpb.Member) bool { return m.GetIsLearner() && sameSet(m.GetPeerURLs(), urls) })
			if i >= 0 {
				r.member, r.members = list.Members[i], list.Members
			}
			return i >= 0
		},
		again: again,
	})
	switch {
	case err == nil:
		fmt.Fprintf(r.t.err, "Member %x is added in its place, as a learner.\n", r.member.GetID())
		return nil
	case waiting.Err() != nil:
		return fmt.Errorf("member %x is removed and not added anew: go on with `%s member add %s --peer-urls=%s`", id, r.t.name, r.name, strings.Join(urls, ","))
	}
	return fmt.Errorf("member %x is removed, but adding it anew failed: %w: try `%s member add %s --peer-urls=%s`", id, err, r.t.name, r.name, strings.Join(urls, ","))
}

// sameSet says whether two lists hold the same, in any order.
func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// tellStart says what to do on the member's host.
func (r *rebuilding) tellStart() {
	name := r.name
	if name == "" {
		name = "NAME"
	}
	dir := r.dataDir
	if dir == "" {
		dir = name + ".engram"
	}
	var cluster []string
	for _, m := range r.members {
		of := m.GetName()
		if m.GetID() == r.member.GetID() {
			of = name
		}
		for _, u := range m.GetPeerURLs() {
			cluster = append(cluster, of+"="+u)
		}
	}
	out := r.t.out
	fmt.Fprintf(out, "\nOn the host of %s, when the old process has ended:\n\n", name)
	fmt.Fprintf(out, "  mv %s %s.old-%x\n", dir, dir, r.member.GetID())
	fmt.Fprintf(out, "  engram --name=%s --data-dir=%s --initial-cluster-state=existing \\\n", name, dir)
	fmt.Fprintf(out, "    --initial-cluster=%s \\\n", strings.Join(cluster, ","))
	fmt.Fprintf(out, "    --initial-advertise-peer-urls=%s\n", strings.Join(r.member.GetPeerURLs(), ","))
	fmt.Fprintf(out, "\nwith all other flags as before (URLs to listen on, TLS, quota). A --wal-dir of its own is moved aside as well.\n")
}

const (
	// compareTries is how often hashes are asked for until all can be compared.
	compareTries = 30
	// differTries is how often a difference is found until it is taken for one, as for the alarm CORRUPT.
	differTries = 3
)

var (
	// errDiffers says that the member has other data than another one at the same revision.
	errDiffers = errors.New("data differs")
	// errAlone says that there is nobody to compare with.
	errAlone = errors.New("there is no other member that has started")
)

// compare compares the members' data at one revision, which it returns. It tries again, for a member may lag, or compact just now. Its
// error is errDiffers if the data differed differTries times, and was never found equal.
func (r *rebuilding) compare() (at int64, err error) {
	waiting, stop := r.t.interrupted()
	defer stop()
	var differed, failed error
	differs := 0
	for try := range compareTries {
		if try > 0 {
			select {
			case <-waiting.Done():
				return 0, errors.New("stopped before the members' data was compared")
			case <-time.After(promotePause):
			}
		}
		if err = r.list(); err == nil {
			at, err = r.compareOnce(waiting)
		}
		if errors.Is(err, errDiffers) {
			differs, differed = differs+1, err
		} else {
			failed = err
		}
		if err == nil || differs == differTries || errors.Is(err, errAlone) {
			return at, err
		}
	}
	if differs > 0 {
		failed = fmt.Errorf("%w; in %d of %d comparisons %v", failed, differs, compareTries, differed)
	}
	return at, failed
}

func (r *rebuilding) compareOnce(ctx context.Context) (at int64, err error) {
	self := memberOf(r.members, r.member.GetID())
	ask := func(m *etcdserverpb.Member, revision int64) (*clientv3.HashKVResponse, error) {
		url, _, err := r.t.reach(ctx, r.client, m)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, max(r.t.global.commandTimeout, time.Minute)) // it reads the whole store
		defer cancel()
		return r.client.HashKV(ctx, url, revision)
	}
	own, err := ask(self, 0)
	if err != nil {
		return 0, err
	}
	at = own.HashRevision
	compared := 0
	for _, m := range r.members {
		if m.GetID() == self.GetID() || len(m.GetClientURLs()) == 0 {
			continue
		}
		h, failed := ask(m, at)
		if failed != nil {
			err = fmt.Errorf("member %x (%s): %w", m.GetID(), m.GetName(), failed)
			continue
		}
		if h.CompactRevision != own.CompactRevision {
			return at, fmt.Errorf("compacted at %d, member %x (%s) at %d", own.CompactRevision, m.GetID(), m.GetName(), h.CompactRevision)
		}
		if h.Hash != own.Hash {
			return at, fmt.Errorf("%w: at revision %d its hash is %08x, that of member %x (%s) is %08x", errDiffers, at, own.Hash, m.GetID(), m.GetName(), h.Hash)
		}
		compared++
	}
	switch {
	case compared > 0:
		return at, nil
	case err == nil:
		err = errAlone
	}
	return at, err
}

// named says whether the alarm CORRUPT names the member.
func (r *rebuilding) named() (bool, error) {
	alarms, err := r.alarms()
	return slices.ContainsFunc(alarms, func(a *etcdserverpb.AlarmMember) bool {
		return a.MemberID == r.member.GetID() && a.Alarm == etcdserverpb.AlarmType_CORRUPT
	}), err
}

// alarms asks for the alarms that are on.
func (r *rebuilding) alarms() ([]*etcdserverpb.AlarmMember, error) {
	ctx, cancel := r.t.commandContext()
	defer cancel()
	list, err := r.client.AlarmList(ctx)
	if err != nil {
		return nil, fmt.Errorf("asking for alarms: %w", err)
	}
	return list.Alarms, nil
}

// disarm clears the alarms of members that are gone: nobody else would.
func (r *rebuilding) disarm() error {
	alarms, err := r.alarms()
	if err != nil {
		return err
	}
	for _, a := range alarms {
		if a.MemberID == 0 || memberOf(r.members, a.MemberID) != nil {
			if a.Alarm == etcdserverpb.AlarmType_CORRUPT {
				fmt.Fprintf(r.t.err, "Alarm CORRUPT stands for member %x: look into it, then `%s alarm disarm`.\n", a.MemberID, r.t.name)
			}
			continue
		}
		ctx, cancel := r.t.commandContext()
		_, err := r.client.AlarmDisarm(ctx, &clientv3.AlarmMember{MemberID: a.MemberID, Alarm: a.Alarm})
		cancel()
		if err != nil {
			return fmt.Errorf("clearing alarm %s of member %x, which is gone: %w", a.Alarm, a.MemberID, err)
		}
		fmt.Fprintf(r.t.err, "Alarm %s of member %x, which is gone, is cleared.\n", a.Alarm, a.MemberID)
	}
	return nil
}
