package wire

import (
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const longBytes = 64 // values beyond this length print as their start, length and checksum

// Names are the words for what differs between two clusters by right.
type Names struct {
	Cluster, Member uint64
	Numbers         map[uint64]string // IDs that a server chose, and the word for each
	Strings         *strings.Replacer // URLs, tokens; nil if there are none
}

// unlike lists the fields two healthy servers need not agree on. They print as `~` if set.
var unlike = map[protoreflect.FullName]bool{
	"etcdserverpb.StatusResponse.dbSize":            true,
	"etcdserverpb.StatusResponse.dbSizeInUse":       true,
	"etcdserverpb.StatusResponse.raftIndex":         true,
	"etcdserverpb.StatusResponse.raftAppliedIndex":  true,
	"etcdserverpb.StatusResponse.raftTerm":          true,
	"etcdserverpb.HashResponse.hash":                true, // covers the members' URLs
	"etcdserverpb.AuthenticateResponse.token":       true,
	"etcdserverpb.SnapshotResponse.blob":            true,
	"etcdserverpb.SnapshotResponse.remaining_bytes": true,
}

// unordered lists the fields whose elements etcd answers in no order. They print sorted.
var unordered = map[protoreflect.FullName]bool{
	"etcdserverpb.LeaseTimeToLiveResponse.keys": true,
	"etcdserverpb.AlarmResponse.alarms":         true,
	"etcdserverpb.StatusResponse.errors":        true,
}

// Text prints a message on one line.
func (n *Names) Text(m proto.Message) string {
	var b strings.Builder
	n.fields(&b, m.ProtoReflect())
	return b.String()
}

func (n *Names) fields(b *strings.Builder, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	first := true
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		if !first {
			b.WriteByte(' ')
		}
		first = false
		b.WriteString(string(f.Name()))
		b.WriteByte(':')
		switch {
		case unlike[f.FullName()]:
			b.WriteByte('~')
		case f.FullName() == "etcdserverpb.LeaseTimeToLiveResponse.TTL":
			n.remaining(b, m, m.Get(f).Int())
		case unordered[f.FullName()]:
			n.sorted(b, f, m.Get(f).List())
		case f.IsMap():
			n.stringMap(b, f, m.Get(f).Map())
		case f.IsList():
			n.list(b, f, m.Get(f).List())
		default:
			n.value(b, f, m.Get(f))
		}
	}
	n.unknown(b, m)
}

func (n *Names) list(b *strings.Builder, f protoreflect.FieldDescriptor, l protoreflect.List) {
	b.WriteByte('[')
	for i := range l.Len() {
		if i > 0 {
			b.WriteString(", ")
		}
		n.value(b, f, l.Get(i))
	}
	b.WriteByte(']')
}

func (n *Names) sorted(b *strings.Builder, f protoreflect.FieldDescriptor, l protoreflect.List) {
	var values []string
	for i := range l.Len() {
		var v strings.Builder
		n.value(&v, f, l.Get(i))
		// An error of Status is a message printed by protobuf, which puts one blank or two between fields, as the program's build
		// has it.
		values = append(values, strings.ReplaceAll(v.String(), "  ", " "))
	}
	slices.Sort(values)
	b.WriteString("[" + strings.Join(values, ", ") + "]")
}

func (n *Names) stringMap(b *strings.Builder, f protoreflect.FieldDescriptor, m protoreflect.Map) {
	var entries []string
	for k, v := range m.Range {
		var e strings.Builder
		e.WriteString(strconv.Quote(k.String()) + ": ")
		n.value(&e, f.MapValue(), v)
		entries = append(entries, e.String())
	}
	slices.Sort(entries)
	b.WriteString("{" + strings.Join(entries, ", ") + "}")
}

func (n *Names) value(b *strings.Builder, f protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch f.Kind() {
	case protoreflect.MessageKind:
		b.WriteByte('{')
		switch m := v.Message().Interface().(type) {
		case *etcdserverpb.ResponseHeader:
			n.header(b, m)
		case *mvccpb.KeyValue:
			n.keyValue(b, m)
		default:
			n.fields(b, v.Message())
		}
		b.WriteByte('}')
	case protoreflect.BytesKind:
		Bytes(b, v.Bytes())
	case protoreflect.StringKind:
		s := v.String()
		if n.Strings != nil {
			s = n.Strings.Replace(s)
		}
		b.WriteString(strconv.Quote(s))
	case protoreflect.EnumKind:
		if d := f.Enum().Values().ByNumber(v.Enum()); d != nil {
			b.WriteString(string(d.Name()))
		} else {
			b.WriteString(strconv.Itoa(int(v.Enum())))
		}
	case protoreflect.Int64Kind:
		n.number(b, uint64(v.Int()), strconv.FormatInt(v.Int(), 10))
	case protoreflect.Uint64Kind:
		n.number(b, v.Uint(), strconv.FormatUint(v.Uint(), 10))
	default:
		b.WriteString(v.String())
	}
}

func (n *Names) number(b *strings.Builder, v uint64, plain string) {
	word, named := n.Numbers[v]
	switch {
	case named:
		b.WriteString(word)
	case v != 0 && v == n.Member:
		b.WriteString("$member")
	case v != 0 && v == n.Cluster:
		b.WriteString("$cluster")
	default:
		b.WriteString(plain)
	}
}

func (n *Names) header(b *strings.Builder, h *etcdserverpb.ResponseHeader) {
	if h.ClusterId != n.Cluster || h.MemberId != n.Member || h.RaftTerm == 0 {
		n.fields(b, h.ProtoReflect())
		return
	}
	b.WriteString("id")
	if h.Revision != 0 {
		fmt.Fprintf(b, " revision:%d", h.Revision)
	}
	n.unknown(b, h.ProtoReflect())
}

// keyValue prints the most frequent message shorter than its fields would.
func (n *Names) keyValue(b *strings.Builder, kv *mvccpb.KeyValue) {
	Bytes(b, kv.Key)
	b.WriteByte('=')
	Bytes(b, kv.Value)
	for _, f := range []struct {
		name  string
		value int64
	}{{"create", kv.CreateRevision}, {"mod", kv.ModRevision}, {"version", kv.Version}, {"lease", kv.Lease}} {
		if f.value != 0 {
			b.WriteString(" " + f.name + " ")
			n.number(b, uint64(f.value), strconv.FormatInt(f.value, 10))
		}
	}
	n.unknown(b, kv.ProtoReflect())
}

func (n *Names) unknown(b *strings.Builder, m protoreflect.Message) {
	if len(m.GetUnknown()) > 0 {
		fmt.Fprintf(b, " unknown fields %x", m.GetUnknown())
	}
}

// remaining prints the seconds a lease still has: `granted` while they are within the seconds a test takes of what was
// granted, since two servers need not read the clock at the same moment.
func (n *Names) remaining(b *strings.Builder, m protoreflect.Message, ttl int64) {
	granted := m.Get(m.Descriptor().Fields().ByName("grantedTTL")).Int()
	if ttl <= granted && ttl >= granted-30 && ttl >= 0 {
		b.WriteString("granted")
		return
	}
	b.WriteString(strconv.FormatInt(ttl, 10))
}

// Bytes prints quoted bytes, long ones as their start, length and checksum.
func Bytes(b *strings.Builder, v []byte) {
	if len(v) <= longBytes {
		b.WriteString(strconv.Quote(string(v)))
		return
	}
	fmt.Fprintf(b, "%s…(%d bytes, crc %08x)", strconv.Quote(string(v[:16])), len(v), crc32.ChecksumIEEE(v))
}
