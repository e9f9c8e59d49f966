package peer

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"go.etcd.io/raft/v3/raftpb"
)

// Sizes of the buffer that a stream is read through. MsgApps that stand in it together are put in order.
const (
	msgAppBuffer  = 256 << 10
	messageBuffer = 64 << 10
	maxErrorBody  = 64 << 10
)

// readStream dials the peer's stream of kind k again and again, and reads it.
func (p *peer) readStream(k kind) {
	var dialedAt time.Time
	var said string // the last error logged, so that each is logged once
	for p.ctx.Err() == nil {
		if !dialedAt.IsZero() && !p.sleep(p.t.opts.RedialInterval-p.t.opts.Clock.Now().Sub(dialedAt)) {
			return
		}
		dialedAt = p.t.opts.Clock.Now()
		u := p.urls.pick()
		if u == "" {
			continue
		}
		err := p.readOnce(k, u)
		if p.ctx.Err() != nil {
			return
		}
		var refused *statusError
		if errors.As(err, &refused) || errors.Is(err, ErrIncompatible) || errors.Is(err, ErrClusterMismatch) || errors.Is(err, errFrame) {
			if text := err.Error(); text != said {
				said = text
				p.t.opts.Logger.Warn("a peer's stream cannot be read", "member", p.name, "stream", k.String(), "url", u, "error", err)
			}
		} else if err == nil {
			said = ""
		}
	}
}

// sleep waits for d by the transport's clock; it reports false if the peer is dropped meanwhile.
func (p *peer) sleep(d time.Duration) bool { return sleep(p.ctx, p.t.opts.Clock, d) }

// sleep waits for d; it reports false if ctx ends before.
func sleep(ctx context.Context, c clock.Clock, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := c.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-ctx.Done():
		return false
	}
}

// statusError is an answer that is not what was hoped for.
type statusError struct {
	status int
	body   string
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d: %s", e.status, e.body) }

// answerError makes an error of an answer, and reads it.
func answerError(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	err := &statusError{resp.StatusCode, strings.TrimSuffix(string(body), "\n")}
	if resp.StatusCode == http.StatusPreconditionFailed {
		for _, known := range []error{ErrIncompatible, ErrClusterMismatch} {
			if err.body == known.Error() {
				return fmt.Errorf("the peer answers: %w", known)
			}
		}
	}
	return err
}

// readOnce dials one stream and reads it to its end. It returns nil if the stream stood and ended in good order.
func (p *peer) readOnce(k kind, u string) error {
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	p.mu.Lock()
	p.dialed[k] = dialed{u, cancel} // from now on a change of URLs ends it
	p.mu.Unlock()
	body, err := p.dialStream(ctx, k, u)
	if err != nil {
		if ctx.Err() == nil {
			p.urls.failed(u)
			p.activity.set(false, err)
		}
		return err
	}
	defer body.Close()
	p.activity.stands("its " + k.String() + " stream stands")
	defer p.activity.fell()
	if k == msgAppKind {
		err = p.readMsgApps(bufio.NewReaderSize(body, msgAppBuffer))
	} else {
		err = p.readMessages(bufio.NewReaderSize(body, messageBuffer))
	}
	if ctx.Err() != nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // the next dial tells whether the peer is gone
	}
	p.receivedFailures.Inc()
	p.activity.set(false, err)
	return err
}

// dialStream sends the GET. The time until the answer's headers is bounded by that of a single read.
func (p *peer) dialStream(ctx context.Context, k kind, u string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target(u, "/raft/stream/"+k.String()+"/"+p.local), nil)
	if err != nil {
		return nil, err
	}
	req.Header = p.t.headers.Clone()
	req.Header.Set(toHeader, p.name)
	resp, err := p.t.streamClient.Do(req)
	if err != nil {
		return nil, err
	}
	p.heard(resp.Header)
	switch resp.StatusCode {
	case http.StatusOK:
		err = p.t.checkStreamVersion(resp.Header)
		if c := resp.Header.Get(clusterHeader); err == nil && c != "" && c != hexID(p.t.opts.ClusterID) {
			err = fmt.Errorf("the peer is of cluster %s, this is %x: %w", c, p.t.opts.ClusterID, ErrClusterMismatch)
		}
		if err == nil {
			return resp.Body, nil
		}
	case http.StatusGone:
		err = p.t.sawRemoval(p, resp.Header, resp.StatusCode)
	default:
		err = answerError(resp)
	}
	resp.Body.Close()
	return nil, err
}

func (p *peer) readMessages(r *bufio.Reader) error {
	d := &messageDecoder{frameReader{r: r}}
	for {
		m, err := d.decode()
		p.receivedBytes.Add(float64(d.take()))
		if err != nil {
			return err
		}
		if m != nil {
			p.receive(m)
		}
	}
}

// readMsgApps hands on MsgApps. Those that have arrived together are sorted: leaders of etcd 3.7.0 and 3.7.1 send each batch backwards,
// and raft would refuse all but one of it.
func (p *peer) readMsgApps(r *bufio.Reader) error {
	d := &msgAppDecoder{frameReader: frameReader{r: r}, local: p.t.opts.MemberID, remote: p.id}
	var batch []*raftpb.Message
	for {
		m, err := d.decode()
		if m != nil {
			batch = append(batch, m)
		}
		if err == nil && len(batch) < streamBulk.messages {
			if waiting, _ := r.Peek(r.Buffered()); wholeMsgApp(waiting) {
				continue
			}
		}
		p.receivedBytes.Add(float64(d.take()))
		sortMsgApps(batch)
		for _, m := range batch {
			p.receive(m)
		}
		clear(batch)
		batch = batch[:0]
		if err != nil {
			return err
		}
	}
}

// sortMsgApps sorts each run of MsgApps of one term by index, then commit.
func sortMsgApps(msgs []*raftpb.Message) {
	for len(msgs) > 1 {
		n := 1
		for n < len(msgs) && msgs[n].GetTerm() == msgs[0].GetTerm() && msgs[n].GetType() == msgs[0].GetType() {
			n++
		}
		if msgs[0].GetType() == raftpb.MsgApp {
			slices.SortStableFunc(msgs[:n], func(a, b *raftpb.Message) int {
				return cmp.Or(cmp.Compare(a.GetIndex(), b.GetIndex()), cmp.Compare(a.GetCommit(), b.GetCommit()))
			})
		}
		msgs = msgs[n:]
	}
}

// receive hands on a message of a stream. What raft does not take is lost, as messages may be.
func (p *peer) receive(m *raftpb.Message) {
	err := errors.New("a snapshot comes by /raft/snapshot only")
	if m.GetType() != raftpb.MsgSnap {
		err = p.t.receive(m)
	}
	if err != nil {
		p.receivedFailures.Inc()
		p.t.opts.Logger.Debug("dropped a message", "member", p.name, "type", m.GetType(), "error", err)
	}
}
