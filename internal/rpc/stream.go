package rpc

import "time"

// StreamHandler begins to serve a bidirectional stream. The transport calls the
// receiver that it returns; Out takes the answers. It may call Out at once.
type StreamHandler func(call *Call, out StreamOut) StreamReceiver

// StreamReceiver is one stream as its handler sees it. None of its methods may
// block. Messages come one at a time, and so do Ready and Sent; the two kinds
// may run at the same time. Close is the last call.
type StreamReceiver interface {
	// Message takes the next request, which belongs to the receiver. None comes
	// while a Send was refused and Ready not yet called (who does not read the
	// answers has no more requests read), nor between Hold and Resume. An error
	// ends the stream at once; End lets the client have the answers first.
	Message(raw []byte) error
	// HalfClose says that no more messages will come, and returns whether that
	// ends the stream; otherwise the client still reads. It waits its turn behind
	// the messages.
	HalfClose() (over bool)
	// Ready says that after a refused Send there is room again.
	Ready()
	// Sent says that a message was handed to the connection, and how long that
	// took, which includes waiting for the client's flow control.
	Sent(m Message, took time.Duration)
	// Close says that the stream is over. What was not sent is dropped.
	Close()
}

// StreamOut is the bounded queue of one stream's answers. Safe for concurrent
// use; none of its methods blocks, and after Close none does anything.
type StreamOut interface {
	// Send queues all of the messages, in order, or none of them. After it
	// returned false Ready is called as soon as there is room. The slice is the
	// caller's, what it holds must not change any more.
	Send(ms []Message) (queued bool)
	// Hold keeps the next request from being read until Resume: a receiver whose
	// answers take their time calls it from Message.
	Hold()
	Resume()
	// End ends the stream, with OK if err is nil, as soon as what is queued is
	// written. Nothing more is read; the first call counts.
	End(err error)
}

// Message is an encoded message in parts that follow one another, so that many
// streams can share the large ones.
type Message struct {
	Head []byte
	Rest [][]byte
	// Kind is passed on to Sent and means nothing to the transport.
	Kind uint8
}

// Size is the encoded length in bytes.
func (m Message) Size() int {
	n := len(m.Head)
	for _, p := range m.Rest {
		n += len(p)
	}
	return n
}

// join returns the message in one slice.
func (m Message) join() []byte {
	if len(m.Rest) == 0 {
		return m.Head
	}
	b := append(make([]byte, 0, m.Size()), m.Head...)
	for _, p := range m.Rest {
		b = append(b, p...)
	}
	return b
}
