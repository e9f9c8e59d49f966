package fault

import (
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

const (
	chunkBytes  = 32 << 10
	chunksAhead = 256 // on their way in one direction of a connection

	// A lost packet costs a connection the time until it is sent again.
	resendAfter = 200 * time.Millisecond
)

// weather is what a proxy does to connections. The zero value is a good day.
type weather struct {
	delay, jitter time.Duration
	lossPercent   int // chunks that come late, as if lost and sent again
	resetPerMille int // chunks at which the connection breaks
	stalled       bool
}

// proxy forwards connections to an address through its weather.
type proxy struct {
	target   string
	listener net.Listener
	work     sync.WaitGroup

	mu     sync.Mutex
	now    weather
	change chan struct{} // closed when now changes
	conns  map[net.Conn]bool
	closed bool
}

func newProxy(target string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{target: target, listener: l, change: make(chan struct{}), conns: make(map[net.Conn]bool)}
	p.work.Go(p.accept)
	return p, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

// set changes the weather.
func (p *proxy) set(w weather) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now = w
	close(p.change)
	p.change = make(chan struct{})
}

// reset breaks all connections.
func (p *proxy) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		abort(c)
	}
}

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.listener.Close()
	p.set(weather{})
	p.reset()
	p.work.Wait()
}

func (p *proxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.work.Go(func() { p.serve(in) })
	}
}

func (p *proxy) serve(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", p.target)
	if err != nil {
		abort(in)
		return
	}
	defer out.Close()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	p.conns[in], p.conns[out] = true, true
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.pump(out, in) })
	both.Go(func() { p.pump(in, out) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, in)
	delete(p.conns, out)
	p.mu.Unlock()
}

type chunk struct {
	bytes []byte
	due   time.Time
}

// pump forwards one direction. Chunks keep their order, and a delay holds up none behind it for longer.
func (p *proxy) pump(to, from net.Conn) {
	line := make(chan chunk, chunksAhead)
	var writer sync.WaitGroup
	writer.Go(func() {
		for c := range line {
			for !p.pass(c.due) {
			}
			if _, err := to.Write(c.bytes); err != nil {
				abort(from)
			}
		}
	})
	var last time.Time
	for {
		buf := make([]byte, chunkBytes)
		n, err := from.Read(buf)
		if n > 0 {
			w := p.weather()
			if rand.IntN(1000) < w.resetPerMille {
				abort(to)
				abort(from)
				break
			}
			wait := w.delay
			if w.jitter > 0 {
				wait += rand.N(w.jitter)
			}
			if rand.IntN(100) < w.lossPercent {
				wait += resendAfter
			}
			if due := time.Now().Add(wait); due.After(last) {
				last = due
			}
			line <- chunk{buf[:n], last}
		}
		if err != nil {
			if err != io.EOF {
				abort(to)
			}
			break
		}
	}
	close(line)
	writer.Wait()
	if c, ok := to.(*net.TCPConn); ok {
		c.CloseWrite()
	}
}

func (p *proxy) weather() weather {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now
}

// pass waits until a chunk is due and nothing is stalled; it reports false when the weather changed meanwhile.
func (p *proxy) pass(due time.Time) bool {
	p.mu.Lock()
	stalled, change := p.now.stalled, p.change
	p.mu.Unlock()
	if stalled {
		<-change
		return false
	}
	if wait := time.Until(due); wait > 0 {
		select {
		case <-time.After(wait):
		case <-change:
			return false
		}
	}
	return true
}

// abort ends a connection as a crash does.
func abort(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		t.SetLinger(0)
	}
	c.Close()
}
