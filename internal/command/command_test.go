package command

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

func mustMarshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// samples is one message of each kind with its fields set, and some odd ones.
func samples() []struct {
	kind Kind
	msg  proto.Message
} {
	txn := &pb.TxnRequest{
		Compare: []*pb.Compare{
			{Target: pb.Compare_MOD, Key: []byte("a"), TargetUnion: &pb.Compare_ModRevision{}},
			{Result: pb.Compare_NOT_EQUAL, Target: pb.Compare_VALUE, Key: []byte("b"), RangeEnd: []byte{0}, TargetUnion: &pb.Compare_Value{Value: []byte("v")}},
			{Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{}},
			{Result: 77, Target: -5, TargetUnion: &pb.Compare_Lease{Lease: -1}},
			{Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_CreateRevision{CreateRevision: 9}},
			{},
		},
		Success: []*pb.RequestOp{
			{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Lease: math.MinInt64, PrevKv: true}}},
			{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{}}},
			{},
			{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{
				Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{IgnoreLease: true, IgnoreValue: true}}}},
			}}},
		},
		Failure: []*pb.RequestOp{
			{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("z"), PrevKv: true}}},
			{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{}}},
		},
	}
	return []struct {
		kind Kind
		msg  proto.Message
	}{
		{KindRange, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b"), Limit: 1, Revision: -2, SortOrder: 1, SortTarget: 4, Serializable: true, KeysOnly: true, CountOnly: true, MinModRevision: 3, MaxModRevision: 4, MinCreateRevision: 5, MaxCreateRevision: 1 << 62}},
		{KindRange, &pb.RangeRequest{SortOrder: -1, SortTarget: 99}},
		{KindPut, &pb.PutRequest{Key: []byte("key"), Value: bytes.Repeat([]byte("v"), 300), Lease: 1 << 60, PrevKv: true, IgnoreValue: true, IgnoreLease: true}},
		{KindPut, &pb.PutRequest{Key: []byte{0xff, 0}}},
		{KindPut, &pb.PutRequest{}},
		{KindDeleteRange, &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, PrevKv: true}},
		{KindTxn, txn},
		{KindTxn, &pb.TxnRequest{}},
		{KindCompaction, &pb.CompactionRequest{Revision: 7, Physical: true}},
		{KindCompaction, &pb.CompactionRequest{Revision: -7}},
		{KindLeaseGrant, &pb.LeaseGrantRequest{TTL: 5, ID: -6}},
		{KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 6}},
		{KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: math.MaxUint64, Alarm: pb.AlarmType_CORRUPT}},
		{KindLeaseCheckpoint, &pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: 1, Remaining_TTL: 2}, {}}}},
		{KindAuthEnable, &pb.AuthEnableRequest{}},
		{KindAuthDisable, &pb.AuthDisableRequest{}},
		{KindAuthenticate, &pb.InternalAuthenticateRequest{Name: "bob", SimpleToken: "abc"}},
		{KindAuthStatus, &pb.AuthStatusRequest{}},
		{KindAuthUserAdd, &pb.AuthUserAddRequest{Name: "ö", HashedPassword: "aGFzaA==", Options: &authpb.UserAddOptions{NoPassword: true}}},
		{KindAuthUserDelete, &pb.AuthUserDeleteRequest{Name: "a"}},
		{KindAuthUserGet, &pb.AuthUserGetRequest{Name: "a"}},
		{KindAuthUserChangePassword, &pb.AuthUserChangePasswordRequest{Name: "a", HashedPassword: "eA=="}},
		{KindAuthUserGrantRole, &pb.AuthUserGrantRoleRequest{User: "a", Role: "r"}},
		{KindAuthUserRevokeRole, &pb.AuthUserRevokeRoleRequest{Name: "a", Role: "r"}},
		{KindAuthUserList, &pb.AuthUserListRequest{}},
		{KindAuthRoleList, &pb.AuthRoleListRequest{}},
		{KindAuthRoleAdd, &pb.AuthRoleAddRequest{Name: "r"}},
		{KindAuthRoleDelete, &pb.AuthRoleDeleteRequest{Role: "r"}},
		{KindAuthRoleGet, &pb.AuthRoleGetRequest{Role: "r"}},
		{KindAuthRoleGrantPermission, &pb.AuthRoleGrantPermissionRequest{Name: "r", Perm: &authpb.Permission{PermType: authpb.READWRITE, Key: []byte("k"), RangeEnd: []byte{0}}}},
		{KindAuthRoleRevokePermission, &pb.AuthRoleRevokePermissionRequest{Role: "r", Key: []byte("k")}},
		{KindClusterVersionSet, &membershippb.ClusterVersionSetRequest{Ver: "3.7.0"}},
		{KindClusterMemberAttrSet, &membershippb.ClusterMemberAttrSetRequest{Member_ID: 9, MemberAttributes: &membershippb.Attributes{Name: "n", ClientUrls: []string{"http://a", "http://b"}}}},
		{KindDowngradeInfoSet, &membershippb.DowngradeInfoSetRequest{Enabled: true, Ver: "3.6.0"}},
		{KindDowngradeVersionTest, &pb.DowngradeVersionTestRequest{Ver: "x"}},
	}
}

