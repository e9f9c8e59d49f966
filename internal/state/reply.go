package state

import (
	"slices"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/mvcc"
)

// Result is what applying one log entry came to. It is the same on every
// member, but for Reply, which only a member with a waiter needs.
type Result struct {
	Index, Term uint64
	// ID is the request's identity (state-machine.md, section 1.2), 0 if it has none.
	ID uint64
	// Reply answers the request; nil if Err is set, unless the request was made
	// and only its answer is an error (OverQuota). Where nobody wants an answer it
	// is nil, too, unless it pins a view or tells of a compaction.
	Reply *Reply
	// Err is the caller's error: a sentinel of this package, mvcc, lease, auth,
	// member or alarm.
	Err error
	// ConfChange is set for a membership entry: the change that raft must now
	// apply. Its NodeId is 0 when the change was refused.
	ConfChange *raftpb.ConfChange
	// Empty marks the entry that starts a term.
	Empty bool
	// OverQuota says that the store was above its quota when the request ran.
	// Whoever serves raises the NOSPACE alarm.
	OverQuota bool
}

// Reply is the content of an answer. Nothing in it is encoded yet: what has to
// be read is read later, from the pinned views, by the member that answers.
type Reply struct {
	// Revision is the header's revision, 0 where the kind leaves it to the edge.
	Revision int64
	// Op answers Put, DeleteRange, Range and Txn.
	Op OpReply
	// LeaseID and LeaseTTL (seconds, as granted) answer LeaseGrant.
	LeaseID, LeaseTTL int64
	// Message answers the rare kinds: the API's response without its header.
	Message proto.Message
	// CompactionDone is closed when the revisions below a Compaction were
	// physically removed. Nil for other kinds.
	CompactionDone <-chan struct{}
	// OnRelease, if not nil, is called when the reply is released: somebody keeps
	// open what its views read.
	OnRelease func()
}

// Pins says whether the reply has views to be read.
func (r *Reply) Pins() bool { return r.Op.pins() }

// Release gives up the views that the reply pins. It must be called once, also
// by a member that has no one to answer.
func (r *Reply) Release() {
	if r == nil {
		return
	}
	r.Op.release()
	if done := r.OnRelease; done != nil {
		r.OnRelease = nil
		done()
	}
}

// OpKind tells the kinds of operation in a transaction apart.
type OpKind uint8

// The kinds of operation.
const (
	OpNone OpKind = iota
	OpRange
	OpPut
	OpDeleteRange
	OpTxn
)

// OpReply answers one operation, alone or within a transaction.
type OpReply struct {
	Kind OpKind
	// Revision is the header's revision of an inner operation. Inner
	// transactions have an empty header, so theirs is 0.
	Revision int64
	// Deleted counts the keys that a DeleteRange removed.
	Deleted int64
	// View is the moment at which Key, End and Range are to be read: the rows of
	// a Range, or the previous values that a Put or DeleteRange was asked for
	// (the moment before it). Nil if there is nothing to read.
	View     *mvcc.View
	Key, End []byte
	Range    mvcc.RangeOptions
	// Succeeded and Ops answer a transaction: which branch ran, and its steps.
	Succeeded bool
	Ops       []OpReply
}

func (o *OpReply) pins() bool {
	return o.View != nil || slices.ContainsFunc(o.Ops, func(op OpReply) bool { return op.pins() })
}

func (o *OpReply) release() {
	if o.View != nil {
		o.View.Release()
		o.View = nil
	}
	for i := range o.Ops {
		o.Ops[i].release()
	}
}
