package peer

import (
	"errors"
	"net/http"
	"sync"
	"time"
)

// writeChunk is how many bytes one write to a stream has, about: each gets WriteTimeout, and after each urgent messages go first.
const writeChunk = 256 << 10

// outgoing is a stream that a peer reads from us: the answer to its GET. The goroutine of the request writes it.
type outgoing struct {
	p     *peer
	kind  kind
	queue *queue
	ended chan struct{} // closed by end

	mu       sync.Mutex // covers all below
	over     bool       // end was called
	returned bool       // the request is over, control must not be used
	control  *http.ResponseController
}

// end stops the stream, also while a write waits for the peer. It may be called again.
func (o *outgoing) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return
	}
	o.over = true
	close(o.ended)
	if !o.returned {
		_ = o.control.SetWriteDeadline(time.Unix(1, 0))
	}
}

// deadline gives the next write its time, unless the stream was ended.
func (o *outgoing) deadline() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return errReplaced
	}
	return o.control.SetWriteDeadline(time.Now().Add(o.p.t.opts.WriteTimeout))
}

var errReplaced = errors.New("the stream was ended by this side")

// serveStream answers the GET of a member's stream until either side ends it. A newer GET takes the place of an older one.
func (p *peer) serveStream(k kind, w http.ResponseWriter, r *http.Request) {
	o := &outgoing{p: p, kind: k, queue: newQueue(), ended: make(chan struct{}), control: http.NewResponseController(w)}
	_ = o.control.SetReadDeadline(time.Time{}) // the peer has nothing more to say
	p.mu.Lock()
	if p.stopped {
		p.mu.Unlock()
		return
	}
	older := p.attached[k]
	p.attached[k] = o
	p.mu.Unlock()
	if older != nil {
		older.end()
	}
	err := o.write(w, r)
	p.mu.Lock()
	if p.attached[k] == o {
		p.attached[k] = nil
	}
	p.mu.Unlock()
	o.mu.Lock()
	o.returned = true
	o.mu.Unlock()
	waiting := o.queue.close()
	if err != nil && !errors.Is(err, errReplaced) {
		p.activity.set(false, err)
		p.lost()
	} else if waiting > 0 {
		p.lost()
	}
}

// write is the life of a stream. It returns nil if the peer hung up.
func (o *outgoing) write(w http.ResponseWriter, r *http.Request) error {
	var enc encoder = messageEncoder{}
	if o.kind == msgAppKind {
		enc = &msgAppEncoder{}
	}
	beat := o.p.t.opts.Clock.NewTicker(o.p.t.opts.ReadTimeout / 3)
	defer beat.Stop()
	w.WriteHeader(http.StatusOK)
	if err := o.flush(w, nil); err != nil {
		return err
	}
	o.p.activity.stands("it reads its " + o.kind.String() + " stream")
	defer o.p.activity.fell()
	var buf []byte
	heartbeat := func() error {
		b, err := enc.append(nil, nil)
		if err != nil {
			return err
		}
		return o.flush(w, b)
	}
	for {
		select { // before messages: the link heartbeat must leave also on a stream that is never idle
		case <-beat.C():
			if err := heartbeat(); err != nil {
				return err
			}
		case <-o.ended:
			return errReplaced
		case <-r.Context().Done():
			return nil
		default:
		}
		m := o.queue.next()
		if m == nil {
			select {
			case <-o.queue.wake:
			case <-beat.C():
				if err := heartbeat(); err != nil {
					return err
				}
			case <-o.ended:
				return errReplaced
			case <-r.Context().Done():
				return nil
			}
			continue
		}
		buf = buf[:0]
		for ; m != nil; m = o.queue.next() {
			b, err := enc.append(buf, m)
			if err != nil { // a message that protobuf cannot write; raft makes none
				o.p.t.opts.Logger.Error("dropped a message that cannot be encoded", "type", m.GetType(), "member", o.p.name, "error", err)
				o.p.lost()
			}
			if buf = b; len(buf) >= writeChunk {
				break
			}
		}
		if err := o.flush(w, buf); err != nil {
			return err
		}
		if cap(buf) > 4*writeChunk {
			buf = nil
		}
	}
}

// flush writes b, each part in its time, and sees that it leaves.
func (o *outgoing) flush(w http.ResponseWriter, b []byte) error {
	o.p.sentBytes.Add(float64(len(b)))
	for len(b) > writeChunk {
		if err := o.deadline(); err != nil {
			return err
		}
		if _, err := w.Write(b[:writeChunk]); err != nil {
			return o.because(err)
		}
		b = b[writeChunk:]
	}
	if err := o.deadline(); err != nil {
		return err
	}
	if _, err := w.Write(b); err != nil {
		return o.because(err)
	}
	return o.because(o.control.Flush())
}

// because tells a write that end broke off from one that failed.
func (o *outgoing) because(err error) error {
	select {
	case <-o.ended:
		if err != nil {
			return errReplaced
		}
	default:
	}
	return err
}
