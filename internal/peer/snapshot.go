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
	"sync/atomic"
	"time"

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
	queue   []*snapshotJob
	jobs    map[uint64]*snapshotJob  // by member: in queue, being sent, or failed a moment ago
	pauses  map[uint64]time.Duration // by member: after the last one, which failed
	running int                      // have begun and have not written all

	newest atomic.Uint64 // the highest term that this member has sent a message of
}

type snapshotJob struct {
	p   *peer
	m   *raftpb.Message
	ctx context.Context // ends with the peer, and with the term
	end context.CancelCauseFunc
}

// put queues a snapshot. While one for the same member waits or is sent, another is dropped silently: its end will be
// reported, and raft asks again if it needs more.
func (s *snapshotSender) put(p *peer, m *raftpb.Message) {
	s.mu.Lock()
	if s.jobs[p.id] != nil {
		s.mu.Unlock()
		return
	}
	ok := len(s.queue) < maxSnapshotQueue && s.t.opts.Snapshots != nil
	if ok {
		job := &snapshotJob{p: p, m: m}
		job.ctx, job.end = context.WithCancelCause(p.ctx)
		s.jobs[p.id] = job
		s.queue = append(s.queue, job)
	}
	s.mu.Unlock()
	if !ok {
		p.lostSnapshot()
		return
	}
	s.begin()
}

// errDeposed ends the sending of a snapshot.
var errDeposed = errors.New("this member has heard of a later term")

