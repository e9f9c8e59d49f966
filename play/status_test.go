package play

import (
	"errors"
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	c := &cluster{members: []*member{
		{name: "m1", condition: running, seen: sight{answered: true, id: 1, leader: 1, term: 12, applied: 345, revision: 67, keys: 8, dbBytes: 5 << 20}},
		{name: "m2", condition: running, cut: true, seen: sight{answered: true, id: 2, term: 11, applied: 40, revision: 30, keys: -1, errors: []string{"etcdserver: no leader"}}},
		{name: "m3", condition: killed, seen: sight{answered: true, id: 3}},
		{name: "m4", condition: paused, cut: true},
		{name: "m5", condition: failed, why: "port taken"},
		{name: "m6", condition: running, learner: true, seen: sight{answered: true, id: 6, leader: 1, term: 12, learner: true}},
		{name: "m7", condition: running},
		{name: "m10", condition: running, seen: sight{err: errors.New("x")}},
	}}
	want := `
NAME  STATE            ROLE      TERM  APPLIED  REVISION  KEYS  DB SIZE  ERRORS
m1    running          leader      12      345        67     8  5.0 MiB
m2    cut off          follower    11       40        30     -      0 B  etcdserver: no leader
m3    killed           -            -        -         -     -        -
m4    paused, cut off  -            -        -         -     -        -
m5    failed           -            -        -         -     -        -  port taken
m6    running          learner     12        0         0     0      0 B
m7    running          -            -        -         -     -        -  starting
m10   running          -            -        -         -     -        -  does not answer
`
	rows := c.rows()
	if got := "\n" + strings.Join(tableLines(rows), "\n") + "\n"; got != want {
		t.Errorf("the table is%s\nnot%s", got, want)
	}
	for i, r := range rows {
		if want := i == 0 || i == 5; r.well != want {
			t.Errorf("%s is well: %v", r.cells[0], r.well)
		}
	}
}

func TestQuorumWords(t *testing.T) {
	down := func(names ...string) (out []voter) {
		for _, n := range names {
			out = append(out, voter{n, "killed", "start " + n})
		}
		return out
	}
	for _, c := range []struct {
		q    quorum
		want string
	}{
		{quorum{voters: 3, up: []string{"m1", "m2", "m3"}, running: true, leader: "m2"},
			"3 of 3 voters up: a majority (2) answers, m2 leads; one more may be lost."},
		{quorum{voters: 3, up: []string{"m1", "m2"}, down: down("m3"), running: true, leader: "m1"},
			"2 of 3 voters up: a majority (2) answers, m1 leads; none more may be lost."},
		{quorum{voters: 3, up: []string{"m1", "m2"}, down: down("m3"), running: true},
			"2 of 3 voters up: a majority, which has no leader yet: writes wait for the election."},
		{quorum{voters: 3, up: []string{"m1"}, down: down("m2", "m3"), running: true},
			"1 of 3 voters up: no majority (2 needed): writes and linearizable reads wait; serializable reads answer. To bring it back: start m2 or start m3."},
		{quorum{voters: 3, down: down("m1", "m2", "m3")},
			"0 of 3 voters up: nobody answers. 2 of these bring it back: start m1, start m2 or start m3."},
		{quorum{voters: 2, down: down("m1", "m2")},
			"0 of 2 voters up: nobody answers. To bring it back: start m1 and start m2."},
		{quorum{voters: 1, down: down("m1")}, "0 of 1 voter up: nobody answers. To bring it back: start m1."},
		{quorum{voters: 5, up: []string{"m1", "m2", "m3", "m4", "m5"}, running: true, leader: "m1"},
			"5 of 5 voters up: a majority (3) answers, m1 leads; 2 more may be lost."},
		{quorum{voters: 4, up: []string{"m1", "m2", "m3"}, down: down("m4"), running: true, leader: "m1"},
			"3 of 4 voters up: a majority (3) answers, m1 leads; none more may be lost."},
	} {
		if got := c.q.words(); got != c.want {
			t.Errorf("%+v:\n got %s\nwant %s", c.q, got, c.want)
		}
	}
	q := quorum{down: []voter{{"m1", "paused, cut off", ""}, {"m2", "cut off", ""}}}
	if got := q.missing(); got != "m1 paused and cut off, m2 cut off" {
		t.Errorf("missing is %q", got)
	}
}

func TestCallOptions(t *testing.T) {
	for _, c := range []struct {
		typed, left, at string
		serializable    bool
		fails           bool
	}{
		{typed: "k v  w", left: "k v  w"},
		{typed: "k", left: "k"},
		{typed: "--at 2 k v", left: "k v", at: "2"},
		{typed: "k --serializable", left: "k", serializable: true},
		{typed: "k --at m1 --serializable", left: "k", at: "m1", serializable: true},
		{typed: "--serializable k --at leader", left: "k", at: "leader", serializable: true},
		{typed: "k v --at", left: "k v --at"},
		{typed: "--at", fails: true},
		{typed: "--stray k", fails: true},
		{typed: "", left: ""},
	} {
		o, left, err := cutOptions(c.typed)
		if (err != nil) != c.fails || err == nil && (left != c.left || o.at != c.at || o.serializable != c.serializable) {
			t.Errorf("%q: %+v, %q, %v", c.typed, o, left, err)
		}
	}
}

func TestLoadWords(t *testing.T) {
	var l load
	if got := l.words(); got != "" {
		t.Errorf("a load that is off says %q", got)
	}
	l.on, l.rate = true, 20
	l.note(0, errors.New("refused"))
	if got := l.words(); !strings.Contains(got, `20 writes/s wanted`) || !strings.Contains(got, `0 written; 1 failed, the last one with "refused"`) {
		t.Errorf("it says %q", got)
	}
}
