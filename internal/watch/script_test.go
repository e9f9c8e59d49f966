package watch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/mvcc"
)

// TestScripts runs testdata. Commands:
//
//	new recent= chunk= revisions= batch= fragment= watchers=   another hub over the same store
//	apply [later]             one transaction a line: "a=1 b=2 -c"; later: not published yet
//	publish                   what later held back
//	compact REV
//	stream NAME [cap=]
//	create NAME key= end= start= id= prev progress fragment noput nodelete
//	refuse NAME / cancel NAME id= / progress NAME / close NAME
//	deliver / catchup         one step
//	run                       steps till nothing is left to do
//	advance DURATION          turn the clock, then run
//	recv NAME [n=]            read responses
//	reset                     as after a snapshot: publishes nothing that was held back
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s := newScript(t)
		datadriven.RunTest(t, path, s.run)
	})
}

type script struct {
	t     *testing.T
	store *fakeStore
	clock *clock.Fake
	hub   *Hub
	held  [][]mvcc.Event
	sinks map[string]*fakeSink
	strs  map[string]*Stream
}

func newScript(t *testing.T) *script {
	s := &script{t: t, store: newFakeStore(), clock: clock.NewFake(time.Unix(1000, 0))}
	s.open(Options{})
	return s
}

func (s *script) open(o Options) {
	o.Source, o.Clock = s.store, s.clock
	o.ClusterID, o.MemberID = 7, 8
	o.Term = func() uint64 { return 3 }
	o.Rand = rand.New(rand.NewPCG(1, 1))
	s.hub = New(o)
	s.sinks, s.strs = map[string]*fakeSink{}, map[string]*Stream{}
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	name := ""
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		name = d.CmdArgs[0].Key
	}
	number := func(arg string, otherwise int) int {
		d.MaybeScanArgs(t, arg, &otherwise)
		return otherwise
	}
	text := func(arg string) []byte {
		var v string
		d.MaybeScanArgs(t, arg, &v)
		return []byte(strings.ReplaceAll(v, `\0`, "\x00"))
	}
	var out strings.Builder
	note := func(err error) {
		if err != nil {
			fmt.Fprintf(&out, "error: %v\n", err)
		}
	}
	stream := s.strs[name]
	switch d.Cmd {
	case "new":
		s.open(Options{RecentBytes: number("recent", 0), ChunkBytes: number("chunk", 0), BatchRevisions: number("revisions", 0),
			BatchBytes: number("batch", 0), FragmentBytes: number("fragment", 0), MaxWatchers: number("watchers", 0)})
	case "apply":
		for line := range strings.Lines(d.Input) {
			events := s.store.apply(parseOps(line)...)
			if d.HasArg("later") {
				s.held = append(s.held, events)
			} else {
				s.publish(events)
			}
		}
		revision, _ := s.store.Revision()
		return fmt.Sprintf("revision %d\n", revision)
	case "publish":
		for _, events := range s.held {
			s.publish(events)
		}
		s.held = nil
	case "compact":
		rev := 0
		fmt.Sscan(name, &rev)
		s.store.compact(int64(rev))
	case "stream":
		s.sinks[name] = newFakeSink(number("cap", 100))
		s.strs[name] = s.hub.NewStream(s.sinks[name])
	case "create":
		note(stream.Create(Request{
			Key: text("key"), End: text("end"), Start: int64(number("start", 0)), ID: int64(number("id", 0)),
			PrevKV: d.HasArg("prev"), ProgressNotify: d.HasArg("progress"), Fragment: d.HasArg("fragment"),
			NoPut: d.HasArg("noput"), NoDelete: d.HasArg("nodelete"),
		}))
	case "refuse":
		note(stream.Refuse("rpc error: code = PermissionDenied desc = etcdserver: permission denied"))
	case "cancel":
		note(stream.Cancel(int64(number("id", 0))))
	case "progress":
		note(stream.Progress())
	case "close":
		stream.Close()
	case "deliver":
		more, _, err := s.hub.Deliver(s.clock.Now())
		note(err)
		fmt.Fprintf(&out, "more: %v\n", more)
	case "catchup":
		more, err := s.hub.CatchUp(context.Background())
		note(err)
		fmt.Fprintf(&out, "more: %v\n", more)
	case "run":
		s.steps()
	case "advance":
		by, err := time.ParseDuration(name)
		if err != nil {
			t.Fatal(err)
		}
		s.clock.Advance(by)
		s.steps()
	case "recv":
		for _, r := range s.recv(name, number("n", 1000)) {
			out.WriteString(r + "\n")
		}
		if out.Len() == 0 {
			return "nothing\n"
		}
	case "reset":
		s.hub.Reset(s.store)
		s.held = nil
	case "state":
		h := s.hub
		first, last := h.recent.span()
		fmt.Fprintf(&out, "live %d, behind %d, of %d; delivered to %d; in memory from %d to %d; scans %d of %d events, lookups %d\n",
			h.live.count, h.behind.count, h.count, h.delivered, first, last, s.store.scans, s.store.scanned, s.store.lookups)
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	s.hub.check()
	return out.String()
}

