package grpcserver

import (
	"crypto/tls"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/internal/clock"
)

// Handler serves a unary method. Raw is the request's message and belongs to
// the handler. Reply is called exactly once, from any goroutine, with the
// encoded response, which then belongs to the transport, or with an error that
// grpc's status package understands. A Handler never blocks: it runs on the
// goroutine that reads the connection, or on the one that writes to it.
type Handler func(call *Call, raw []byte, reply func(raw []byte, err error))

// SenderHandler serves a method that answers one request with many messages.
// It runs on a goroutine of its own.
type SenderHandler func(call *Call, raw []byte, send Send) error

// Send sends one message of a stream. It blocks while the client's flow control
// asks for it and returns the call's error once the call is over. Sent, if not
// nil, is called once in any case, when raw is no longer in memory.
type Send func(raw []byte, sent func()) error

// StreamHandler begins to serve a bidirectional stream. The transport calls the
// receiver that it returns; out takes the answers. It may call out at once, and
// does not block.
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
// streams can share the large ones; they are written by one vectored write.
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

// MethodStats counts the calls of one method that is served from raw bytes. Its
// methods are cheap and safe for concurrent use.
type MethodStats interface {
	Started()
	Received(bytes int) // a message, as it came out of its frame and decompressed
	Sent(bytes int)     // a message was queued for the connection
	// Finished is called once for each call that was started.
	Finished(call *Call, code codes.Code, took time.Duration)
}

// Method is one method that is served from raw bytes. Exactly one of Unary,
// Sender and Stream is set.
type Method struct {
	Name   string // "/etcdserverpb.KV/Put"
	Unary  Handler
	Sender SenderHandler
	Stream StreamHandler
	// Watch, if set, is called when a stream (Sender or Stream) begins; the stream
	// ends with the first error that end is called with. Forget is called when it
	// is over.
	Watch func(call *Call, end func(error)) (forget func())
	Stats MethodStats // nil means that nobody counts
}

// Options configure a Server. Zero values mean the defaults.
type Options struct {
	// TLS, if set, is what clients must speak on every listener of ServeTLS.
	TLS *tls.Config
	// HTTP serves HTTP/1.1 on the same ports; nil closes such connections.
	HTTP http.Handler

	// MaxReceiveBytes bounds a request's message, also once decompressed; default 4 MiB.
	MaxReceiveBytes int
	// MaxSendBytes bounds an answer's message; default 2^31-1.
	MaxSendBytes int
	// MaxStreams bounds the open streams of a connection; default 2^32-1. A client
	// whose calls are held back is asked for fewer meanwhile.
	MaxStreams uint32
	// MaxHeaderBytes bounds the decoded header list of a call, each field counting
	// 32 bytes beside its own; default 64 KiB. A call beyond it is answered with
	// ResourceExhausted, a header block twice as long on the wire ends the connection.
	MaxHeaderBytes uint32
	// HeldBytes bounds the memory that requests of all connections may take before
	// they are complete, or while their streams do not take them; default 512 MiB, at
	// least four of the largest messages. Each open stream counts as well, with 512
	// bytes, 2 KiB if it is not served from raw bytes by one answer, and with header
	// fields of its own. One connection may have a quarter of it, at most 64 MiB, but
	// always two of the largest messages, and no more than is left. Calls whose
	// messages are beyond it end with ResourceExhausted, those that cannot even begin
	// are refused with REFUSED_STREAM. While as much of answers waits for clients'
	// windows, those with 1 MiB of it have new calls held back. The messages of these
	// count; beyond the bound they are refused with REFUSED_STREAM.
	HeldBytes int
	// OutputBytes bounds the answers that wait on one connection and that their
	// senders do not count themselves (OnSent, Send's sent), each with 1 KiB for its
	// call; default 64 MiB. While a quarter of it waits for the client's windows its
	// new calls are held back, while an eighth waits for a full socket nothing more is
	// read from it, and above all of it the connection is closed. Where twice
	// HeldBytes wait on all connections, one is closed to which more comes than 1 MiB.
	OutputBytes int

	// StreamMessages and StreamBytes bound what one Stream may have queued for its
	// client; default 128 and 4 MiB. StreamsBytes bounds it for all together;
	// default 128 MiB. When that is used up, streams that nobody read for
	// StreamStall, default 10 s, are ended; so is a connection that for that long
	// does not read what its control frames are answered with.
	StreamMessages, StreamBytes, StreamsBytes int
	StreamStall                               time.Duration

	// Keepalive, with grpc-go's meaning: a client that pings more often than
	// KeepaliveMinTime (default 5 s) gets GOAWAY "too_many_pings" (pings without
	// open streams count once per two hours); a connection that was silent for
	// KeepaliveTime (default 2 h) is pinged, and closed without an answer within
	// KeepaliveTimeout (default 20 s).
	KeepaliveMinTime, KeepaliveTime, KeepaliveTimeout time.Duration
	// HandshakeTimeout bounds the time from accept to the first request's preface,
	// TLS included; default 20 s.
	HandshakeTimeout time.Duration

	// UnaryInterceptor and StreamInterceptor wrap the methods of services that
	// RegisterService was given, which get a goroutine for each call.
	UnaryInterceptor  grpc.UnaryServerInterceptor
	StreamInterceptor grpc.StreamServerInterceptor
	// Bytes, if set, counts the message bytes of those.
	Bytes func(received, sent int)

	Metrics *Metrics     // nil means that nobody collects them
	Clock   clock.Clock  // nil means the system's
	Logger  *slog.Logger // nil means discard
}
