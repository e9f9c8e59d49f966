package sim

import (
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/watch"
)

// watchClient follows a range of keys, at one member after the other, and goes on
// after the last revision that it saw.
type watchClient struct {
	w        *world
	id       int
	from, to string // the range
	at       *member
	life     int
	stream   *watch.Stream
	inbox    []*pb.WatchResponse
	room     int
	looking  bool
	next     int64 // the revision that it needs next
}

func newWatchClient(w *world, id int) *watchClient {
	c := &watchClient{w: w, id: id, from: "a", to: "z", next: 2}
	if id > 0 {
		c.from, c.to = "b", "d"
	}
	return c
}

// connect begins a stream at some member that is up.
func (c *watchClient) connect() {
	w := c.w
	if c.stream != nil {
		return
	}
	m := w.members[w.rng.IntN(len(w.members))]
	if !m.up || w.now.Before(m.paused) || !m.belongs() {
		w.after(w.upTo(10*time.Millisecond, 200*time.Millisecond), c.connect)
		return
	}
	c.at, c.life, c.inbox, c.room = m, m.life, nil, 1+w.rng.IntN(8)
	c.stream = m.hub.NewStream(c)
	w.note("watcher %d begins at %d from revision %d", c.id, m.id, c.next)
	m.must(c.stream.Create(watch.Request{Key: []byte(c.from), End: []byte(c.to), Start: c.next, ProgressNotify: true, PrevKV: w.chance(0.3)}))
	m.deliverSoon()
	w.cover["watch"]++
	if w.chance(0.3) {
		c.leaveAfter(w.about(time.Second))
	}
}

// leaveAfter ends the present stream some time later.
func (c *watchClient) leaveAfter(d time.Duration) {
	stream := c.stream
	c.at.after(d, func() {
		if c.stream == stream {
			c.leave()
		}
	})
}

// belongs says whether a member knows itself as one of the cluster.
func (m *member) belongs() bool {
	_, members, _ := m.machine().Tables()
	return members.Member(m.id) != nil
}

// leave ends the stream, and begins another elsewhere.
func (c *watchClient) leave() {
	c.stream.Close()
	c.stream = nil
	c.connectLater()
}

// connectLater lets some time go by, perhaps so much that there is a lot to catch
// up on.
func (c *watchClient) connectLater() {
	d := c.w.upTo(time.Millisecond, 100*time.Millisecond)
	if c.w.chance(0.2) {
		d = c.w.about(2 * time.Second)
	}
	c.w.after(d, c.connect)
}

// gone says that a member died.
func (c *watchClient) gone(m *member) {
	if c.stream != nil && c.at == m {
		c.stream = nil // what was under way is lost
		c.connectLater()
	}
}

// Send implements watch.Sink.
func (c *watchClient) Send(rs []watch.Response) bool {
	if len(c.inbox) > 0 && len(c.inbox)+len(rs) > c.room {
		c.w.cover["watcher full"]++
		return false
	}
	for _, r := range rs {
		out := &pb.WatchResponse{}
		if err := proto.Unmarshal(r.AppendTo(nil), out); err != nil {
			c.w.fail("watcher %d: %w", c.id, err)
		}
		c.inbox = append(c.inbox, out)
	}
	return true
}

// look is called after a member's hub may have sent something.
func (c *watchClient) look(m *member) {
	if c.stream == nil || c.at != m || len(c.inbox) == 0 || c.looking {
		return
	}
	c.looking = true
	stream := c.stream
	c.w.after(c.w.upTo(100*time.Microsecond, 20*time.Millisecond), func() {
		c.looking = false
		if c.stream != stream {
			return
		}
		inbox := c.inbox
		c.inbox = nil
		for _, r := range inbox {
			if c.stream == stream {
				c.take(r)
			}
		}
		if c.stream == stream {
			stream.Ready()
			m.deliverSoon()
			c.look(m)
		}
	})
}

// take checks one response against what happened.
func (c *watchClient) take(r *pb.WatchResponse) {
	w := c.w
	if r.GetCanceled() {
		w.note("watcher %d is cancelled, compacted at %d", c.id, r.GetCompactRevision())
		if r.GetCompactRevision() <= c.next {
			w.fail("watcher %d needs revision %d, and is cancelled for the compaction at %d: %s",
				c.id, c.next, r.GetCompactRevision(), r.GetCancelReason())
			return
		}
		w.cover["watcher compacted"]++
		c.next = r.GetCompactRevision()
		c.leave()
		return
	}
	if r.GetCreated() {
		return
	}
	if len(r.GetEvents()) == 0 { // W3
		w.cover["progress notice"]++
		w.note("watcher %d: progress to %d", c.id, r.GetHeader().GetRevision())
		c.skipTo(r.GetHeader().GetRevision()+1, "is told that there is nothing more")
		return
	}
	var rev int64
	var told []eventSeen
	flush := func() {
		if rev == 0 {
			return
		}
		c.skipTo(rev, "is told of")
		if want := c.events(rev); !slices.Equal(told, want) {
			w.fail("watcher %d of %s to %s at member %d is told of revision %d\n%v, it was\n%v", c.id, c.from, c.to, c.at.id, rev, told, want)
		}
		c.next = rev + 1
		w.cover["revision watched"]++
	}
	for _, e := range r.GetEvents() {
		if at := e.GetKv().GetModRevision(); at != rev {
			flush()
			if rev = at; rev < c.next {
				w.fail("watcher %d at member %d is told of revision %d, it needs %d: once more or out of order", c.id, c.at.id, rev, c.next)
				return
			}
			told = nil
		}
		kv, err := proto.MarshalOptions{Deterministic: true}.Marshal(e.GetKv())
		if err != nil {
			w.fail("watcher %d: %w", c.id, err)
		}
		told = append(told, eventSeen{e.GetType() == mvccpb.Event_DELETE, string(kv)})
	}
	flush()
	w.note("watcher %d at %d: %d events to revision %d", c.id, c.at.id, len(r.GetEvents()), rev)
}

// skipTo checks that nothing of interest lies between what was seen and rev.
func (c *watchClient) skipTo(rev int64, doing string) {
	for ; c.next < rev; c.next++ {
		if missed := c.events(c.next); len(missed) > 0 {
			c.w.fail("watcher %d of %s to %s at member %d %s revision %d and missed %d: %v", c.id, c.from, c.to, c.at.id, doing, rev, c.next, missed)
			return
		}
	}
}

// events are those of a revision that it wants, as they were told first.
func (c *watchClient) events(rev int64) []eventSeen {
	var out []eventSeen
	for _, e := range c.w.check.events[rev] {
		if key := e.key(); key >= c.from && key < c.to {
			out = append(out, e)
		}
	}
	return out
}

// caughtUp says that it has seen all there is, if the clients have stopped.
func (c *watchClient) caughtUp() bool {
	if c.stream == nil {
		return false
	}
	if !slices.Contains(c.w.present(), c.at) {
		c.leave()
		return false
	}
	for rev := c.next; rev <= c.w.check.revision; rev++ {
		if len(c.events(rev)) > 0 {
			return false
		}
	}
	return true
}

// stoppedClock is a member's clock for those who only look at it.
type stoppedClock struct{ m *member }

func (c stoppedClock) Now() time.Time { return c.m.now() }

// NewTimer implements clock.Clock; nothing here waits for one.
func (stoppedClock) NewTimer(time.Duration) clock.Timer { panic("sim: a timer in a step function") }

// NewTicker implements clock.Clock.
func (stoppedClock) NewTicker(time.Duration) clock.Ticker { panic("sim: a ticker in a step function") }