// TestEveryKind: what we write for each kind is what proto.Marshal writes for
// InternalRaftRequest, and both ways to decode it agree.
func TestEveryKind(t *testing.T) {
	seen := map[Kind]bool{}
	headers := []Header{{ID: 1}, {ID: math.MaxUint64, Username: "bob", AuthRevision: 12}, {ID: 300, Username: strings.Repeat("ü", 100)}}
	var c Command
	for _, s := range samples() {
		seen[s.kind] = true
		body := mustMarshal(t, s.msg)
		for _, h := range headers {
			norm, err := Normalize(s.kind, body)
			if err != nil || !bytes.Equal(norm, body) {
				t.Fatalf("%v: Normalize = %x, %v, want %x", s.kind, norm, err, body)
			}
			got, err := AppendRequest(nil, s.kind, h, norm)
			if err != nil {
				t.Fatal(err)
			}
			if n := RequestSize(s.kind, h, len(norm)); n != len(got) {
				t.Errorf("%v: RequestSize = %d, want %d", s.kind, n, len(got))
			}
			want := mustMarshal(t, raftRequest(s.kind, h, s.msg))
			if !bytes.Equal(got, want) {
				t.Fatalf("%v: AppendRequest\n%x, want\n%x", s.kind, got, want)
			}
			viaMessage, err := AppendMessage([]byte("x"), s.kind, h, s.msg)
			if err != nil || string(viaMessage) != "x"+string(want) {
				t.Fatalf("%v: AppendMessage = %x, %v", s.kind, viaMessage, err)
			}
			if err := Decode(got, &c); err != nil {
				t.Fatalf("%v: %v", s.kind, err)
			}
			if c.Kind != s.kind || c.ID != h.ID || c.Header != h {
				t.Fatalf("decoded %v %+v, want %v %+v", c.Kind, c.Header, s.kind, h)
			}
			sameRequest(t, &c, s.msg)

			var slow Command
			if err := slow.fromMessage(raftRequest(s.kind, h, s.msg)); err != nil {
				t.Fatal(err)
			}
			sameRequest(t, &slow, s.msg)
			// An unknown field puts the entry on the slow path for real.
			odd := protowire.AppendVarint(protowire.AppendTag(bytes.Clone(got), 5000, protowire.VarintType), 1)
			if slow.decodeFast(odd) {
				t.Fatal("unknown field taken by the fast decoder")
			}
			if err := Decode(odd, &slow); err != nil || slow.Header != h || slow.Kind != s.kind {
				t.Fatalf("%v with an unknown field: %v %+v", s.kind, err, slow.Header)
			}
			sameRequest(t, &slow, s.msg)
		}
	}
	for k := KindNone + 1; k < kindEnd; k++ {
		if !seen[k] {
			t.Errorf("no sample of %v", k)
		}
	}
}

