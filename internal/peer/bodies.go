package peer

import (
	"errors"
	"io"
	"sync"

	"google.golang.org/protobuf/proto"
)

const (
	// maxBodies bounds the memory of all single messages that are being read, but for one.
	maxBodies = 64 << 20
	// firstBody is what is taken for a body before anything of it came.
	firstBody = 4 << 10
)

var (
	errBodies  = errors.New("too many raft messages are being read: send it again later")
	errTooLong = errors.New("the message is too long")
)

// bodies is the memory for messages that come by POST /raft, and for those before snapshots until the snapshot itself comes in. Anybody
// may send many of either at once. What does not fit is refused, as messages may be lost. One at a time may go beyond, so that the
// largest message that there is gets through some time.
type bodies struct {
	limit int

	mu     sync.Mutex // covers all below
	used   int
	beyond *share // whose memory beyond limit is not counted
}

// share is what one message has of it.
type share struct {
	of  *bodies
	has int // counted in used
}

func (b *bodies) share() *share { return &share{of: b} }

// grow takes n bytes more, or reports that there are none.
func (s *share) grow(n int) bool {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > b.limit {
		if b.beyond == nil {
			b.beyond = s
		}
		return b.beyond == s
	}
	b.used += n
	s.has += n
	return true
}

// release gives all back. What was read must not be used any more, or be bounded in another way.
func (s *share) release() {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= s.has
	s.has = 0
	if b.beyond == s {
		b.beyond = nil
	}
}

// unmarshal decodes what read returned. The elements of its lists are memory too, and far more of it than they take in body.
func (s *share) unmarshal(body []byte, m proto.Message) error {
	n, err := countElements(body, m)
	if err != nil {
		return err
	}
	if !s.grow(n * elementMemory) {
		return errBodies
	}
	return proto.Unmarshal(body, m)
}

// read reads a whole body of at most maxFrame bytes. Its memory follows what came in; length is what the sender announced, -1 if nothing.
// It fails with errBodies if others have taken all memory.
func (s *share) read(r io.Reader, length int64) ([]byte, error) {
	if length > maxFrame {
		return nil, errTooLong
	}
	var body []byte
	for {
		if len(body) == cap(body) {
			size := max(firstBody, 2*cap(body))
			if announced := int(length) + 1; length >= int64(cap(body)) {
				size = min(size, announced) // and one more, to see its end
			}
			if !s.grow(size - cap(body)) {
				return nil, errBodies
			}
			body = append(make([]byte, 0, size), body...)
		}
		n, err := r.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case len(body) > maxFrame:
			return nil, errTooLong
		case err == io.EOF:
			return body, nil
		case err != nil:
			return nil, err
		}
	}
}
