package grpcserver

import (
	"time"

	"golang.org/x/net/http2"
)

// What one client may cost. Good clients are far from all of these.
const (
	// recvWindow is what a client may send on a stream ahead of what was taken; a
	// message that is longer is let in as soon as its length is known.
	recvWindow = 256 << 10
	// connWindow is the same for a connection, whose bytes are taken at once.
	connWindow = 16 << 20
	// heldBytes bounds Options.HeldBytes for one connection, heldShare how much of
	// it that may have, and of what else is shared out.
	heldBytes = 64 << 20
	heldShare = 4
	// streamCost is what an open stream takes beside its message and header fields of
	// its own, wideCost what one does that is served message by message or by a
	// goroutine.
	streamCost = 512
	wideCost   = 2 << 10
	// maxContinuations bounds the frames of a header block.
	maxContinuations = 256
	// maxReplies bounds the bytes of control frames that wait to be written.
	maxReplies = 64 << 10
	// idleBurst and idleRate bound the frames that ask for work and carry none;
	// each of those that do gives some credit back.
	idleBurst, idleRate = 8192, 2000
	callCredit          = 8
	earnedBytes         = 1 << 10
	// resetBurst and resetRate bound the calls that a client gives up in their
	// first second. A good one with short deadlines gives up all that it has in
	// flight when a disk stalls; who attacks gives up millions.
	resetBurst, resetRate = 16 << 10, 5000
	youngCall             = time.Second
	// itemCost is what an answer that waits takes beside its bytes: its stream, its
	// call.
	itemCost = 1 << 10
	// crowdedBytes is what a connection may always have waiting.
	crowdedBytes = 1 << 20
	// overfullShare times Options.HeldBytes is what may wait on all connections
	// before those with more than crowdedBytes to which more comes are closed.
	overfullShare = 2
	// maxWorking is how many unary calls of a connection may be with their handlers
	// before no more is read from it, those that the client gave up meanwhile
	// included.
	maxWorking = 4096
	// maxGoroutines bounds the calls of all connections that have a goroutine. One
	// connection may have its share of them.
	maxGoroutines = 32 << 10
	// maxHandshakes bounds the TLS handshakes being computed or waited for at a
	// time; more connections wait for their turn.
	maxHandshakes = 16 << 10
)

// Reasons of Metrics.limit.
const (
	limitHandshake   = "handshake"
	limitHeaders     = "headers"
	limitContinued   = "continuation"
	limitFlood       = "flood"
	limitResets      = "resets"
	limitPings       = "pings"
	limitReplies     = "control_replies"
	limitHeld        = "requests_held"
	limitOutput      = "output"
	limitStreams     = "streams"
	limitGoroutines  = "goroutines"
	limitMessage     = "message_size"
	limitStalled     = "stalled"
	limitKeepalive   = "keepalive"
	limitUnreadInput = "lingering"
)

var limitReasons = []string{
	limitHandshake, limitHeaders, limitContinued, limitFlood, limitResets, limitPings, limitReplies, limitHeld,
	limitOutput, limitStreams, limitGoroutines, limitMessage, limitStalled, limitKeepalive, limitUnreadInput,
}

// bucket is credit that fills up with time.
type bucket struct {
	left, burst, rate float64
	at                time.Time
}

func newBucket(burst, rate float64) bucket { return bucket{left: burst, burst: burst, rate: rate} }

// take takes one, and returns false if there is none.
func (b *bucket) take(now time.Time) bool {
	if b.left < 1 {
		if !b.at.IsZero() {
			b.left = min(b.burst, b.left+b.rate*now.Sub(b.at).Seconds())
		}
		b.at = now
		if b.left < 1 {
			return false
		}
	} else if b.at.IsZero() {
		b.at = now
	}
	b.left--
	return true
}

// give gives some back.
func (b *bucket) give(n float64) { b.left = min(b.burst, b.left+n) }

// connError ends a connection.
type connError struct {
	code  http2.ErrCode
	why   string // goes to the client
	limit string // one of the reasons of limits, "" for an error of the protocol
}

func (e *connError) Error() string { return e.why }

func protocolError(why string) *connError { return &connError{code: http2.ErrCodeProtocol, why: why} }

func calm(limit, why string) *connError {
	return &connError{code: http2.ErrCodeEnhanceYourCalm, why: why, limit: limit}
}
