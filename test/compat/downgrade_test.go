package compat

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
)

// versionRound is how often a leader asks all members for their versions.
const versionRound = 4 * time.Second

// descent is a cluster of version 3.7 on its way down to etcd 3.6, under load.
type descent struct {
	*testing.T
	ctx  context.Context
	c    *cluster.Cluster
	l    *history.Load
	down cluster.Program
}

func newDescent(t *testing.T, programs ...cluster.Program) *descent {
	t.Helper()
	t.Parallel() // it waits for the clock
	ctx, cancel := context.WithTimeout(t.Context(), migrationWithin)
	t.Cleanup(cancel)
	d := &descent{T: t, ctx: ctx, down: seat(t, "etcd36"), c: newCluster(t, "--snapshot-count=1000", "--snapshot-catchup-entries=100")}
	check(t, d.c.Start(ctx, programs...))
	d.version("3.7.0")
	var err error
	d.l, err = history.Start(d.c, history.Options{Seed: rand.Uint64(), Compact: true})
	check(t, err)
	t.Cleanup(d.l.Abandon)
	return d
}

// ask asks a member for what has to do with the downgrade; any answer begins with the version that the cluster has at the time.
func (d *descent) ask(m *cluster.Member, action etcdserverpb.DowngradeRequest_DowngradeAction, version string) {
	d.Helper()
	to := ""
	if action != etcdserverpb.DowngradeRequest_CANCEL {
		to = "3.6"
	}
	if got := askDowngrade(d.ctx, d.T, m, action, to); !strings.HasPrefix(got, "version "+version) {
		d.Fatalf("%v, asked to %v, answers %s, want version %s", m, action, got, version)
	}
}

// version waits until all members that run tell this cluster version.
func (d *descent) version(want string) {
	d.Helper()
	for _, m := range d.c.Running() {
		check(d.T, eventually(d.ctx, m.Name, func() error { return clusterVersion(m, want) }))
	}
}

// stays fails the test if a member tells another cluster version while a leader looks twice what it should be.
func (d *descent) stays(want string) {
	d.Helper()
	for until := time.Now().Add(2 * versionRound); time.Now().Before(until); {
		check(d.T, d.l.Answers(d.ctx, 1))
		for _, m := range d.c.Running() {
			if err := clusterVersion(m, want); err != nil {
				d.Fatalf("%v, want cluster version %s to stay: %v", m, want, err)
			}
		}
	}
}

// on waits until all members that run say whether a downgrade is under way.
func (d *descent) on(want bool) {
	d.Helper()
	for _, m := range d.c.Running() {
		check(d.T, eventually(d.ctx, m.Name, func() error {
			if got, err := peerText(m, "/downgrade/enabled"); err != nil || got != fmt.Sprint(want) {
				return fmt.Errorf("a downgrade is on: %q, want %t: %v", got, want, err)
			}
			return nil
		}))
	}
}

// stored waits until a member has brought its files to the version, so that the program of that version can read them.
func (d *descent) stored(m *cluster.Member, want string) {
	d.Helper()
	check(d.T, eventually(d.ctx, m.Name, func() error {
		if s, err := m.Status(d.ctx); err != nil || s.StorageVersion != want {
			return fmt.Errorf("storage version %v, want %s: %v", s, want, err)
		}
		return nil
	}))
}

// step has clients go on, does something, and compares hashes.
func (d *descent) step(what string, f func() error) {
	d.Helper()
	check(d.T, d.l.Answers(d.ctx, calmAnswers))
	if err := f(); err != nil {
		d.Fatalf("%s: %v", what, err)
	}
	_, err := d.c.CheckHashBefore(d.ctx)
	check(d.T, err)
	d.Log(what)
}

// leave takes a member out. Clients and leadership leave it first.
func (d *descent) leave(m, heir *cluster.Member) {
	d.Helper()
	d.step("leadership goes to "+heir.Name, func() error {
		return d.l.Disturb(func() error { return d.c.MoveLeader(d.ctx, heir) })
	})
	m.Retire()
	d.l.Refresh()
	d.step(m.Name+" leaves", func() error { return d.c.Remove(d.ctx, m) })
}

// join adds a member of the release below.
func (d *descent) join() *cluster.Member {
	d.Helper()
	var m *cluster.Member
	d.step("a member of 3.6 joins", func() (err error) {
		m, err = d.c.Add(d.ctx, d.down, true)
		return err
	})
	d.step("it is promoted", func() error { return d.c.Promote(d.ctx, m) })
	d.l.Refresh()
	return m
}

