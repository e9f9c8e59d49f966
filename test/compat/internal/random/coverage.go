package random

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const minSuccessPercent = 1

// Coverage counts, for every option of every request, every class of revision and every error text, how often it was
// tried and how often the request succeeded.
type Coverage struct {
	labels map[string]*count
	errors map[string]int
}

type count struct{ tried, succeeded int }

// NewCoverage knows what must be covered, from the descriptors of the requests.
func NewCoverage() *Coverage {
	return &Coverage{labels: make(map[string]*count), errors: make(map[string]int)}
}

// roots are the requests whose options must all be tried.
var roots = map[string]proto.Message{
	"Range": &etcdserverpb.RangeRequest{}, "RangeStream": &etcdserverpb.RangeRequest{}, "Put": &etcdserverpb.PutRequest{},
	"DeleteRange": &etcdserverpb.DeleteRangeRequest{}, "Txn": &etcdserverpb.TxnRequest{},
	"Compact": &etcdserverpb.CompactionRequest{}, "HashKV": &etcdserverpb.HashKVRequest{},
	"LeaseGrant": &etcdserverpb.LeaseGrantRequest{}, "LeaseRevoke": &etcdserverpb.LeaseRevokeRequest{},
	"LeaseTimeToLive": &etcdserverpb.LeaseTimeToLiveRequest{}, "LeaseKeepAlive": &etcdserverpb.LeaseKeepAliveRequest{},
	"Watch": &etcdserverpb.WatchCreateRequest{},
}

// refused are options with which a request cannot succeed. They must be tried.
var refused = map[string]bool{
	"Range.sort_order=unknown": true, "Range.sort_target=unknown": true,
	"RangeStream.sort_order=DESCEND": true, "RangeStream.sort_order=unknown": true, "RangeStream.sort_target=unknown": true,
	"RangeStream.sort_target=VERSION": true, "RangeStream.sort_target=CREATE": true,
	"RangeStream.sort_target=MOD": true, "RangeStream.sort_target=VALUE": true,
	"RangeStream.min_mod_revision": true, "RangeStream.max_mod_revision": true,
	"RangeStream.min_create_revision": true, "RangeStream.max_create_revision": true,
	"Range.revision compacted": true, "Range.revision future": true,
	"RangeStream.revision compacted": true, "RangeStream.revision future": true,
	"Compact.revision compacted": true, "Compact.revision future": true, "Compact.revision negative": true,
	"HashKV.revision compacted": true, "HashKV.revision future": true,
	"Watch.start_revision compacted": true, "Watch.start_revision negative": true,
}

var requiredErrors = []string{
	"InvalidArgument: etcdserver: key is not provided",
	"InvalidArgument: etcdserver: key not found",
	"InvalidArgument: etcdserver: value is provided",
	"InvalidArgument: etcdserver: lease is provided",
	"InvalidArgument: etcdserver: too many operations in txn request",
	"InvalidArgument: etcdserver: duplicate key given in txn request",
	"InvalidArgument: etcdserver: invalid sort option",
	"OutOfRange: etcdserver: mvcc: required revision has been compacted",
	"OutOfRange: etcdserver: mvcc: required revision is a future revision",
	"OutOfRange: etcdserver: too large lease TTL",
	"NotFound: etcdserver: requested lease not found",
	noLease,
	"FailedPrecondition: etcdserver: lease already exists",
	"Unimplemented: RangeStream does not support custom sort orders",
	"Unimplemented: RangeStream does not support revision filters",
}

// noLease counts as the failure of a request that is answered without one: that there is no such lease stands in the TTL.
const noLease = "OK: no such lease"

var classes = []string{"negative", "compacted", "past", "current", "future"}

// outcome is what Add is told of a result.
func outcome(r result) string {
	switch a := r.answer.(type) {
	case *etcdserverpb.LeaseKeepAliveResponse:
		if r.failure == "" && a.TTL <= 0 {
			return noLease
		}
	case *etcdserverpb.LeaseTimeToLiveResponse:
		if r.failure == "" && a.TTL < 0 {
			return noLease
		}
	}
	return r.failure
}

// Add counts one request and its outcome. failure is empty on success, else code and text.
func (c *Coverage) Add(method string, request proto.Message, failure string, s State) {
	if failure != "" {
		c.errors[failure]++
	}
	seen := make(map[string]bool) // an option set twice in one request counts once
	labelsOf(method, request.ProtoReflect(), s, seen)
	for label := range seen {
		n := c.labels[label]
		if n == nil {
			n = &count{}
			c.labels[label] = n
		}
		n.tried++
		if failure == "" {
			n.succeeded++
		}
	}
}

