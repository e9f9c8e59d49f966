package peer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	"go.etcd.io/raft/v3/raftpb"
)

const (
	maxSnapshotQueue  = 16
	snapshotsAtOnce   = 2
	nativeSnapshot    = "native"
	nativeLength      = 1 << 63 // set in the length of the native form's message: etcd refuses the length before it stores anything
	snapshotMediaType = "application/octet-stream"
)

// snapshotSender sends snapshots to members, one at a time to each.
type snapshotSender struct {
	t *Transport

	mu      sync.Mutex // covers all below
	queue   []snapshotJob
	busy    map[uint64]bool // members in queue or being sent to
	running int
}

type snapshotJob struct {
	p *peer
	m *raftpb.Message
}

// put queues a snapshot. While one for the same member waits or is sent, another is dropped silently: its end will be
// reported, and raft asks again if it needs more.
func (s *snapshotSender) put(p *peer, m *raftpb.Message) {
	s.mu.Lock()
	if s.busy[p.id] {
		s.mu.Unlock()
		return
	}
	ok := len(s.queue) < maxSnapshotQueue && s.t.opts.Snapshots != nil
	if ok && s.running < snapshotsAtOnce {
		if ok = s.t.run(s.work); ok {
			s.running++
		}
	}
	if ok {
		s.busy[p.id] = true
		s.queue = append(s.queue, snapshotJob{p, m})
	}
	s.mu.Unlock()
	if !ok {
		p.lostSnapshot()
	}
}

func (s *snapshotSender) work() {
	for {
		s.mu.Lock()
		if len(s.queue) == 0 {
			s.running--
			s.mu.Unlock()
			return
		}
		job := s.queue[0]
		s.queue = s.queue[1:]
		s.mu.Unlock()
		err := job.p.sendSnapshot(job.m)
		s.mu.Lock()
		delete(s.busy, job.p.id)
		s.mu.Unlock()
		if err == nil {
			s.t.opts.Raft.ReportSnapshot(job.p.id, true)
			continue
		}
		if job.p.ctx.Err() == nil {
			s.t.opts.Logger.Warn("a snapshot could not be sent", "member", job.p.name, "error", err)
		}
		job.p.lostSnapshot()
	}
}

func (p *peer) lostSnapshot() {
	p.lost()
	p.t.opts.Raft.ReportSnapshot(p.id, false)
}

// sendSnapshot opens a snapshot and sends it whole.
func (p *peer) sendSnapshot(m *raftpb.Message) (err error) {
	metrics, began := p.t.opts.Metrics, p.t.opts.Clock.Now()
	metrics.SnapshotSending.WithLabelValues(p.name).Inc()
	defer func() {
		metrics.SnapshotSending.WithLabelValues(p.name).Dec()
		if err != nil {
			metrics.SnapshotSendFailures.WithLabelValues(p.name).Inc()
			return
		}
		metrics.SnapshotSent.WithLabelValues(p.name).Inc()
		metrics.SnapshotSendDuration.WithLabelValues(p.name).Observe(p.t.opts.Clock.Now().Sub(began).Seconds())
	}()
	u := p.urls.pick()
	if u == "" {
		return fmt.Errorf("member %s has no usable peer URL", p.name)
	}
	native := p.native.Load() && p.form.Load()
	out, err := p.t.opts.Snapshots.Open(p.ctx, m, native)
	if err != nil {
		return fmt.Errorf("open a snapshot: %w", err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	msg := out.Message()
	if msg.GetType() != raftpb.MsgSnap || msg.GetTo() != p.id {
		return fmt.Errorf("the opened snapshot has a %v to %x, not a MsgSnap to %x", msg.GetType(), msg.GetTo(), p.id)
	}
	head, err := appendMessage(nil, msg)
	if err != nil {
		return err
	}
	if len(head) > maxSnapshotMessage {
		return fmt.Errorf("the message of the snapshot has %d bytes, more than %d", len(head), maxSnapshotMessage)
	}
	if native {
		binary.BigEndian.PutUint64(head, binary.BigEndian.Uint64(head)|nativeLength)
	}
	err = p.upload(u, head, out, native)
	if err != nil && p.ctx.Err() == nil {
		p.urls.failed(u)
		p.activity.set(false, err)
	}
	return err
}

// upload posts head and then what body writes. It waits for the answer as long as it takes: the receiver stores the snapshot first.
func (p *peer) upload(u string, head []byte, body Outgoing, native bool) error {
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	pr, pw := io.Pipe()
	written := make(chan error, 1)
	if !p.t.run(func() {
		n, err := body.WriteTo(pw)
		pw.CloseWithError(err) // nil ends the body
		p.sentBytes.Add(float64(n))
		written <- err
	}) {
		return context.Canceled
	}
	defer func() { // body must not be closed while it is written
		pr.Close()
		<-written
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target(u, "/raft/snapshot"), struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), pr), pr})
	if err != nil {
		return err
	}
	req.Header = p.t.headers.Clone()
	req.Header.Set("Content-Type", snapshotMediaType)
	if native {
		req.Header.Set(snapshotHeader, nativeSnapshot)
	}
	resp, err := p.t.snapshotClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	p.heard(resp.Header)
	switch resp.StatusCode {
	case http.StatusNoContent:
		p.activity.set(true, "it took a snapshot")
		return nil
	case http.StatusForbidden:
		return p.t.sawRemoval(p, resp.Header, resp.StatusCode)
	}
	stop := p.t.opts.Clock.NewTimer(p.t.opts.ReadTimeout) // for the error's text
	defer stop.Stop()
	answered := make(chan error, 1)
	go func() { answered <- answerError(resp) }()
	select {
	case err = <-answered:
		return err
	case <-stop.C():
		return &statusError{resp.StatusCode, "(the text did not come)"}
	}
}

