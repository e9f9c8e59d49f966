package peer

import (
	"sync"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// bulkFrame is the largest entry or proposal message that shares a connection with heartbeats and votes. A batch of forwarded
// proposals, which consensus keeps to 256 KiB of data, fits with what is around each of them.
const bulkFrame = 512 << 10

// limits bound one lane of a queue. One message is taken whatever its bytes.
type limits struct{ messages, bytes int }

var (
	streamUrgent   = limits{4096, 16 << 20}
	streamBulk     = limits{4096, 64 << 20}
	pipelineUrgent = limits{64, 4 << 20}
	pipelineBulk   = limits{64, 64 << 20}
)

// bulk tells if a message carries data and so may wait behind other data.
func bulk(m *raftpb.Message) bool {
	return m.GetType() == raftpb.MsgApp || m.GetType() == raftpb.MsgProp
}

// memoryOf estimates from above the bytes of a message on the wire, without looking into entries.
func memoryOf(m *raftpb.Message) int {
	n := 128 + len(m.GetContext())
	for _, e := range m.GetEntries() {
		n += len(e.GetData()) + 24
	}
	if s := m.GetSnapshot(); s != nil {
		n += proto.Size(s)
	}
	return n
}

// lane is a bounded first-in first-out list.
type lane struct {
	limit limits
	items []*raftpb.Message
	bytes int
}

func (l *lane) put(m *raftpb.Message, size int) bool {
	if len(l.items) > 0 && (len(l.items) >= l.limit.messages || l.bytes+size > l.limit.bytes) {
		return false
	}
	l.items = append(l.items, m)
	l.bytes += size
	return true
}

// pop returns the first message, nil if there is none.
func (l *lane) pop() *raftpb.Message {
	if len(l.items) == 0 {
		return nil
	}
	m := l.items[0]
	l.items[0] = nil
	l.items = l.items[1:]
	l.bytes -= memoryOf(m)
	if len(l.items) == 0 {
		l.items = nil // frees a long list after a burst
	}
	return m
}

// queue holds what waits for one stream. Urgent messages leave first.
type queue struct {
	wake chan struct{} // capacity 1

	mu           sync.Mutex
	closed       bool
	urgent, bulk lane
}

func newQueue() *queue {
	return &queue{wake: make(chan struct{}, 1), urgent: lane{limit: streamUrgent}, bulk: lane{limit: streamBulk}}
}

// put reports false if the message does not fit or the queue is closed.
func (q *queue) put(m *raftpb.Message) bool {
	size := memoryOf(m)
	q.mu.Lock()
	l := &q.urgent
	if bulk(m) {
		l = &q.bulk
	}
	ok := !q.closed && l.put(m, size)
	q.mu.Unlock()
	if ok {
		select {
		case q.wake <- struct{}{}:
		default:
		}
	}
	return ok
}

// next returns a message, nil if none waits.
func (q *queue) next() *raftpb.Message {
	q.mu.Lock()
	defer q.mu.Unlock()
	if m := q.urgent.pop(); m != nil {
		return m
	}
	return q.bulk.pop()
}

// close empties the queue for good and returns how many messages were lost.
func (q *queue) close() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.urgent.items) + len(q.bulk.items)
	q.closed, q.urgent.items, q.bulk.items = true, nil, nil
	return n
}
