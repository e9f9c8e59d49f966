package rpc

import (
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// facts are what a client says of itself in the metadata of a call. Calls whose
// header blocks were the same bytes share them, so that to read them costs
// nothing for each call.
type facts struct {
	version    string // of the API, as the client states it
	versionErr error
	// requiresLeader says that the client wants no answer from a member that
	// knows no leader.
	requiresLeader bool
	token          string // "" if there is none
	// fromGateway says that the JSON gateway made the call, whose certificate is
	// not the client's.
	fromGateway bool

	requests [callKinds]atomic.Pointer[prometheus.Counter] // that count such calls, once needed
}

// factsOf returns the facts of a call.
func factsOf(call *grpcserver.Call) *facts {
	md := call.Metadata()
	return md.Cache(func() any { return readFacts(md) }).(*facts)
}

func readFacts(md *grpcserver.Metadata) *facts {
	f := &facts{
		version:        md.First(rpctypes.MetadataClientAPIVersionKey),
		requiresLeader: md.First(rpctypes.MetadataRequireLeaderKey) == rpctypes.MetadataHasLeader,
		token:          md.First(rpctypes.TokenFieldNameGRPC),
		fromGateway:    len(md.Values("grpcgateway-accept")) > 0,
	}
	switch {
	case f.version == "":
		f.version = "unknown"
	case !utf8.ValidString(f.version):
		f.versionErr = rpctypes.ErrGRPCInvalidClientAPIVersion
	}
	if f.token == "" {
		f.token = md.First(rpctypes.TokenFieldNameSwagger)
	}
	f.token = strings.TrimPrefix(f.token, "Bearer ")
	return f
}

// deadlineOf is the earlier of the client's deadline and now+limit.
func deadlineOf(call *grpcserver.Call, now time.Time, limit time.Duration) time.Time {
	d := now.Add(limit)
	if own, ok := call.Deadline(); ok && own.Before(d) {
		return own
	}
	return d
}