// serveSnapshot is POST /raft/snapshot: store the state, then give raft the message, then say so.
func (t *Transport) serveSnapshot(w http.ResponseWriter, r *http.Request) {
	name := r.Header.Get(fromHeader)
	m, native, err := readSnapshotMessage(r.Body)
	switch {
	case err != nil:
		answer(w, http.StatusBadRequest, fmt.Sprintf("failed to decode raft message (%v)", err))
		return
	case native != (r.Header.Get(snapshotHeader) == nativeSnapshot):
		answer(w, http.StatusBadRequest, "failed to decode raft message (length and header "+snapshotHeader+" do not agree on the form)")
		return
	case m.GetType() != raftpb.MsgSnap || m.GetSnapshot().GetMetadata() == nil:
		answer(w, http.StatusBadRequest, "wrong raft message type")
		return
	}
	name = hexID(m.GetFrom()) // the header may say anything, and this becomes a label
	if err := t.check(m); err != nil {
		answer(w, http.StatusInternalServerError, fmt.Sprintf("failed to process raft message (%v)", err))
		return
	}
	if t.receiver(m.GetFrom()) == nil {
		name = "unknown"
	}
	metrics, began := t.opts.Metrics, t.opts.Clock.Now()
	fail := func(text string, err error) {
		metrics.SnapshotReceiveFailures.WithLabelValues(name).Inc()
		answer(w, http.StatusInternalServerError, fmt.Sprintf("%s (%v)", text, err))
	}
	select {
	case t.receiving <- struct{}{}:
		defer func() { <-t.receiving }()
	default:
		fail("failed to save KV snapshot", errors.New("another snapshot is being received"))
		return
	}
	if t.opts.Snapshots == nil {
		fail("failed to save KV snapshot", errors.New("this member takes none"))
		return
	}
	metrics.SnapshotReceiving.WithLabelValues(name).Inc()
	defer metrics.SnapshotReceiving.WithLabelValues(name).Dec()
	body := &countingReader{r: r.Body}
	err = t.opts.Snapshots.Receive(r.Context(), m, native, body)
	metrics.ReceivedBytes.WithLabelValues(name).Add(float64(body.n))
	if err != nil {
		t.opts.Logger.Warn("a snapshot could not be received", "member", name, "index", m.GetSnapshot().GetMetadata().GetIndex(), "error", err)
		fail("failed to save KV snapshot", err)
		return
	}
	if err := t.opts.Raft.Receive(m); err != nil {
		t.opts.Logger.Warn("raft did not take a snapshot", "member", name, "index", m.GetSnapshot().GetMetadata().GetIndex(), "error", err)
		fail("failed to process raft message", err)
		return
	}
	metrics.SnapshotReceived.WithLabelValues(name).Inc()
	metrics.SnapshotReceiveDuration.WithLabelValues(name).Observe(t.opts.Clock.Now().Sub(began).Seconds())
	w.WriteHeader(http.StatusNoContent)
}

// readSnapshotMessage reads the message before a snapshot's body, and tells if its length marks the native form.
func readSnapshotMessage(r io.Reader) (*raftpb.Message, bool, error) {
	var length [8]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, false, err
	}
	native := length[0]&0x80 != 0
	length[0] &= 0x7f
	m := &raftpb.Message{}
	f := frameReader{r: io.MultiReader(bytes.NewReader(length[:]), r)}
	err := f.message(m, maxSnapshotMessage)
	return m, native, noEOF(err)
}

type countingReader struct {
	r io.Reader
	n int64
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}
