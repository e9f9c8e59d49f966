package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Bounds of what is read. etcd has the first one only.
const (
	maxFrame           = 512 << 20 // one message, or one compact MsgApp with all its entries
	maxEntries         = 1 << 20   // of one message, or compact MsgApp; etcd sends at most 1 MiB of entries at once, of 2 bytes or more each
	maxSnapshotMessage = 64 << 20
	readStep           = 64 << 10
)

// errFrame is wrapped by what is wrong with the bytes themselves: such a stream cannot go on.
var errFrame = errors.New("malformed frame")

// readExactly reads n bytes. It uses buf if that is large enough; else memory grows with what arrives, not with what n promises.
func readExactly(r io.Reader, n int, buf []byte) ([]byte, error) {
	if n <= cap(buf) {
		buf = buf[:n]
		_, err := io.ReadFull(r, buf)
		return buf, noEOF(err)
	}
	buf = buf[:0]
	for len(buf) < n {
		step := min(n-len(buf), max(readStep, len(buf)))
		if cap(buf)-len(buf) < step {
			buf = append(make([]byte, 0, len(buf)+step), buf...)
		}
		got, err := io.ReadFull(r, buf[len(buf):len(buf)+step])
		buf = buf[:len(buf)+got]
		if err != nil {
			return buf, noEOF(err)
		}
	}
	return buf, nil
}

// noEOF makes an end in the midst of a frame known as such.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// frameReader reads the pieces that all frames are made of, and counts their bytes.
type frameReader struct {
	r    io.Reader
	buf  []byte // for bytes that are decoded at once; what is decoded does not point into it
	word [8]byte
	read int // bytes since take
}

// keepBuffer is the largest buffer that is kept for the next frame.
const keepBuffer = 1 << 20

func (f *frameReader) uint64() (uint64, error) {
	n, err := io.ReadFull(f.r, f.word[:])
	f.read += n
	return binary.BigEndian.Uint64(f.word[:]), err
}

// length reads a length of at most limit. It returns io.EOF only before the first byte.
func (f *frameReader) length(limit int) (int, error) {
	size, err := f.uint64()
	if err != nil {
		return 0, err
	}
	if size > uint64(limit) {
		return 0, fmt.Errorf("a length of %d, more than %d: %w", size, limit, errFrame)
	}
	return int(size), nil
}

// message reads a length of at most limit and a protobuf of that length. It returns io.EOF only before the first byte.
func (f *frameReader) message(into proto.Message, limit int) error {
	size, err := f.length(limit)
	if err != nil {
		return err
	}
	b, err := readExactly(f.r, size, f.buf)
	f.read += len(b)
	if err != nil {
		return err
	}
	if cap(b) <= keepBuffer {
		f.buf = b[:0]
	}
	if len(b) > maxEntries { // else it has no more elements either
		if _, err := countElements(b, into); err != nil {
			return fmt.Errorf("%w: %w", errFrame, err)
		}
	}
	if err := proto.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	return nil
}

const (
	// elementMemory is about what an element of a list takes when it is decoded. On the wire 2 bytes can be enough.
	elementMemory = 128
	// maxNesting is how deep messages may lie in each other. Those of members go to 4: message, snapshot, metadata, conf state.
	maxNesting = 8
)

// countElements returns how many elements the lists of an encoded message of m's type have, at all depths. It fails above maxEntries.
func countElements(b []byte, m proto.Message) (n int, err error) {
	err = eachElement(b, m.ProtoReflect().Descriptor(), maxNesting, func(elements int) error {
		if n += elements; n > maxEntries {
			return fmt.Errorf("more than %d elements in lists", maxEntries)
		}
		return nil
	})
	return n, err
}

func eachElement(b []byte, d protoreflect.MessageDescriptor, depth int, found func(elements int) error) error {
	if depth == 0 {
		return fmt.Errorf("messages in messages, more than %d deep", maxNesting)
	}
	for len(b) > 0 {
		number, wire, value := protowire.ConsumeTag(b)
		if value < 0 {
			return protowire.ParseError(value)
		}
		size := protowire.ConsumeFieldValue(number, wire, b[value:])
		if size < 0 {
			return protowire.ParseError(size)
		}
		if f := d.Fields().ByNumber(number); f != nil && (f.IsList() || f.Message() != nil) {
			var inner []byte
			if wire == protowire.BytesType {
				inner, _ = protowire.ConsumeBytes(b[value:])
			}
			elements := 0
			if f.IsList() {
				elements = 1
				if f.Message() == nil {
					elements = max(1, len(inner)) // numbers may be packed
				}
			}
			if err := found(elements); err != nil {
				return err
			}
			if f.Message() != nil {
				if err := eachElement(inner, f.Message(), depth-1, found); err != nil {
					return err
				}
			}
		}
		b = b[value+size:]
	}
	return nil
}

// take returns how many bytes were read since it was called last.
func (f *frameReader) take() int {
	n := f.read
	f.read = 0
	return n
}

// appendMessage appends m with its length before it.
func appendMessage(b []byte, m proto.Message) ([]byte, error) {
	at := len(b)
	b, err := proto.MarshalOptions{}.MarshalAppend(append(b, 0, 0, 0, 0, 0, 0, 0, 0), m)
	if err != nil {
		return b[:at], err
	}
	binary.BigEndian.PutUint64(b[at:], uint64(len(b)-at-8))
	return b, nil
}

