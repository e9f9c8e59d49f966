package rpc

import (
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/grpcserver"
)

// Field numbers of LeaseKeepAliveRequest and LeaseKeepAliveResponse.
const (
	fieldKeepAliveID = 1

	fieldKeptAliveID  = 2
	fieldKeptAliveTTL = 3
)

// keepAliveStream is one call of etcdserverpb.Lease/LeaseKeepAlive. As in etcd
// it has one renewal in hand: the next request is read when the answer to the
// one before is queued. So answers come in the order of the requests, and a
// stream holds one request and one answer beyond its outbox.
type keepAliveStream struct {
	s       *Server
	call    *grpcserver.Call
	out     grpcserver.StreamOut
	renewed func(ttl int64, err error) // answer, made once for all renewals

	// Of the renewal in hand, set before it begins.
	id     int64
	header header

	mu      sync.Mutex
	pending []grpcserver.Message // an answer that found no room; empty for none
	message [1]grpcserver.Message
}

// openKeepAlive serves etcdserverpb.Lease/LeaseKeepAlive.
func (s *Server) openKeepAlive(call *grpcserver.Call, out grpcserver.StreamOut) grpcserver.StreamReceiver {
	k := &keepAliveStream{s: s, call: call, out: out}
	k.renewed = k.answer
	return k
}

// Message implements grpcserver.StreamReceiver.
func (k *keepAliveStream) Message(raw []byte) error {
	k.out.Hold()
	id, err := parseKeepAlive(raw)
	if err != nil {
		k.out.End(WireError(err))
		return nil
	}
	who, err := k.s.identify(k.call)
	switch {
	case err == nil:
		k.renew(who, id)
	case errors.Is(err, auth.ErrTokenAhead):
		k.s.identifyLater(k.call, func(who Identity, err error) {
			if err != nil {
				k.out.End(WireError(err))
				return
			}
			k.renew(who, id)
		})
	default:
		k.out.End(WireError(err))
	}
	return nil
}

// renew begins the renewal in hand.
func (k *keepAliveStream) renew(who Identity, id int64) {
	// The header is older than the renewal, so that whoever reads at its revision
	// sees nothing that the renewal outlived.
	v := k.s.o.Views.View()
	k.id, k.header = id, k.s.header(v.KV().Revision())
	err := v.MayCall(who)
	v.Release()
	if err != nil {
		k.out.End(WireError(err))
		return
	}
	k.s.o.Leases.Renew(k.call.Context(), who, id, k.renewed)
}

// answer queues what became of the renewal in hand.
func (k *keepAliveStream) answer(ttl int64, err error) {
	if err != nil {
		k.out.End(WireError(err))
		return
	}
	raw := encodeKeepAlive(k.header, k.id, ttl)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.message[0] = grpcserver.Message{Head: raw}
	k.pending = k.message[:]
	k.flush()
}

// flush queues the answer that is pending, if there is room, and has the next
// request read.
func (k *keepAliveStream) flush() {
	if len(k.pending) == 0 || !k.out.Send(k.pending) {
		return
	}
	k.pending, k.message[0] = nil, grpcserver.Message{}
	k.out.Resume()
}

// HalfClose implements grpcserver.StreamReceiver. No renewal is in hand then, but answers
// may be on their way.
func (k *keepAliveStream) HalfClose() (over bool) {
	k.out.End(nil)
	return false
}

// Ready implements grpcserver.StreamReceiver.
func (k *keepAliveStream) Ready() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.flush()
}

// Sent implements grpcserver.StreamReceiver.
func (k *keepAliveStream) Sent(grpcserver.Message, time.Duration) {}

// Close implements grpcserver.StreamReceiver. A renewal in hand ends with the call's
// context, and its answer finds no taker.
func (k *keepAliveStream) Close() {}

// parseKeepAlive returns the lease that a LeaseKeepAliveRequest names.
func parseKeepAlive(raw []byte) (id int64, err error) {
	if len(raw) == 0 {
		return 0, nil
	}
	if raw[0] == fieldKeepAliveID<<3|byte(protowire.VarintType) {
		if v, n := protowire.ConsumeVarint(raw[1:]); n == len(raw)-1 {
			return int64(v), nil
		}
	}
	var r etcdserverpb.LeaseKeepAliveRequest
	if err := proto.Unmarshal(raw, &r); err != nil {
		return 0, undecoded(undecodedMessage, err)
	}
	return r.ID, nil
}

// encodeKeepAlive returns a LeaseKeepAliveResponse.
func encodeKeepAlive(h header, id, ttl int64) []byte {
	size := h.size()
	n := sizeBytes(fieldHeader, size) + sizeVarint(fieldKeptAliveID, uint64(id)) + sizeVarint(fieldKeptAliveTTL, uint64(ttl))
	dst := protowire.AppendTag(make([]byte, 0, n), fieldHeader, protowire.BytesType)
	dst = h.append(protowire.AppendVarint(dst, uint64(size)))
	dst = appendVarint(dst, fieldKeptAliveID, uint64(id))
	return appendVarint(dst, fieldKeptAliveTTL, uint64(ttl))
}
