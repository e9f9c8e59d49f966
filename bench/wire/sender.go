package wire

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
)

// maxUnsent bounds what a server that does not read makes us keep.
const maxUnsent = 64 << 20

// sender is a connection whose Write does not block: what the kernel does not take at once is kept, and a goroutine writes
// it. So the reading goroutine can write, too, without a deadlock when both sides' buffers are full, and a goroutine for
// writing alone, which costs a wake-up for each burst, is not needed.
type sender struct {
	net.Conn
	raw syscall.RawConn

	mu      sync.Mutex
	unsent  []byte // nil unless the goroutine runs
	err     error
	now     []byte // what try writes, and what became of it
	wrote   int
	tryErr  error
	try     func(fd uintptr) bool
	waiting bool // the goroutine runs
}

func newSender(nc net.Conn) (*sender, error) {
	s := &sender{Conn: nc}
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("wire: %T gives no access to its socket", nc)
	}
	var err error
	if s.raw, err = sc.SyscallConn(); err != nil {
		return nil, err
	}
	s.try = func(fd uintptr) bool {
		s.wrote, s.tryErr = 0, nil
		for s.wrote < len(s.now) {
			n, err := syscall.Write(int(fd), s.now[s.wrote:])
			if n > 0 {
				s.wrote += n
			}
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if err != nil {
				s.tryErr = err
				break
			}
		}
		return true
	}
	return s, nil
}

// Write takes all of p, or fails.
func (s *sender) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	if s.waiting {
		if len(s.unsent)+len(p) > maxUnsent {
			s.err = fmt.Errorf("the server does not read: %d bytes wait for it", len(s.unsent)+len(p))
			return 0, s.err
		}
		s.unsent = append(s.unsent, p...)
		return len(p), nil
	}
	s.now = p
	err := s.raw.Write(s.try)
	s.now = nil
	if err == nil {
		err = s.tryErr
	}
	if errors.Is(err, syscall.EAGAIN) {
		err = nil
	}
	if err != nil {
		s.err = err
		return 0, err
	}
	if s.wrote < len(p) {
		s.unsent, s.waiting = append([]byte(nil), p[s.wrote:]...), true
		go s.drain()
	}
	return len(p), nil
}

// drain writes, blocking, until nothing is left.
func (s *sender) drain() {
	for {
		s.mu.Lock()
		b := s.unsent
		if s.unsent = nil; len(b) == 0 || s.err != nil {
			s.waiting = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		if _, err := s.Conn.Write(b); err != nil {
			s.mu.Lock()
			if s.err == nil {
				s.err = err
			}
			s.mu.Unlock()
			s.Conn.Close() // the reader learns of it
		}
	}
}
