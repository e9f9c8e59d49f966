package peer

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

const (
	bulkWorkers   = 4
	urgentWorkers = 1
)

// pipeline sends single messages by POST /raft: to a remote, and to a member whose stream does not stand. Its workers live
// while there is work; one is for urgent messages alone.
type pipeline struct {
	p *peer

	mu                         sync.Mutex
	closed                     bool
	urgent, bulk               lane
	urgentRunning, bulkRunning int
}

// put reports false if the message does not fit.
func (l *pipeline) put(m *raftpb.Message) bool {
	size := memoryOf(m)
	l.mu.Lock()
	defer l.mu.Unlock()
	lane, running, most := &l.urgent, &l.urgentRunning, urgentWorkers
	if bulk(m) {
		lane, running, most = &l.bulk, &l.bulkRunning, bulkWorkers
	}
	if l.closed || !lane.put(m, size) {
		return false
	}
	if *running < most && l.p.t.run(func() { l.work(lane, running) }) {
		*running++
	}
	return true
}

func (l *pipeline) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.urgent.items, l.bulk.items = true, nil, nil
}

// work posts until its lane is empty.
func (l *pipeline) work(lane *lane, running *int) {
	for {
		l.mu.Lock()
		m := lane.pop()
		if m == nil {
			*running--
		}
		l.mu.Unlock()
		if m == nil {
			return
		}
		l.p.post(m)
	}
}

// post sends one message and reports how it went.
func (p *peer) post(m *raftpb.Message) {
	u := p.urls.pick()
	err := p.postTo(u, m)
	if err == nil {
		p.activity.set(true, "it took a message")
		return
	}
	if p.ctx.Err() != nil {
		return
	}
	p.urls.failed(u)
	p.activity.failed(err)
	p.lost()
}

func (p *peer) postTo(u string, m *raftpb.Message) error {
	if u == "" {
		return fmt.Errorf("member %s has no usable peer URL", p.name)
	}
	body, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	// Time for a link of 64 KiB/s; WriteTimeout ends what does not move at all.
	ctx, cancel := context.WithTimeout(p.ctx, p.t.opts.RequestTimeout+time.Duration(len(body)>>16)*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target(u, "/raft"), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header = p.t.headers.Clone()
	req.Header.Set("Content-Type", "application/protobuf")
	resp, err := p.t.requestClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	p.heard(resp.Header)
	switch resp.StatusCode {
	case http.StatusNoContent:
		p.sentBytes.Add(float64(len(body)))
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxErrorBody))
		return nil
	case http.StatusForbidden:
		return p.t.sawRemoval(p, resp.Header, resp.StatusCode)
	}
	return answerError(resp)
}