func (s *script) publish(events []mvcc.Event) {
	if len(events) > 0 {
		s.hub.publish(events[len(events)-1].Rev.Main, events)
	}
}

// steps runs both steps till neither has work.
func (s *script) steps() {
	for more := true; more; {
		m1, _, err := s.hub.Deliver(s.clock.Now())
		if err != nil {
			s.t.Fatal(err)
		}
		m2, err := s.hub.CatchUp(context.Background())
		if err != nil {
			s.t.Fatal(err)
		}
		more = m1 || m2
	}
}

func (s *script) recv(name string, n int) (lines []string) {
	rs, ready := s.sinks[name].recv(n)
	for _, r := range rs {
		if r.Header.ClusterId != 7 || r.Header.MemberId != 8 || r.Header.RaftTerm != 3 {
			s.t.Fatalf("header %v", r.Header)
		}
		lines = append(lines, show(r))
	}
	if ready {
		s.strs[name].Ready()
	}
	return lines
}

// parseOps reads "a=1 -b": puts and deletes. "a=x*100" repeats x.
func parseOps(line string) (ops []op) {
	for _, f := range strings.Fields(line) {
		if key, ok := strings.CutPrefix(f, "-"); ok {
			ops = append(ops, op{key: []byte(key)})
			continue
		}
		key, value, _ := strings.Cut(f, "=")
		if unit, times, ok := strings.Cut(value, "*"); ok {
			n := 0
			fmt.Sscan(times, &n)
			value = strings.Repeat(unit, n)
		}
		ops = append(ops, op{[]byte(key), []byte(value)})
	}
	return ops
}

// check verifies what must hold between calls.
func (h *Hub) check() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.live.check()
	h.behind.check()
	count, parkedCount := 0, 0
	for s := range h.streams {
		n := 0
		for i, w := range s.order {
			if w.order != i || s.watchers[w.id] != w {
				broken("watcher %d is not in its place", w.id)
			}
			if w.cond == parked {
				n++
			} else if w.group.members[w.place] != w {
				broken("watcher %d is not in its group", w.id)
			}
			if w.cond == parked && !s.stalled {
				broken("watcher %d is parked, its stream has room", w.id)
			}
		}
		if n != s.parked || len(s.order) != len(s.watchers) {
			broken("%d watchers are parked, the stream counts %d", n, s.parked)
		}
		count += len(s.order)
		parkedCount += n
	}
	if count != h.count || count != h.live.count+h.behind.count+parkedCount {
		broken("%d watchers in streams, %d counted, %d live, %d behind, %d parked", count, h.count, h.live.count, h.behind.count, parkedCount)
	}
}