// end judges what clients were told, and that nothing but 3.6 is left.
func (d *descent) end() {
	d.Helper()
	d.version("3.6.0")
	d.on(false)
	check(d.T, d.l.Answers(d.ctx, calmAnswers))
	r := report(d.T, d.ctx, d.l)
	if r.Notices == 0 || r.Judged == 0 || r.Compaction == 0 {
		d.Errorf("the load tried too little: %+v", r)
	}
	if r.LongestGap > longestGap+r.LongestStall || r.Failures*fewFailures > r.Answers {
		d.Errorf("%d of %d requests failed, and for %v no write was acknowledged: that is more than changes of the leader explain", r.Failures, r.Answers+r.Failures, r.LongestGap)
	}
	members := d.c.Members()
	for _, m := range members {
		if text, err := peerText(m, "/version"); err != nil || !strings.Contains(text, `"etcdserver":"3.6.`) {
			d.Errorf("%v is of version %s, %v", m, text, err)
		}
	}
	if len(members) != 3 {
		d.Errorf("%d members are left: %v", len(members), members)
	}
	_, err := d.c.CheckHash(d.ctx)
	check(d.T, err)
}

const (
	validate = etcdserverpb.DowngradeRequest_VALIDATE
	enable   = etcdserverpb.DowngradeRequest_ENABLE
	cancel   = etcdserverpb.DowngradeRequest_CANCEL
)

// TestDowngradeInPlace brings two members of etcd 3.7 and one of the other program down to 3.6, as etcd does it: once the cluster has version 3.6 the
// two are started as 3.6 on the files that they have, led by the third, which is no 3.6 and has to leave. With that the downgrade is over, and one more
// of 3.6 joins.
func TestDowngradeInPlace(t *testing.T) {
	o, e := other(t), cluster.Program{Name: "etcd", Path: programs.Etcd}
	if older(o) {
		return // it is down already
	}
	d := newDescent(t, e, e, o)
	two, third := d.c.Members()[:2], d.c.Members()[2]
	d.ask(third, validate, "3.7")
	d.ask(third, enable, "3.7")
	d.version("3.6.0")
	d.on(true)
	d.step(third.Name+" leads", func() error { return d.l.Disturb(func() error { return d.c.MoveLeader(d.ctx, third) }) })
	for _, m := range two {
		d.stored(m, "3.6.0")
		d.step(m.Name+" becomes 3.6", func() error {
			return d.l.Disturb(func() error {
				if err := m.Stop(); err != nil {
					return err
				}
				m.Program = d.down
				return m.Restart(d.ctx)
			})
		})
		d.version("3.6.0")
		d.on(true)
	}
	d.leave(third, two[0])
	d.on(false)
	d.join()
	d.end()
}

// TestDowngradeJoined brings three members down to 3.6 whose files 3.6 cannot read, and three of etcd 3.7 in the same way: members of 3.6 join and the
// old ones leave. None may join while the downgrade is on, and without it the version goes back up; but it does not while a member that was added has
// not told its own yet.
func TestDowngradeJoined(t *testing.T) {
	o, e := other(t), cluster.Program{Name: "etcd", Path: programs.Etcd}
	if older(o) {
		return // it is down already
	}
	t.Parallel() // as its subtests are
	for _, p := range []cluster.Program{o, e} {
		t.Run(p.Name, func(t *testing.T) {
			d := newDescent(t, p, p, p)
			old := d.c.Members()
			d.ask(old[0], validate, "3.7")
			d.ask(old[1], enable, "3.7")
			d.version("3.6.0")
			d.on(true)

			first, err := d.c.Announce(d.ctx, d.down, true)
			check(t, err)
			check(t, first.Spawn())
			select {
			case <-first.Exited():
			case <-d.ctx.Done():
				t.Fatalf("%v joins while the downgrade is on", first)
			}
			if !strings.Contains(first.Log(), "incompatible with current running cluster") {
				t.Fatalf("%v does not say that it must not join yet, but:\n%s", first, first.LogTail())
			}
			d.ask(old[2], cancel, "3.6")
			d.on(false)
			d.stays("3.6.0")
			d.step("the first of 3.6 joins", func() error { return first.Restart(d.ctx) })
			d.version("3.6.0")
			d.step("it is promoted", func() error { return d.c.Promote(d.ctx, first) })
			d.l.Refresh()
			d.leave(old[0], first)
			for _, m := range old[1:] {
				d.leave(m, d.join())
			}
			d.end()
		})
	}
}