// TestKindsAreAll compares the kinds with the fields of the generated type.
func TestKindsAreAll(t *testing.T) {
	fields := (&pb.InternalRaftRequest{}).ProtoReflect().Descriptor().Fields()
	n := 0
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.Number() == fieldID || f.Number() == fieldHeader {
			continue
		}
		n++
		k := kindOf(f.Number())
		if k == KindNone || k.Field() != f.Number() || k.String() != string(f.Name()) {
			t.Errorf("field %d %s: kind %v of field %d", f.Number(), f.Name(), k, k.Field())
			continue
		}
		if k.newMessage().ProtoReflect().Descriptor() != f.Message() {
			t.Errorf("%v: message %T, want %s", k, k.newMessage(), f.Message().FullName())
		}
	}
	if n != int(kindEnd)-1 {
		t.Errorf("%d kinds, %d request fields", kindEnd-1, n)
	}
	if k := kindOf(12); k != KindNone {
		t.Errorf("field 12 is %v", k)
	}
}

func raftRequest(k Kind, h Header, m proto.Message) *pb.InternalRaftRequest {
	r := &pb.InternalRaftRequest{Header: &pb.RequestHeader{ID: h.ID, Username: h.Username, AuthRevision: h.AuthRevision}}
	p := r.ProtoReflect()
	f := p.Descriptor().Fields().ByNumber(k.Field())
	v := p.NewField(f)
	proto.Merge(v.Message().Interface(), m)
	p.Set(f, v)
	return r
}

// sameRequest compares the request in c with m field by field, by turning m
// into our form with the slow converters and back through an independent one.
func sameRequest(t testing.TB, c *Command, m proto.Message) {
	t.Helper()
	got := toMessage(c)
	if !proto.Equal(got, m) {
		t.Fatalf("decoded\n%v, want\n%v", got, m)
	}
}

// toMessage turns the decoded request back into the generated type.
func toMessage(c *Command) proto.Message {
	switch c.Kind {
	case KindPut:
		return putMessage(&c.Put)
	case KindRange:
		return rangeMessage(&c.Range)
	case KindDeleteRange:
		return deleteMessage(&c.DeleteRange)
	case KindTxn:
		return txnMessage(&c.Txn)
	case KindCompaction:
		return &pb.CompactionRequest{Revision: c.Compaction.Revision, Physical: c.Compaction.Physical}
	}
	return c.Msg
}

func putMessage(p *PutRequest) *pb.PutRequest {
	return &pb.PutRequest{Key: p.Key, Value: p.Value, Lease: p.Lease, PrevKv: p.PrevKV, IgnoreValue: p.IgnoreValue, IgnoreLease: p.IgnoreLease}
}

func rangeMessage(r *RangeRequest) *pb.RangeRequest {
	return &pb.RangeRequest{Key: r.Key, RangeEnd: r.RangeEnd, Limit: r.Limit, Revision: r.Revision,
		SortOrder: pb.RangeRequest_SortOrder(r.SortOrder), SortTarget: pb.RangeRequest_SortTarget(r.SortTarget),
		Serializable: r.Serializable, KeysOnly: r.KeysOnly, CountOnly: r.CountOnly,
		MinModRevision: r.MinMod, MaxModRevision: r.MaxMod, MinCreateRevision: r.MinCreate, MaxCreateRevision: r.MaxCreate}
}

func deleteMessage(d *DeleteRangeRequest) *pb.DeleteRangeRequest {
	return &pb.DeleteRangeRequest{Key: d.Key, RangeEnd: d.RangeEnd, PrevKv: d.PrevKV}
}

func txnMessage(x *TxnRequest) *pb.TxnRequest {
	m := &pb.TxnRequest{Success: opMessages(x.Success), Failure: opMessages(x.Failure)}
	for _, c := range x.Compare {
		p := &pb.Compare{Result: pb.Compare_CompareResult(c.Result), Target: pb.Compare_CompareTarget(c.Target), Key: c.Key, RangeEnd: c.RangeEnd}
		switch c.Union {
		case UnionVersion:
			p.TargetUnion = &pb.Compare_Version{Version: c.Int}
		case UnionCreate:
			p.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: c.Int}
		case UnionMod:
			p.TargetUnion = &pb.Compare_ModRevision{ModRevision: c.Int}
		case UnionValue:
			p.TargetUnion = &pb.Compare_Value{Value: c.Value}
		case UnionLease:
			p.TargetUnion = &pb.Compare_Lease{Lease: c.Int}
		}
		m.Compare = append(m.Compare, p)
	}
	return m
}

