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
interrupt stops the waiting alone: the same command with the new ID goes on where it stopped.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("rebuild needs one member, by ID or name")
			}
			return t.rebuild(c, args[0], f)
		},
	}
	c.Flags().StringVar(&f.dataDir, "data-dir", "", "the member's data directory on its host, for the commands that are shown")
	c.Flags().BoolVar(&f.yes, "yes", false, "do not ask before members are changed")
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
	client, err := clientv3.New(cfg)
	if err != nil {
		return exit(exitConnection, err)
	}
	defer closeClient(client)
	r := &rebuilding{t: t, client: client, dataDir: f.dataDir}
	if err := r.find(which); err != nil {
		return err
	}
	if !r.member.GetIsLearner() || started(r.member) == "started" {
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
	}
	r.tellStart()
	if err := t.out.Flush(); err != nil { // whoever is to start the member needs it now
		return err
	}
	if err := t.promoteWhenReady(client, p, r.member.GetID()); err != nil {
		return err
	}
	if err := r.compare(); err != nil {
		return err
	}
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
	if len(m.GetClientURLs()) == 0 {
		return errors.New("it has not started")
	}
	ctx, cancel := r.t.commandContext()
	defer cancel()
	s, err := r.client.Status(ctx, m.GetClientURLs()[0])
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
	ctx, cancel := r.t.commandContext()
	defer cancel()
	if _, err := r.client.MemberRemove(ctx, id); err != nil {
		return fmt.Errorf("removing member %x: %w", id, err)
	}
	fmt.Fprintf(r.t.err, "Member %x is removed; if it runs, it ends by itself.\n", id)
	waiting, stop := r.t.interrupted()
	defer stop()
	for {
		ctx, cancel := context.WithTimeout(waiting, r.t.global.commandTimeout)
		added, err := r.client.MemberAddAsLearner(ctx, urls)
		cancel()
		if err == nil {
			r.member, r.members = added.Member, added.Members
			fmt.Fprintf(r.t.err, "Member %x is added in its place, as a learner.\n", r.member.GetID())
			return nil
		}
		if !transient(err) {
			return fmt.Errorf("member %x is removed, but adding it anew failed: %w: try `%s member add %s --peer-urls=%s`", id, err, r.t.name, r.name, strings.Join(urls, ","))
		}
		select {
		case <-waiting.Done():
			return fmt.Errorf("member %x is removed and not added anew: go on with `%s member add %s --peer-urls=%s`", id, r.t.name, r.name, strings.Join(urls, ","))
		case <-time.After(promotePause):
		}
	}
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

// compareTries is how often hashes are asked for until all can be compared.
const compareTries = 30

// compare compares the members' data at one revision.
func (r *rebuilding) compare() error {
	waiting, stop := r.t.interrupted()
	defer stop()
	last := ""
	for try := 0; try < compareTries; try++ {
		if try > 0 {
			select {
			case <-waiting.Done():
				return errors.New("stopped before the members' data was compared")
			case <-time.After(promotePause):
			}
		}
		if err := r.list(); err != nil {
			last = err.Error()
			continue
		}
		equal, at, why := r.compareOnce(waiting)
		if equal {
			fmt.Fprintf(r.t.out, "Member %x (%s) is rebuilt: at revision %d its data is that of the other members.\n", r.member.GetID(), r.name, at)
			return nil
		}
		last = why
	}
	return fmt.Errorf("member %x is a voter again, but its data could not be found equal to the others': %s", r.member.GetID(), last)
}

func (r *rebuilding) compareOnce(ctx context.Context) (equal bool, at int64, why string) {
	self := slices.IndexFunc(r.members, func(m *etcdserverpb.Member) bool { return m.GetID() == r.member.GetID() })
	if self < 0 || len(r.members[self].GetClientURLs()) == 0 {
		return false, 0, "it has not told its client URLs"
	}
	ask := func(m *etcdserverpb.Member, revision int64) (*clientv3.HashKVResponse, error) {
		ctx, cancel := context.WithTimeout(ctx, max(r.t.global.commandTimeout, time.Minute)) // it reads the whole store
		defer cancel()
		return r.client.HashKV(ctx, m.GetClientURLs()[0], revision)
	}
	own, err := ask(r.members[self], 0)
	if err != nil {
		return false, 0, err.Error()
	}
	at = own.HashRevision
	compared := 0
	for i, m := range r.members {
		if i == self || len(m.GetClientURLs()) == 0 {
			continue
		}
		h, err := ask(m, at)
		if err != nil {
			why = fmt.Sprintf("member %x (%s): %v", m.GetID(), m.GetName(), err)
			continue
		}
		if h.CompactRevision != own.CompactRevision {
			return false, at, fmt.Sprintf("compacted at %d, member %x (%s) at %d", own.CompactRevision, m.GetID(), m.GetName(), h.CompactRevision)
		}
		if h.Hash != own.Hash {
			return false, at, fmt.Sprintf("at revision %d its hash is %08x, that of member %x (%s) is %08x", at, own.Hash, m.GetID(), m.GetName(), h.Hash)
		}
		compared++
	}
	return compared > 0, at, why
}

// disarm clears the alarms of members that are gone: nobody else would.
func (r *rebuilding) disarm() error {
	ctx, cancel := r.t.commandContext()
	defer cancel()
	alarms, err := r.client.AlarmList(ctx)
	if err != nil {
		return fmt.Errorf("asking for alarms: %w", err)
	}
	for _, a := range alarms.Alarms {
		stays := a.MemberID == 0 || slices.ContainsFunc(r.members, func(m *etcdserverpb.Member) bool { return m.GetID() == a.MemberID })
		if stays {
			if a.Alarm == etcdserverpb.AlarmType_CORRUPT {
				fmt.Fprintf(r.t.err, "Alarm CORRUPT stands for member %x: look into it, then `%s alarm disarm`.\n", a.MemberID, r.t.name)
			}
			continue
		}
		if _, err := r.client.AlarmDisarm(ctx, &clientv3.AlarmMember{MemberID: a.MemberID, Alarm: a.Alarm}); err != nil {
			return fmt.Errorf("clearing alarm %s of member %x, which is gone: %w", a.Alarm, a.MemberID, err)
		}
		fmt.Fprintf(r.t.err, "Alarm %s of member %x, which is gone, is cleared.\n", a.Alarm, a.MemberID)
	}
	return nil
}
