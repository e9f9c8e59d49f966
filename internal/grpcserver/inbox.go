package grpcserver

import (
	"encoding/binary"
	"io"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// inbox keeps what a client sent on a stream that a goroutine reads. The stream's
// window bounds it.
type inbox struct {
	s    *stream
	mu   sync.Mutex
	more sync.Cond
	buf  []byte
	eof  bool
	err  error // instead of what would follow buf
}

func newInbox(s *stream) *inbox {
	in := &inbox{s: s}
	in.more.L = &in.mu
	return in
}

// take takes data of the client. It runs on the reader goroutine.
func (in *inbox) take(data []byte, end bool) {
	in.mu.Lock()
	in.buf = append(in.buf, data...)
	in.eof = in.eof || end
	if !in.s.hold(len(data)) && in.err == nil {
		in.err = errHeld
	}
	more := in.wants()
	in.more.Broadcast()
	in.mu.Unlock()
	if in.s.gone.Load() { // at this moment; nobody else would give it back
		in.s.release()
		return
	}
	in.s.raise(more)
}

// wants is by how much the window must be raised for the message that buf begins
// with to come in. The lock is held.
func (in *inbox) wants() int {
	if in.eof || in.s.m == nil || len(in.buf) < messagePrefix {
		return 0
	}
	length := binary.BigEndian.Uint32(in.buf[1:])
	if uint64(length) > uint64(in.s.conn.s.o.MaxReceiveBytes) {
		return 0
	}
	return messagePrefix + int(length) - len(in.buf) - int(in.s.window.Load())
}

// wake has whoever reads look at the call's end.
func (in *inbox) wake() {
	in.mu.Lock()
	in.more.Broadcast()
	in.mu.Unlock()
}

// message waits for the next message; io.EOF says that none follows.
func (in *inbox) message() ([]byte, error) {
	s := in.s
	in.mu.Lock()
	defer in.mu.Unlock()
	for {
		if err := s.Err(); err != nil {
			return nil, s.callError(err)
		}
		if len(in.buf) >= messagePrefix {
			length := binary.BigEndian.Uint32(in.buf[1:])
			if most := s.conn.s.o.MaxReceiveBytes; uint64(length) > uint64(most) {
				s.conn.s.limited(limitMessage, "remote", s.conn.remote, "bytes", length)
				return nil, tooLarge(int64(length), most).Err()
			}
			if n := messagePrefix + int(length); len(in.buf) >= n {
				flag, raw := in.buf[0], append([]byte(nil), in.buf[messagePrefix:n]...)
				in.taken(n)
				if flag != 0 {
					var st *status.Status
					if raw, st = s.conn.s.unpackMessage(flag, raw, s.req); st != nil {
						return nil, st.Err()
					}
				}
				return raw, nil
			}
		}
		switch {
		case in.err != nil:
			return nil, in.err
		case in.eof && len(in.buf) == 0:
			return nil, io.EOF
		case in.eof:
			return nil, status.Error(codes.Internal, io.ErrUnexpectedEOF.Error())
		}
		in.more.Wait()
	}
}

// Read implements io.Reader, for bodies that are no messages.
func (in *inbox) Read(p []byte) (int, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for len(p) > 0 {
		if err := in.s.Err(); err != nil {
			return 0, err
		}
		if n := copy(p, in.buf); n > 0 {
			in.taken(n)
			return n, nil
		}
		switch {
		case in.err != nil:
			return 0, in.err
		case in.eof:
			return 0, io.EOF
		}
		in.more.Wait()
	}
	return 0, nil
}

// Close implements io.Closer. What is not read is thrown away with the stream.
func (in *inbox) Close() error { return nil }

// taken removes n bytes. The lock is held.
func (in *inbox) taken(n int) {
	if in.buf = in.buf[n:]; len(in.buf) == 0 {
		in.buf = nil
	}
	in.s.letGo(n)
	in.s.credit(n)
	in.s.raise(in.wants())
}