func opMessages(ops []Op) (out []*pb.RequestOp) {
	for _, op := range ops {
		m := &pb.RequestOp{}
		switch op.Kind {
		case OpRange:
			m.Request = &pb.RequestOp_RequestRange{RequestRange: rangeMessage(op.Range)}
		case OpPut:
			m.Request = &pb.RequestOp_RequestPut{RequestPut: putMessage(op.Put)}
		case OpDeleteRange:
			m.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: deleteMessage(op.DeleteRange)}
		case OpTxn:
			m.Request = &pb.RequestOp_RequestTxn{RequestTxn: txnMessage(op.Txn)}
		}
		out = append(out, m)
	}
	return out
}

func TestOperands(t *testing.T) {
	for _, tc := range []struct {
		c      Compare
		number int64
		bytes  string
	}{
		{Compare{Target: 0, Union: UnionVersion, Int: 5}, 5, ""},
		{Compare{Target: 4, Union: UnionLease, Int: 5}, 5, ""},
		{Compare{Target: 1, Union: UnionVersion, Int: 5}, 0, ""},
		{Compare{Target: 1}, 0, ""},
		{Compare{Target: 3, Union: UnionValue, Value: []byte("x")}, 0, "x"},
		{Compare{Target: 3, Union: UnionLease, Int: 5}, 0, ""},
	} {
		if n, b := tc.c.Number(), tc.c.Bytes(); n != tc.number || string(b) != tc.bytes {
			t.Errorf("%+v: %d %q", tc.c, n, b)
		}
	}
}