// encoder turns messages into the bytes of one stream, decoder back; both keep the state of one connection. A link heartbeat is
// a nil message to the encoder and (nil, nil) of the decoder.
type encoder interface {
	append(b []byte, m *raftpb.Message) ([]byte, error)
}

type decoder interface {
	decode() (*raftpb.Message, error)
	// take returns the bytes read since it was called last.
	take() int
}

// linkHeartbeat is one on a message stream.
var linkHeartbeat = &raftpb.Message{Type: raftpb.MsgHeartbeat.Enum()}

type messageEncoder struct{}

func (messageEncoder) append(b []byte, m *raftpb.Message) ([]byte, error) {
	if m == nil {
		m = linkHeartbeat
	}
	return appendMessage(b, m)
}

type messageDecoder struct{ frameReader }

func (d *messageDecoder) decode() (*raftpb.Message, error) {
	m := &raftpb.Message{}
	if err := d.message(m, maxFrame); err != nil {
		return nil, err
	}
	if m.GetType() == raftpb.MsgHeartbeat && m.GetFrom() == 0 && m.GetTo() == 0 {
		return nil, nil
	}
	return m, nil
}

// The first byte of a frame on a msgapp stream.
const (
	msgAppLink    = 0
	msgAppCompact = 1
	msgAppFull    = 2
)

// msgAppState is what both ends of a msgapp stream know: where the log stands after the messages so far.
type msgAppState struct{ term, index uint64 }

// full moves the state to after a message that was sent in full.
func (s *msgAppState) full(m *raftpb.Message) {
	s.term, s.index = m.GetTerm(), m.GetIndex()
	if n := len(m.GetEntries()); n > 0 {
		s.index = m.Entries[n-1].GetIndex()
	}
}

type msgAppEncoder struct{ st msgAppState }

func (e *msgAppEncoder) append(b []byte, m *raftpb.Message) ([]byte, error) {
	if m == nil {
		return append(b, msgAppLink), nil
	}
	at, err := len(b), error(nil)
	if m.GetIndex() != e.st.index || m.GetLogTerm() != e.st.term || m.GetLogTerm() != m.GetTerm() {
		if b, err = appendMessage(append(b, msgAppFull), m); err != nil {
			return b[:at], err
		}
		e.st.full(m)
		return b, nil
	}
	b = binary.BigEndian.AppendUint64(append(b, msgAppCompact), uint64(len(m.Entries)))
	for _, entry := range m.Entries {
		if b, err = appendMessage(b, entry); err != nil {
			return b[:at], err
		}
	}
	e.st.index += uint64(len(m.Entries))
	return binary.BigEndian.AppendUint64(b, m.GetCommit()), nil
}

type msgAppDecoder struct {
	frameReader
	st            msgAppState
	entries       entryReader
	local, remote uint64
}

func (d *msgAppDecoder) decode() (*raftpb.Message, error) {
	n, err := io.ReadFull(d.r, d.word[:1])
	d.read += n
	if err != nil {
		return nil, err
	}
	switch d.word[0] {
	case msgAppLink:
		return nil, nil
	case msgAppCompact:
		m, err := d.compact()
		return m, noEOF(err)
	case msgAppFull:
		m := &raftpb.Message{}
		if err := d.message(m, maxFrame); err != nil {
			return nil, noEOF(err)
		}
		d.st.full(m)
		return m, nil
	}
	return nil, fmt.Errorf("type %d: %w", d.word[0], errFrame)
}

func (d *msgAppDecoder) compact() (*raftpb.Message, error) {
	n, err := d.uint64()
	if err != nil {
		return nil, err
	}
	if n > maxEntries {
		return nil, fmt.Errorf("%d entries, more than %d: %w", n, maxEntries, errFrame)
	}
	m := &raftpb.Message{
		Type: raftpb.MsgApp.Enum(), From: proto.Uint64(d.remote), To: proto.Uint64(d.local),
		Term: proto.Uint64(d.st.term), LogTerm: proto.Uint64(d.st.term), Index: proto.Uint64(d.st.index),
	}
	m.Entries = make([]*raftpb.Entry, 0, min(n, 1024))
	start := d.read
	for left := n; left > 0; left-- {
		size, err := d.length(maxFrame - (d.read - start))
		if err != nil {
			return nil, err
		}
		e, read, err := d.entries.next(d.r, size, int(left))
		d.read += read
		if err != nil {
			return nil, err
		}
		m.Entries = append(m.Entries, e)
	}
	commit, err := d.uint64()
	if err != nil {
		return nil, err
	}
	m.Commit = &commit
	d.st.index += n
	return m, nil
}

// wholeMsgApp tells if b begins with a whole frame of a msgapp stream, so that decoding it would not wait.
func wholeMsgApp(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	rest := b[1:]
	skip := func() bool { // over a length and as many bytes
		if len(rest) < 8 {
			return false
		}
		n := binary.BigEndian.Uint64(rest)
		if n > uint64(len(rest)-8) {
			return false
		}
		rest = rest[8+n:]
		return true
	}
	switch b[0] {
	case msgAppCompact:
		if len(rest) < 8 {
			return false
		}
		n := binary.BigEndian.Uint64(rest)
		rest = rest[8:]
		if n > uint64(len(rest)) {
			return false
		}
		for range n {
			if !skip() {
				return false
			}
		}
		return len(rest) >= 8
	case msgAppFull:
		return skip()
	}
	return true // a link heartbeat, or what the decoder refuses at once
}
