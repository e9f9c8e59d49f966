package compat

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
)

const (
	migrationWithin = 6 * time.Minute
	calmAnswers     = 300 // between two steps
	longestGap      = 10 * time.Second
	fewFailures     = 50 // one in so many requests, at most
	// A move of leadership is over when all members know of it: what is asked later has nothing to wait for.
	afterMove = time.Millisecond
)

// TestMigration takes a cluster of three from etcd to the other program and back, member by member, under write load: no
// acknowledged write is lost, watchers miss nothing, after each step all members have the same keys, and no request fails but while leadership moves.
func TestMigration(t *testing.T) {
	e, o := reference(t), other(t)
	stages := []cluster.Program{e, o, e}
	if older(o) {
		stages = []cluster.Program{o, e} // from a release to the next, and not back
	} else if older(e) {
		stages = []cluster.Program{e, o}
	}
	ctx, cancel := context.WithTimeout(t.Context(), migrationWithin)
	defer cancel()
	c := newCluster(t, "--snapshot-count=1000", "--snapshot-catchup-entries=100")
	check(t, c.Start(ctx, stages[0], stages[0], stages[0]))
	l, err := history.Start(c, history.Options{Seed: rand.Uint64(), Compact: true, Grace: afterMove})
	check(t, err)
	defer l.Abandon()
	same := func() {
		t.Helper()
		_, err := c.CheckHashBefore(ctx)
		check(t, err)
	}
	for stage, program := range stages[1:] {
		for i, old := range c.Members() {
			check(t, l.Answers(ctx, calmAnswers))
			m, err := c.Add(ctx, program, true)
			check(t, err)
			same()
			check(t, c.Promote(ctx, m))
			same()
			check(t, l.Answers(ctx, calmAnswers))
			leader, err := c.Leader(ctx)
			check(t, err)
			if leader == old {
				check(t, l.Disturb(func() error { return c.MoveLeader(ctx, m) }))
				same()
			}
			old.Retire()
			l.Refresh()
			check(t, l.Answers(ctx, calmAnswers)) // clients have left it
			check(t, c.Remove(ctx, old))
			same()
			t.Logf("stage %d: %v took the place of %v (%d of 3)", stage+1, m, old, i+1)
		}
		check(t, checkVersion(ctx, c, program))
		if program.Name == "engram" { // the way back begins after the cluster has agreed on more than etcd knows
			for _, m := range c.Members() {
				check(t, eventually(ctx, "feature level", func() error {
					if level, err := metric(m, "engram_cluster_feature_level"); err != nil || level != 1 {
						return fmt.Errorf("%v has feature level %v, want 1: %v", m, level, err)
					}
					return nil
				}))
			}
		}
	}
	r := report(t, ctx, l)
	if r.LongestGap > longestGap+r.LongestStall || r.Failures*fewFailures > r.Answers {
		t.Errorf("%d of %d requests failed, and for %v no write was acknowledged: that is more than changes of the leader explain", r.Failures, r.Answers+r.Failures, r.LongestGap)
	}
	if r.Notices == 0 || r.Judged == 0 || r.Compaction == 0 {
		t.Errorf("the load tried too little: %+v", r)
	}
	_, err = c.CheckHash(ctx)
	check(t, err)
}

// checkVersion waits until all members tell the same cluster version, that of the program.
func checkVersion(ctx context.Context, c *cluster.Cluster, p cluster.Program) error {
	want := "3.7.0"
	if older(p) {
		want = "3.6.0"
	}
	for _, m := range c.Members() {
		if err := eventually(ctx, m.Name, func() error { return clusterVersion(m, want) }); err != nil {
			return err
		}
	}
	return nil
}
