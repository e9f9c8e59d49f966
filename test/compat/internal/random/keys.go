package random

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

// span is a range of keys, as requests name it.
type span struct{ key, end []byte }

// spans lists the keys a request reads or writes; whole is true of a request that may concern any key.
func spans(m proto.Message) (all []span, whole bool) {
	switch r := m.(type) {
	case *etcdserverpb.RangeRequest:
		return []span{{r.Key, r.RangeEnd}}, false
	case *etcdserverpb.PutRequest:
		return []span{{r.Key, nil}}, false
	case *etcdserverpb.DeleteRangeRequest:
		return []span{{r.Key, r.RangeEnd}}, false
	case *etcdserverpb.TxnRequest:
		for _, c := range r.Compare {
			all = append(all, span{c.Key, c.RangeEnd})
		}
		for _, ops := range [][]*etcdserverpb.RequestOp{r.Success, r.Failure} {
			for _, op := range ops {
				var inner proto.Message
				switch o := op.Request.(type) {
				case *etcdserverpb.RequestOp_RequestRange:
					inner = o.RequestRange
				case *etcdserverpb.RequestOp_RequestPut:
					inner = o.RequestPut
				case *etcdserverpb.RequestOp_RequestDeleteRange:
					inner = o.RequestDeleteRange
				case *etcdserverpb.RequestOp_RequestTxn:
					inner = o.RequestTxn
				default:
					continue
				}
				s, _ := spans(inner)
				all = append(all, s...)
			}
		}
		return all, false
	case *etcdserverpb.LeaseGrantRequest, *etcdserverpb.LeaseTimeToLiveRequest, *etcdserverpb.LeaseKeepAliveRequest:
		return nil, false
	}
	return nil, true
}

func overlap(a, b proto.Message) bool {
	as, whole := spans(a)
	if whole {
		return true
	}
	bs, whole := spans(b)
	if whole {
		return true
	}
	for _, x := range as {
		for _, y := range bs {
			if !x.before(y) && !y.before(x) {
				return true
			}
		}
	}
	return false
}

// before tells if all of s lies below all of o.
func (s span) before(o span) bool {
	switch {
	case len(s.end) == 0:
		return bytes.Compare(s.key, o.key) < 0
	case bytes.Equal(s.end, []byte{0}):
		return false
	}
	return bytes.Compare(s.end, o.key) <= 0
}

var padding = regexp.MustCompile(`"v{40,}"`)

// requestText prints a request as a script takes it.
func requestText(m proto.Message) string {
	text := strings.ReplaceAll(prototext.MarshalOptions{}.Format(m), "  ", " ")
	return padding.ReplaceAllStringFunc(text, func(v string) string { return fmt.Sprintf(`@repeat("v", %d)`, len(v)-2) })
}