func TestRefusals(t *testing.T) {
	put := mustMarshal(t, &pb.PutRequest{Key: []byte("k")})
	for name, err := range map[string]error{
		"no id":            second(AppendRequest(nil, KindPut, Header{}, put)),
		"no kind":          second(AppendRequest(nil, KindNone, Header{ID: 1}, put)),
		"kind beyond":      second(AppendRequest(nil, kindEnd, Header{ID: 1}, put)),
		"name not utf-8":   second(AppendRequest(nil, KindPut, Header{ID: 1, Username: "\xff"}, put)),
		"other message":    second(AppendMessage(nil, KindPut, Header{ID: 1}, &pb.RangeRequest{})),
		"bad version":      second(AppendMessage(nil, KindClusterVersionSet, Header{ID: 1}, &membershippb.ClusterVersionSetRequest{Ver: "3.7"})),
		"no attributes":    second(AppendMessage(nil, KindClusterMemberAttrSet, Header{ID: 1}, &membershippb.ClusterMemberAttrSetRequest{Member_ID: 1})),
		"no downgrade":     second(AppendMessage(nil, KindDowngradeInfoSet, Header{ID: 1}, &membershippb.DowngradeInfoSetRequest{Enabled: true})),
		"normalize none":   second(Normalize(KindNone, put)),
		"normalize unsafe": second(Normalize(KindClusterVersionSet, nil)),
	} {
		if !errors.Is(err, ErrDangerous) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := AppendMessage(nil, KindDowngradeInfoSet, Header{ID: 1}, &membershippb.DowngradeInfoSetRequest{}); err != nil {
		t.Errorf("cancelled downgrade: %v", err)
	}
	for name, err := range map[string]error{
		"user not utf-8": second(AppendMessage(nil, KindAuthUserAdd, Header{ID: 1}, &pb.AuthUserAddRequest{Name: "\xff"})),
		"cut":            second(Normalize(KindPut, put[:2])),
		"decode cut":     Decode([]byte{0x22, 0x05}, new(Command)),
		"decode garbage": Decode([]byte("\xffgarbage"), new(Command)),
	} {
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	header := appendHeader(nil, Header{ID: 1})
	both := appendMessageField(appendMessageField(bytes.Clone(header), 4, put), 5, nil)
	v2 := appendMessageField(bytes.Clone(header), fieldV2, []byte("\x12\x03PUT\x1a\x06/1/foo"))
	for name, data := range map[string][]byte{
		"two requests":      both,
		"no request":        header,
		"unknown request":   appendMessageField(bytes.Clone(header), 5000, put),
		"put without id":    appendMessageField(nil, 4, put),
		"user data of v2":   []byte("\x08\x07\x12\x03PUT\x1a\x06/1/foo"),
		"v2 in its field":   v2,
		"v2 sync":           []byte("\x08\x07\x12\x04SYNC\x1a\x00\x22\x00\x28\x00"),
		"v2 not a member":   []byte("\x08\x07\x12\x03PUT\x1a\x19/0/members/xyz/attributes"),
		"v2 delete":         []byte("\x08\x07\x12\x06DELETE\x1a\x0a/0/version"),
		"empty header only": {0xa2, 0x06, 0x00},
	} {
		if err := Decode(data, new(Command)); !errors.Is(err, ErrUnknown) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestIdentity: the legacy ID field goes before the one of the header.
func TestIdentity(t *testing.T) {
	for _, m := range []*pb.InternalRaftRequest{
		{ID: 7, Put: &pb.PutRequest{Key: []byte("k")}},
		{ID: 7, Header: &pb.RequestHeader{ID: 8}, Put: &pb.PutRequest{}},
		{Header: &pb.RequestHeader{ID: 7}, AuthEnable: &pb.AuthEnableRequest{}},
	} {
		var c Command
		if err := Decode(mustMarshal(t, m), &c); err != nil || c.ID != 7 {
			t.Errorf("%v: ID %d, %v", m, c.ID, err)
		}
	}
}

func TestLegacy(t *testing.T) {
	// As gogo writes a v2 Request: all fields but PrevExist and Refresh.
	v2 := func(id uint64, method, path, val string) []byte {
		b := protowire.AppendVarint([]byte{0x08}, id)
		b = protowire.AppendString(append(b, 0x12), method)
		b = protowire.AppendString(append(b, 0x1a), path)
		b = protowire.AppendString(append(b, 0x22), val)
		return append(b, "\x28\x00\x32\x00\x38\x00\x48\x00\x50\x00\x58\x00\x60\x00\x68\x00\x70\x00\x78\x00\x80\x01\x00"...)
	}
	inField := appendMessageField(nil, fieldV2, v2(5, "PUT", "/0/version", "3.5.0"))
	var c Command
	for _, data := range [][]byte{v2(5, "PUT", "/0/version", "3.5.0"), inField} {
		if err := Decode(data, &c); err != nil {
			t.Fatal(err)
		}
		if c.Kind != KindClusterVersionSet || c.ID != 5 || c.Header != (Header{ID: 5}) ||
			c.Msg.(*membershippb.ClusterVersionSetRequest).GetVer() != "3.5.0" {
			t.Errorf("decoded %v %+v %v", c.Kind, c.Header, c.Msg)
		}
	}
	data := v2(6, "PUT", "/0/members/8e9e05c52164694d/attributes", `{"name":"n1","clientURLs":["http://a:1","http://b:2"]}`)
	if err := Decode(data, &c); err != nil {
		t.Fatal(err)
	}
	want := &membershippb.ClusterMemberAttrSetRequest{Member_ID: 0x8e9e05c52164694d,
		MemberAttributes: &membershippb.Attributes{Name: "n1", ClientUrls: []string{"http://a:1", "http://b:2"}}}
	if c.Kind != KindClusterMemberAttrSet || c.ID != 6 || !proto.Equal(c.Msg, want) {
		t.Errorf("decoded %v %v", c.Kind, c.Msg)
	}
	if err := Decode(v2(6, "PUT", "/0/members/1/attributes", "{"), &c); !errors.Is(err, ErrMalformed) {
		t.Errorf("bad attributes: %v", err)
	}
}

// nested returns a Txn with that many levels, built from the inside out.
func nested(levels int) []byte {
	var heads [][]byte
	size := 0
	for range levels - 1 {
		for _, tag := range []byte{4<<3 | 2, 2<<3 | 2} {
			head := protowire.AppendVarint([]byte{tag}, uint64(size))
			heads = append(heads, head)
			size += len(head)
		}
	}
	slices.Reverse(heads)
	return bytes.Join(heads, nil)
}

func TestTxnLimits(t *testing.T) {
	var c Command
	for _, levels := range []int{1, 2, 128, MaxTxnDepth} {
		raw := nested(levels)
		if norm, err := Normalize(KindTxn, raw); err != nil || !bytes.Equal(norm, raw) {
			t.Fatalf("%d levels: %v", levels, err)
		}
	}
	deep := nested(MaxTxnDepth + 1)
	if _, err := Normalize(KindTxn, deep); !errors.Is(err, ErrTooComplex) {
		t.Errorf("too deep: %v", err)
	}
	// What is in the log must be understood all the same.
	entry, err := AppendRequest(nil, KindTxn, Header{ID: 1}, nested(3000))
	if err != nil {
		t.Fatal(err)
	}
	if err := Decode(entry, &c); err != nil {
		t.Fatal(err)
	}
	depth := 1
	for x := &c.Txn; len(x.Success) > 0; x = x.Success[0].Txn {
		depth++
	}
	if depth != 3000 {
		t.Errorf("decoded %d levels", depth)
	}
	if entry, err = AppendRequest(nil, KindTxn, Header{ID: 1}, nested(100_000)); err != nil {
		t.Fatal(err)
	}
	if err := Decode(entry, &c); !errors.Is(err, ErrMalformed) {
		t.Errorf("100 k levels: %v", err)
	}
	wide := bytes.Repeat([]byte{0x0a, 0x00}, MaxTxnPieces)
	if _, err := Normalize(KindTxn, wide); err != nil {
		t.Errorf("wide: %v", err)
	}
	wide = append(wide, 0x12, 0x00)
	if _, err := Normalize(KindTxn, wide); !errors.Is(err, ErrTooComplex) {
		t.Errorf("too wide: %v", err)
	}
	if entry, err = AppendRequest(nil, KindTxn, Header{ID: 1}, wide); err != nil {
		t.Fatal(err)
	}
	if err := Decode(entry, &c); err != nil || len(c.Txn.Compare) != MaxTxnPieces || len(c.Txn.Success) != 1 {
		t.Errorf("wide entry: %v", err)
	}
	if c.Reset(); c.arena.compares != nil {
		t.Error("the arena keeps a large slice")
	}
}

// TestArenaGrowth: pieces taken before the arena grew stay good.
func TestArenaGrowth(t *testing.T) {
	m := &pb.TxnRequest{}
	for i := range 40 {
		inner := &pb.TxnRequest{}
		for j := range 5 {
			inner.Success = append(inner.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte{byte(i), byte(j)}}}})
			inner.Compare = append(inner.Compare, &pb.Compare{Key: []byte{byte(i)}})
		}
		m.Success = append(m.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: inner}})
	}
	raw := mustMarshal(t, m)
	var a TxnArena
	for range 3 {
		a.Reset()
		var r TxnRequest
		if !ParseTxn(raw, &r, &a) || !proto.Equal(txnMessage(&r), m) {
			t.Fatal("decoded otherwise")
		}
	}
}

