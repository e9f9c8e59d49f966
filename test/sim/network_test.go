package sim

import (
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// network carries messages between members. Each direction of a link may be
// cut or slow on its own.
type network struct {
	w       *world
	blocked map[link]bool
	slow    map[link]time.Duration
	last    map[link]time.Time // when the last message of a link arrives
	since   map[link]time.Time // when a link was last cut or healed
}

type link struct{ from, to uint64 }

func (n *network) heal() {
	for _, a := range n.w.members {
		for _, b := range n.w.members {
			if l := (link{a.id, b.id}); n.blocked[l] {
				n.since[l] = n.w.now
			}
		}
	}
	clear(n.blocked)
	clear(n.slow)
}

func (n *network) cut(from, to *member) {
	if l := (link{from.id, to.id}); from != to {
		n.blocked[l], n.since[l] = true, n.w.now
	}
}

// send puts messages on the way.
func (n *network) send(from *member, msgs []*raftpb.Message) {
	w := n.w
	for _, m := range msgs {
		to := w.member(m.GetTo())
		if to == nil {
			continue
		}
		if m.GetType() == raftpb.MsgSnap {
			from.sendSnapshot(to, m)
			continue
		}
		l := link{from.id, to.id}
		if n.blocked[l] || !w.quiet && w.chance(w.plan.drop) {
			w.cover["message lost"]++
			if w.chance(0.3) {
				from.in.Unreachable = append(from.in.Unreachable, to.id)
				from.wake()
			}
			continue
		}
		copies := 1
		// A forwarded proposal that arrives twice is two proposals; no stream delivers twice.
		if !w.quiet && m.GetType() != raftpb.MsgProp && w.chance(w.plan.drop/4) {
			copies = 2
			w.cover["message duplicated"]++
		}
		for range copies {
			at := w.now.Add(n.delay(l))
			if !w.plan.shuffle {
				at = maxTime(at, n.last[l])
				n.last[l] = at
			}
			// A copy, as over a wire: who sent it may be gone or changed when it arrives.
			m := proto.CloneOf(m)
			w.at(at, func() { n.deliver(l, to, m) })
		}
	}
}

func (n *network) delay(l link) time.Duration {
	w := n.w
	d := w.upTo(100*time.Microsecond, w.plan.delay) + n.slow[l]
	if !w.quiet && w.chance(0.01) {
		d *= 20
	}
	return d
}

func (n *network) deliver(l link, to *member, m *raftpb.Message) {
	w := n.w
	if n.blocked[l] {
		w.cover["message cut off"]++
		return
	}
	if !to.up {
		return
	}
	say := w.note
	if t := m.GetType(); t == raftpb.MsgHeartbeat || t == raftpb.MsgHeartbeatResp {
		say = w.whisper
	}
	say("%d<-%d %v term %d index %d/%d commit %d entries %d reject %v", l.to, l.from, m.GetType(), m.GetTerm(), m.GetIndex(), m.GetLogTerm(),
		m.GetCommit(), len(m.GetEntries()), m.GetReject())
	to.receive(m)
}

// receive takes a message, unless it is from a member that was removed.
func (m *member) receive(msg *raftpb.Message) {
	if _, members, _ := m.machine().Tables(); members.Removed(msg.GetFrom()) {
		m.w.cover["message of a removed member"]++
		return
	}
	m.in.Received = append(m.in.Received, msg)
	m.wake()
}

// Send implements consensus.Transport.
func (m *member) Send(msgs []*raftpb.Message) { m.w.net.send(m, msgs) }

// ActiveSince implements consensus.Transport.
func (m *member) ActiveSince(id uint64) time.Time {
	w := m.w
	to := w.member(id)
	there, back := link{m.id, id}, link{id, m.id}
	if to == nil || !to.up || w.net.blocked[there] || w.net.blocked[back] {
		return time.Time{}
	}
	since := maxTime(to.born, m.born)
	return m.clock(maxTime(since, maxTime(w.net.since[there], w.net.since[back])))
}
