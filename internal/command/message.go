package command

import pb "go.etcd.io/etcd/api/v3/etcdserverpb"

// The functions below are for entries that are valid but not canonical. Their
// slices are the messages'.

func putOf(r *pb.PutRequest) PutRequest {
	return PutRequest{
		Key: r.GetKey(), Value: r.GetValue(), Lease: r.GetLease(),
		PrevKV: r.GetPrevKv(), IgnoreValue: r.GetIgnoreValue(), IgnoreLease: r.GetIgnoreLease(),
	}
}

func rangeOf(r *pb.RangeRequest) RangeRequest {
	return RangeRequest{
		Key: r.GetKey(), RangeEnd: r.GetRangeEnd(), Limit: r.GetLimit(), Revision: r.GetRevision(),
		SortOrder: int32(r.GetSortOrder()), SortTarget: int32(r.GetSortTarget()),
		Serializable: r.GetSerializable(), KeysOnly: r.GetKeysOnly(), CountOnly: r.GetCountOnly(),
		MinMod: r.GetMinModRevision(), MaxMod: r.GetMaxModRevision(),
		MinCreate: r.GetMinCreateRevision(), MaxCreate: r.GetMaxCreateRevision(),
	}
}

func deleteRangeOf(r *pb.DeleteRangeRequest) DeleteRangeRequest {
	return DeleteRangeRequest{Key: r.GetKey(), RangeEnd: r.GetRangeEnd(), PrevKV: r.GetPrevKv()}
}

// txnOf recurses as deep as the protobuf runtime let the message nest.
func txnOf(r *pb.TxnRequest) TxnRequest {
	t := TxnRequest{Success: opsOf(r.GetSuccess()), Failure: opsOf(r.GetFailure())}
	if n := len(r.GetCompare()); n > 0 {
		t.Compare = make([]Compare, n)
	}
	for i, c := range r.GetCompare() {
		t.Compare[i] = compareOf(c)
	}
	return t
}

func opsOf(ops []*pb.RequestOp) []Op {
	if len(ops) == 0 {
		return nil
	}
	out := make([]Op, len(ops))
	for i, op := range ops {
		switch r := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			v := rangeOf(r.RequestRange)
			out[i] = Op{Kind: OpRange, Range: &v}
		case *pb.RequestOp_RequestPut:
			v := putOf(r.RequestPut)
			out[i] = Op{Kind: OpPut, Put: &v}
		case *pb.RequestOp_RequestDeleteRange:
			v := deleteRangeOf(r.RequestDeleteRange)
			out[i] = Op{Kind: OpDeleteRange, DeleteRange: &v}
		case *pb.RequestOp_RequestTxn:
			v := txnOf(r.RequestTxn)
			out[i] = Op{Kind: OpTxn, Txn: &v}
		}
	}
	return out
}

func compareOf(c *pb.Compare) Compare {
	out := Compare{
		Result: int32(c.GetResult()), Target: int32(c.GetTarget()), Key: c.GetKey(), RangeEnd: c.GetRangeEnd(),
	}
	switch u := c.GetTargetUnion().(type) {
	case *pb.Compare_Version:
		out.Union, out.Int = UnionVersion, u.Version
	case *pb.Compare_CreateRevision:
		out.Union, out.Int = UnionCreate, u.CreateRevision
	case *pb.Compare_ModRevision:
		out.Union, out.Int = UnionMod, u.ModRevision
	case *pb.Compare_Value:
		out.Union, out.Value = UnionValue, u.Value
	case *pb.Compare_Lease:
		out.Union, out.Int = UnionLease, u.Lease
	}
	return out
}