// saw ends what is sent in the name of an earlier term than that of m, which this member sends: raft there would not take it, and the
// leader of the later term sends its own.
func (s *snapshotSender) saw(m *raftpb.Message) {
	term := m.GetTerm()
	if t := m.GetType(); term <= s.newest.Load() || t == raftpb.MsgPreVote || t == raftpb.MsgPreVoteResp { // whose term may never come
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.newest.Store(max(term, s.newest.Load()))
	for _, job := range s.jobs {
		if job.m.GetTerm() < term {
			job.end(errDeposed)
		}
	}
}

// begin starts what waits, as much as may run at once.
func (s *snapshotSender) begin() {
	for {
		s.mu.Lock()
		if len(s.queue) == 0 || s.running == snapshotsAtOnce {
			s.mu.Unlock()
			return
		}
		job := s.queue[0]
		s.queue = s.queue[1:]
		s.running++
		s.mu.Unlock()
		written := sync.OnceFunc(func() {
			s.mu.Lock()
			s.running--
			s.mu.Unlock()
			s.begin()
		})
		if !s.t.run(func() { s.send(job, written) }) {
			s.done(job, context.Canceled)
			written()
		}
	}
}

// send sends one and reports how it went. A failure is reported only after a pause: raft asks again at once, and each one takes work
// to prepare.
func (s *snapshotSender) send(job *snapshotJob, written func()) {
	err := job.p.sendSnapshot(job.ctx, job.m, written)
	written()
	if job.ctx.Err() == nil && err != nil {
		pause := s.pause(job.p.id)
		s.t.opts.Logger.Warn("a snapshot could not be sent", "member", job.p.name, "error", err, "pause", pause.String())
		sleep(job.ctx, s.t.opts.Clock, pause)
	}
	s.done(job, err)
}

// pause returns how long the member is left alone after another failure.
func (s *snapshotSender) pause(member uint64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.t.opts.SnapshotPause
	s.pauses[member] = min(max(first, 2*s.pauses[member]), 30*first)
	return s.pauses[member]
}

// done lets the next one for the same member come, and reports the end of this one.
func (s *snapshotSender) done(job *snapshotJob, err error) {
	s.mu.Lock()
	delete(s.jobs, job.p.id)
	if err == nil || job.ctx.Err() != nil {
		delete(s.pauses, job.p.id)
	}
	s.mu.Unlock()
	job.end(nil)
	if err == nil {
		s.t.opts.Raft.ReportSnapshot(job.p.id, true)
	} else {
		job.p.lostSnapshot()
	}
}

func (p *peer) lostSnapshot() {
	p.lost()
	p.t.opts.Raft.ReportSnapshot(p.id, false)
}

// sendSnapshot opens a snapshot and sends it whole. It calls written when the rest is only to wait for the answer.
func (p *peer) sendSnapshot(ctx context.Context, m *raftpb.Message, written func()) (err error) {
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
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	u := p.urls.pick()
	if u == "" {
		return fmt.Errorf("member %s has no usable peer URL", p.name)
	}
	native := p.native.Load() && p.form.Load()
	out, err := p.t.opts.Snapshots.Open(ctx, m, native)
	if err != nil {
		return fmt.Errorf("open a snapshot: %w", err)
	}
	closing := sync.OnceValue(out.Close)
	defer func() { err = errors.Join(err, closing()) }()
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
	err = p.upload(ctx, u, head, native, func(w io.Writer) (int64, error) {
		defer written()
		n, err := out.WriteTo(w)
		return n, errors.Join(err, closing())
	})
	if err != nil && ctx.Err() == nil {
		p.urls.failed(u)
		p.activity.failed(err)
	}
	return err
}

// upload posts head and then what body writes. It waits for the answer as long as it takes: the receiver stores the snapshot first.
func (p *peer) upload(ctx context.Context, u string, head []byte, native bool, body func(io.Writer) (int64, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pr, pw := io.Pipe()
	ended := make(chan struct{})
	if !p.t.run(func() {
		defer close(ended)
		n, err := body(pw)
		pw.CloseWithError(err) // nil ends the body
		p.sentBytes.Add(float64(n))
	}) {
		return context.Canceled
	}
	defer func() { // body must not be left alone
		pr.Close()
		<-ended
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

// receiving is the snapshot that comes in.
type receiving struct {
	mu    sync.Mutex // covers all below
	term  uint64     // of its message
	end   context.CancelCauseFunc
	ended chan struct{} // nil if none comes in
}

var (
	errReceiving  = errors.New("another snapshot is being received")
	errSuperseded = errors.New("a snapshot of a later term takes its place")
)

// begin lets a snapshot of the term come in, until the function it returns is called. One of an earlier term makes room: raft would not
// take it any more, and who sends it may hold on to it for long. end is called for a later one.
func (r *receiving) begin(ctx context.Context, term uint64, end context.CancelCauseFunc) (func(), error) {
	for {
		r.mu.Lock()
		before := r.ended
		switch {
		case before == nil:
			ended := make(chan struct{})
			r.term, r.end, r.ended = term, end, ended
			r.mu.Unlock()
			return func() {
				r.mu.Lock()
				defer r.mu.Unlock()
				r.ended = nil
				close(ended)
			}, nil
		case term <= r.term:
			r.mu.Unlock()
			return nil, errReceiving
		}
		r.end(errSuperseded)
		r.mu.Unlock()
		select {
		case <-before:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// serveSnapshot is POST /raft/snapshot: store the state, then give raft the message, then say so.
func (t *Transport) serveSnapshot(w http.ResponseWriter, r *http.Request) {
	share := t.bodies.share()
	defer share.release()
	m, native, err := readSnapshotMessage(share, r.Body)
	switch {
	case errors.Is(err, errBodies):
		t.answerBusy(w, r)
		return
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
	name := hexID(m.GetFrom()) // the header may say anything, and this becomes a label
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
	ctx, end := context.WithCancelCause(r.Context())
	defer end(nil)
	ended, err := t.receiving.begin(ctx, m.GetTerm(), end)
	if err != nil {
		fail("failed to save KV snapshot", err)
		return
	}
	defer ended()
	share.release() // there is one such message at a time, and it stays for as long as the snapshot takes to come
	if body, ok := r.Body.(*patientBody); ok {
		defer context.AfterFunc(ctx, func() { body.end(context.Cause(ctx)) })()
	}
	if t.opts.Snapshots == nil {
		fail("failed to save KV snapshot", errors.New("this member takes none"))
		return
	}
	metrics.SnapshotReceiving.WithLabelValues(name).Inc()
	defer metrics.SnapshotReceiving.WithLabelValues(name).Dec()
	body := &countingReader{r: r.Body}
	drop, err := t.opts.Snapshots.Receive(ctx, m, native, body)
	metrics.ReceivedBytes.WithLabelValues(name).Add(float64(body.n))
	if err != nil {
		t.opts.Logger.Warn("a snapshot could not be received", "member", name, "index", m.GetSnapshot().GetMetadata().GetIndex(), "error", err)
		fail("failed to save KV snapshot", err)
		return
	}
	if err := t.opts.Raft.Receive(m); err != nil {
		t.opts.Logger.Warn("raft did not take a snapshot", "member", name, "index", m.GetSnapshot().GetMetadata().GetIndex(), "error", err)
		fail("failed to process raft message", errors.Join(err, drop()))
		return
	}
	metrics.SnapshotReceived.WithLabelValues(name).Inc()
	metrics.SnapshotReceiveDuration.WithLabelValues(name).Observe(t.opts.Clock.Now().Sub(began).Seconds())
	w.WriteHeader(http.StatusNoContent)
}

// readSnapshotMessage reads the message before a snapshot's body, and tells if its length marks the native form.
func readSnapshotMessage(share *share, r io.Reader) (*raftpb.Message, bool, error) {
	var length [8]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, false, err
	}
	native := length[0]&0x80 != 0
	size := binary.BigEndian.Uint64(length[:]) &^ nativeLength
	if size > maxSnapshotMessage {
		return nil, native, fmt.Errorf("a length of %d, more than %d: %w", size, maxSnapshotMessage, errFrame)
	}
	b, err := share.read(io.LimitReader(r, int64(size)), int64(size))
	if err == nil && len(b) < int(size) {
		err = io.ErrUnexpectedEOF
	}
	m := &raftpb.Message{}
	if err == nil {
		err = share.unmarshal(b, m)
	}
	return m, native, err
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
