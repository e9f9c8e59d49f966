package history

import (
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
)

// put is an event of a new key.
func put(key, value string, revision int64) *mvccpb.Event {
	return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte(key), Value: []byte(value), CreateRevision: revision, ModRevision: revision, Version: 1}}
}

func message(revision int64, events ...*mvccpb.Event) clientv3.WatchResponse {
	r := clientv3.WatchResponse{Header: &etcdserverpb.ResponseHeader{Revision: revision}}
	for _, e := range events {
		r.Events = append(r.Events, (*clientv3.Event)(e))
	}
	return r
}

// TestWatcherSees shows that each breach of what watchers are promised is found.
func TestWatcherSees(t *testing.T) {
	again := put("a", "2", 3)
	again.Kv.CreateRevision, again.Kv.Version = 2, 2
	gone := &mvccpb.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: []byte("b"), ModRevision: 3}}
	for _, test := range []struct {
		name     string
		messages []clientv3.WatchResponse
		want     string // "" is fine
	}{
		{"all is well", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(2), message(3, again)}, ""},
		{"two events of a revision", []clientv3.WatchResponse{message(2, put("a", "1", 2), put("b", "1", 2))}, ""},
		{"doubled", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(2, put("a", "1", 2))}, "after revision 2 was seen"},
		{"split", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(2, put("b", "1", 2))}, "after revision 2 was seen"},
		{"missing", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(4, put("b", "1", 4))}, "events between are missing"},
		{"missing at first", []clientv3.WatchResponse{message(3, put("a", "1", 3))}, "events between are missing"},
		{"out of order", []clientv3.WatchResponse{message(3, put("a", "1", 2), put("b", "1", 3), put("c", "1", 2))}, "follows revision 3"},
		{"notice too early", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(3)}, "progress notice for revision 3"},
		{"header below the event", []clientv3.WatchResponse{message(1, put("a", "1", 2))}, "header revision 1"},
		{"version", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(3, put("a", "1", 3))}, "follows"},
		{"delete of nothing", []clientv3.WatchResponse{message(2, put("a", "1", 2)), message(3, gone)}, "was not there"},
	} {
		w := newWatcher("w")
		var err error
		for _, m := range test.messages {
			if err == nil {
				err = w.observe(m)
			}
		}
		expect(t, test.name, err, test.want)
	}
}

// TestLedgerSees shows that each breach of what writers were told is found.
func TestLedgerSees(t *testing.T) {
	a, b := effect{key: "a", value: "1"}, effect{key: "b", value: "2"}
	for _, test := range []struct {
		name   string
		fill   func(l *ledger)
		events []*mvccpb.Event
		want   string
	}{
		{"acknowledged and there", func(l *ledger) { l.tell(2, a) }, []*mvccpb.Event{put("a", "1", 2)}, ""},
		{"in doubt and there", func(l *ledger) { l.doubt(a, b) }, []*mvccpb.Event{put("a", "1", 2), put("b", "2", 2)}, ""},
		{"in doubt and not there", func(l *ledger) { l.doubt(a, b) }, nil, ""},
		{"lost", func(l *ledger) { l.tell(2, a); l.tell(3, b) }, []*mvccpb.Event{put("a", "1", 2)}, "1 of 2 acknowledged writes are lost"},
		{"another value", func(l *ledger) { l.tell(2, a) }, []*mvccpb.Event{put("a", "x", 2)}, "acknowledged at revision 2"},
		{"another revision", func(l *ledger) { l.tell(2, a) }, []*mvccpb.Event{put("a", "1", 3)}, "nobody asked for"},
		{"half", func(l *ledger) { l.doubt(a, b) }, []*mvccpb.Event{put("a", "1", 2)}, "half of a request"},
		{"twice", func(l *ledger) { l.doubt(a) }, []*mvccpb.Event{put("a", "1", 2), put("a", "1", 3)}, "nobody asked for"},
		{"from nowhere", func(*ledger) {}, []*mvccpb.Event{put("a", "1", 2)}, "nobody asked for"},
	} {
		l := newLedger()
		test.fill(l)
		_, _, err := l.reconcile(test.events)
		expect(t, test.name, err, test.want)
	}
	l := newLedger()
	expect(t, "first of a revision", l.tell(2, a), "")
	expect(t, "a revision told twice", l.tell(2, b), "revision 2 was told of")
}

// TestJournalSees shows that a history with a stale read, and a lost swap, is not linearizable, and what has no answer is
// judged by whether its value was seen.
func TestJournalSees(t *testing.T) {
	const key = "p/0"
	put1 := register{op: 'p', key: key, value: "1"}
	put2 := register{op: 'p', key: key, value: "2"}
	get := register{op: 'g', key: key}
	swap := register{op: 'c', key: key, expected: "1", value: "3"}
	type step struct {
		in  register
		out answer
	}
	for _, test := range []struct {
		name  string
		steps []step
		seen  string // value that took place
		want  string
	}{
		{"reads what was put", []step{{put1, answer{}}, {get, answer{value: "1"}}}, "", ""},
		{"a stale read", []step{{put1, answer{}}, {put2, answer{}}, {get, answer{value: "1"}}}, "", "not linearizable"},
		{"a lost put", []step{{put1, answer{}}, {get, answer{}}}, "", "not linearizable"},
		{"a swap of what was not there", []step{{put2, answer{}}, {swap, answer{done: true}}}, "", "not linearizable"},
		{"a delete of nothing", []step{{register{op: 'd', key: key}, answer{done: true}}}, "", "not linearizable"},
		{"unknown, took place late", []step{{put1, answer{unknown: true}}, {get, answer{}}, {get, answer{value: "1"}}}, "1", ""},
		{"unknown, went back", []step{{put1, answer{unknown: true}}, {get, answer{value: "1"}}, {get, answer{}}}, "1", "not linearizable"},
		{"unknown, read but never there", []step{{put1, answer{unknown: true}}, {get, answer{value: "1"}}}, "", "not linearizable"},
	} {
		j := newJournal()
		for _, s := range test.steps {
			j.note(0, j.now(), s.in, s.out)
		}
		_, err := j.check(func(_, value string) bool { return value == test.seen })
		expect(t, test.name, err, test.want)
	}
}

// TestHash compares with the hashes that etcd 3.7.3 gave after these puts and this delete, before and after a compaction.
func TestHash(t *testing.T) {
	again := put("a", "2", 4)
	again.Kv.CreateRevision, again.Kv.Version = 2, 2
	gone := &mvccpb.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: []byte("c"), ModRevision: 6}}
	events := []*mvccpb.Event{put("a", "1", 2), put("b", "1", 3), again, put("c", "1", 5), gone}
	for compacted, want := range map[int64]uint32{-1: 3012756166, 4: 2675198807} {
		if got := hashKV(events, compacted); got != want {
			t.Errorf("compacted at %d the hash is %d, etcd's is %d", compacted, got, want)
		}
	}
}

func expect(t *testing.T, name string, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v", name, err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("%s: got %v, want an error with %q", name, err, want)
	case want != "" && !broken.Is(err):
		t.Errorf("%s: %v is not marked as what test/again must not excuse", name, err)
	}
}