// TestDecodeReusesMemory: the hot kinds cost no allocation.
func TestDecodeReusesMemory(t *testing.T) {
	var c Command
	for _, s := range samples() {
		if s.kind > KindCompaction {
			continue
		}
		data, err := AppendRequest(nil, s.kind, Header{ID: 1, Username: "bob", AuthRevision: 3}, mustMarshal(t, s.msg))
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(100, func() {
			if err := Decode(data, &c); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%v: %v allocations", s.kind, n)
		}
	}
}

func TestHeaderReuse(t *testing.T) {
	raw := mustMarshal(t, &pb.RequestHeader{ID: 1, Username: "bob"})
	h := Header{Username: "eve", AuthRevision: 9}
	if !ParseHeader(raw, &h) || !reflect.DeepEqual(h, Header{ID: 1, Username: "bob"}) {
		t.Errorf("header %+v", h)
	}
	if !ParseHeader(nil, &h) || h != (Header{}) {
		t.Errorf("header %+v", h)
	}
}

// TestFeatureLevel: the level goes through the log, real members see an Alarm GET
// and nothing else, and no client's request carries one.
func TestFeatureLevel(t *testing.T) {
	want := FeatureLevel{Level: 1, Fingerprint: 0xfedcba9876543210}
	data, err := AppendFeatureLevel(nil, Header{ID: 300}, want)
	if err != nil {
		t.Fatal(err)
	}
	var c Command
	if err := Decode(data, &c); err != nil || c.Kind != KindAlarm || c.ID != 300 || c.FeatureLevel == nil || *c.FeatureLevel != want {
		t.Fatalf("decoded %+v, %v", c, err)
	}
	m := new(pb.InternalRaftRequest)
	if err := proto.Unmarshal(data, m); err != nil {
		t.Fatal(err)
	}
	field := m.GetHeader().ProtoReflect().GetUnknown()
	m.GetHeader().ProtoReflect().SetUnknown(nil)
	if known := (&pb.InternalRaftRequest{Header: &pb.RequestHeader{ID: 300}, Alarm: &pb.AlarmRequest{}}); len(field) == 0 || !proto.Equal(m, known) {
		t.Fatalf("real members read %v", m)
	}

	// The next command into the same memory has none.
	plain, err := AppendMessage(nil, KindAlarm, Header{ID: 1}, &pb.AlarmRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if err := Decode(plain, &c); err != nil || c.FeatureLevel != nil {
		t.Fatalf("decoded %+v, %v", c, err)
	}

	entry := func(change func(*pb.InternalRaftRequest)) []byte {
		m := &pb.InternalRaftRequest{Header: &pb.RequestHeader{ID: 300}, Alarm: &pb.AlarmRequest{}}
		m.GetHeader().ProtoReflect().SetUnknown(slices.Clone(field))
		change(m)
		return mustMarshal(t, m)
	}
	if err := Decode(entry(func(*pb.InternalRaftRequest) {}), &c); err != nil || c.FeatureLevel == nil {
		t.Fatalf("the test makes no entry that counts: %v", err)
	}
	for what, data := range map[string][]byte{
		"raises an alarm": entry(func(m *pb.InternalRaftRequest) { m.Alarm.Action = pb.AlarmRequest_ACTIVATE }),
		"is no alarm request": entry(func(m *pb.InternalRaftRequest) {
			m.Alarm, m.AuthStatus = nil, &pb.AuthStatusRequest{}
		}),
		"has it twice": entry(func(m *pb.InternalRaftRequest) {
			m.Header.ProtoReflect().SetUnknown(append(slices.Clone(field), field...))
		}),
		"has it too short": entry(func(m *pb.InternalRaftRequest) {
			b := slices.Clone(field[:len(field)-1])
			b[3]--
			m.Header.ProtoReflect().SetUnknown(b)
		}),
		"has it in the request": entry(func(m *pb.InternalRaftRequest) {
			m.Header.ProtoReflect().SetUnknown(nil)
			m.Alarm.ProtoReflect().SetUnknown(slices.Clone(field))
		}),
	} {
		if err := Decode(data, &c); err != nil || c.FeatureLevel != nil {
			t.Errorf("an entry that %s: level %v, error %v", what, c.FeatureLevel, err)
		}
	}
	request := &pb.AlarmRequest{}
	request.ProtoReflect().SetUnknown(slices.Clone(field))
	if body, err := Normalize(KindAlarm, mustMarshal(t, request)); err != nil || len(body) != 0 {
		t.Errorf("a client's request goes on as %x, %v", body, err)
	}
	if got, err := AppendFeatureLevel([]byte("x"), Header{}, want); !errors.Is(err, ErrDangerous) || string(got) != "x" {
		t.Errorf("without an ID: %x, %v", got, err)
	}
}