func labelsOf(prefix string, m protoreflect.Message, s State, seen map[string]bool) {
	seen[prefix] = true
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		v := m.Get(f)
		label := prefix + "." + string(f.Name())
		switch {
		case f.IsList() && f.Kind() == protoreflect.MessageKind:
			for j := range v.List().Len() {
				labelsOf(nestedPrefix(prefix, f), v.List().Get(j).Message(), s, seen)
			}
		case f.IsList():
			for j := range v.List().Len() {
				seen[enumLabel(label, f, v.List().Get(j).Enum())] = true
			}
		case f.Kind() == protoreflect.MessageKind:
			if m.Has(f) {
				labelsOf(nestedPrefix(prefix, f), v.Message(), s, seen)
			}
		case f.Kind() == protoreflect.EnumKind:
			seen[enumLabel(label, f, v.Enum())] = true
		case isRevision(f) && v.Int() != 0:
			class := s.Class(v.Int(), prefix == "Compact")
			seen[label+" "+class] = true
			seen["revision "+class] = true
		case m.Has(f):
			seen[label] = true
		}
	}
}

// nestedPrefix names a request inside a transaction alike at every depth.
func nestedPrefix(prefix string, f protoreflect.FieldDescriptor) string {
	switch f.Message().FullName() {
	case "etcdserverpb.RangeRequest":
		return "Range in Txn"
	case "etcdserverpb.PutRequest":
		return "Put in Txn"
	case "etcdserverpb.DeleteRangeRequest":
		return "DeleteRange in Txn"
	case "etcdserverpb.TxnRequest":
		return "Txn in Txn"
	case "etcdserverpb.Compare":
		return "Compare"
	}
	return prefix + "." + string(f.Name())
}

func enumLabel(label string, f protoreflect.FieldDescriptor, n protoreflect.EnumNumber) string {
	if d := f.Enum().Values().ByNumber(n); d != nil {
		return label + "=" + string(d.Name())
	}
	return label + "=unknown"
}

func isRevision(f protoreflect.FieldDescriptor) bool {
	return f.Kind() == protoreflect.Int64Kind && (f.Name() == "revision" || f.Name() == "start_revision")
}

// Class tells where a revision lies. A compaction may not name the compact revision again; a read may.
func (s State) Class(revision int64, compaction bool) string {
	switch {
	case revision < 0:
		return "negative"
	case revision < s.Compact || compaction && revision <= s.Compact:
		return "compacted"
	case revision < s.Revision:
		return "past"
	case revision == s.Revision:
		return "current"
	}
	return "future"
}

// required lists every label that must be there.
func required() []string {
	all := make(map[string]bool)
	for name, m := range roots {
		require(name, m.ProtoReflect().Descriptor(), all)
	}
	for _, class := range classes {
		all["revision "+class] = true
	}
	return slices.Sorted(maps.Keys(all))
}

func require(prefix string, d protoreflect.MessageDescriptor, all map[string]bool) {
	if all[prefix] {
		return
	}
	all[prefix] = true
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		label := prefix + "." + string(f.Name())
		switch {
		case f.Kind() == protoreflect.MessageKind:
			require(nestedPrefix(prefix, f), f.Message(), all)
		case f.Kind() == protoreflect.EnumKind:
			for j := range f.Enum().Values().Len() {
				all[label+"="+string(f.Enum().Values().Get(j).Name())] = true
			}
		case isRevision(f):
			for _, class := range classes {
				all[label+" "+class] = true
			}
		default:
			all[label] = true
		}
	}
}

// Missing lists what was not covered well enough.
func (c *Coverage) Missing() []string {
	var missing []string
	for _, label := range required() {
		n := c.labels[label]
		switch {
		case n == nil:
			missing = append(missing, label+": never tried")
		case !refused[label] && n.succeeded*100 < n.tried*minSuccessPercent:
			missing = append(missing, fmt.Sprintf("%s: %d of %d succeeded, less than %d %%", label, n.succeeded, n.tried, minSuccessPercent))
		}
	}
	for _, text := range requiredErrors {
		if c.errors[text] == 0 {
			missing = append(missing, "error "+text+": never seen")
		}
	}
	return missing
}

func (c *Coverage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-44s %9s %9s\n", "option or class", "tried", "succeeded")
	for _, label := range slices.Sorted(maps.Keys(c.labels)) {
		fmt.Fprintf(&b, "%-44s %9d %9d\n", label, c.labels[label].tried, c.labels[label].succeeded)
	}
	fmt.Fprintf(&b, "%-88s %9s\n", "error", "seen")
	for _, text := range slices.SortedFunc(maps.Keys(c.errors), func(a, b string) int { return cmp.Compare(c.errors[b], c.errors[a]) }) {
		fmt.Fprintf(&b, "%-88s %9d\n", text, c.errors[text])
	}
	return b.String()
}
