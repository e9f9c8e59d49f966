package random

import (
	"bytes"
	"cmp"
	"slices"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/wire"
)

// normalize takes out of an answer what the protocol leaves open, so that equal answers are equal messages:
//
//   - cluster, member and term of the outer header, once checked;
//   - the order of keys that are equal in what they are sorted by, and which of them a limit kept;
//   - the remaining seconds of a lease, and the order of its keys and of leases.
//
// It reports a header that does not name the cluster, the member and a term.
func normalize(names *wire.Names, request, response proto.Message) string {
	var header *etcdserverpb.ResponseHeader
	if h, ok := response.(interface {
		GetHeader() *etcdserverpb.ResponseHeader
	}); ok {
		header = h.GetHeader()
	}
	switch r := response.(type) {
	case *etcdserverpb.RangeResponse:
		normalizeRange(request.(*etcdserverpb.RangeRequest), r)
	case *etcdserverpb.TxnResponse:
		normalizeTxn(request.(*etcdserverpb.TxnRequest), r)
	case *etcdserverpb.LeaseTimeToLiveResponse:
		slices.SortFunc(r.Keys, bytes.Compare)
		if r.TTL >= 0 && r.TTL <= r.GrantedTTL {
			r.TTL = r.GrantedTTL
		}
	case *etcdserverpb.LeaseLeasesResponse:
		slices.SortFunc(r.Leases, func(a, b *etcdserverpb.LeaseStatus) int { return cmp.Compare(a.ID, b.ID) })
	case *etcdserverpb.MemberListResponse:
		for _, m := range r.Members {
			if m.ID == names.Member {
				m.ID = 0
			}
			for _, urls := range [][]string{m.PeerURLs, m.ClientURLs} {
				for i := range urls {
					urls[i] = names.Strings.Replace(urls[i])
				}
			}
		}
	}
	switch {
	case header == nil:
		return "no header"
	case header.ClusterId != names.Cluster || header.MemberId != names.Member || header.RaftTerm == 0:
		return "wrong header " + header.String()
	}
	header.ClusterId, header.MemberId, header.RaftTerm = 0, 0, 0
	return ""
}

func normalizeTxn(request *etcdserverpb.TxnRequest, response *etcdserverpb.TxnResponse) {
	ops := request.Failure
	if response.Succeeded {
		ops = request.Success
	}
	for i, r := range response.Responses {
		if i >= len(ops) {
			return // a difference that will be seen
		}
		switch r := r.Response.(type) {
		case *etcdserverpb.ResponseOp_ResponseRange:
			if q := ops[i].GetRequestRange(); q != nil {
				normalizeRange(q, r.ResponseRange)
			}
		case *etcdserverpb.ResponseOp_ResponseTxn:
			if q := ops[i].GetRequestTxn(); q != nil {
				normalizeTxn(q, r.ResponseTxn)
			}
		}
	}
}

func normalizeRange(request *etcdserverpb.RangeRequest, response *etcdserverpb.RangeResponse) {
	same := sameRank(request.SortTarget, request.KeysOnly)
	if same == nil || len(response.Kvs) == 0 {
		return
	}
	kvs := response.Kvs
	for start := 0; start < len(kvs); {
		end := start + 1
		for end < len(kvs) && same(kvs[start], kvs[end]) {
			end++
		}
		slices.SortFunc(kvs[start:end], func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
		if end == len(kvs) && response.More && cutAfterSort(request) {
			// Others of this rank may have been left out: keep the rank, forget whose it is.
			for i := start; i < end; i++ {
				kvs[i] = rankOnly(kvs[i], request.SortTarget)
			}
		}
		start = end
	}
}

// cutAfterSort tells if the limit cut what was sorted. Otherwise it had cut in the order of keys before.
func cutAfterSort(r *etcdserverpb.RangeRequest) bool {
	return r.SortOrder != etcdserverpb.RangeRequest_NONE ||
		r.MinModRevision != 0 || r.MaxModRevision != 0 || r.MinCreateRevision != 0 || r.MaxCreateRevision != 0
}

// sameRank tells if a sort holds two keys equal; nil if it never does. Values that were not sent cannot be told apart.
func sameRank(target etcdserverpb.RangeRequest_SortTarget, keysOnly bool) func(a, b *mvccpb.KeyValue) bool {
	switch target {
	case etcdserverpb.RangeRequest_VERSION:
		return func(a, b *mvccpb.KeyValue) bool { return a.Version == b.Version }
	case etcdserverpb.RangeRequest_CREATE:
		return func(a, b *mvccpb.KeyValue) bool { return a.CreateRevision == b.CreateRevision }
	case etcdserverpb.RangeRequest_MOD:
		return func(a, b *mvccpb.KeyValue) bool { return a.ModRevision == b.ModRevision }
	case etcdserverpb.RangeRequest_VALUE:
		return func(a, b *mvccpb.KeyValue) bool { return keysOnly || bytes.Equal(a.Value, b.Value) }
	}
	return nil
}

func rankOnly(kv *mvccpb.KeyValue, target etcdserverpb.RangeRequest_SortTarget) *mvccpb.KeyValue {
	switch target {
	case etcdserverpb.RangeRequest_VERSION:
		return &mvccpb.KeyValue{Version: kv.Version}
	case etcdserverpb.RangeRequest_CREATE:
		return &mvccpb.KeyValue{CreateRevision: kv.CreateRevision}
	case etcdserverpb.RangeRequest_MOD:
		return &mvccpb.KeyValue{ModRevision: kv.ModRevision}
	}
	return &mvccpb.KeyValue{Value: kv.Value}
}
