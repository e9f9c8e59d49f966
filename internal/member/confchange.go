package member

import (
	"encoding/json"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/storage"
)

// Context travels in a membership change as JSON.
type Context struct {
	Member
	// IsPromote marks an AddNode that makes a voter of a learner.
	IsPromote bool `json:"isPromote,omitempty"`
}

// Encode returns the bytes for ConfChange.Context.
func (c Context) Encode() []byte { return mustJSON(c) }

// AddChange returns the change that adds m, as a learner if it is one; id is
// the identity by which the proposer knows it again, 0 for a founding member.
func AddChange(id uint64, m Member) *raftpb.ConfChange {
	typ := raftpb.ConfChangeAddNode
	if m.IsLearner {
		typ = raftpb.ConfChangeAddLearnerNode
	}
	return change(id, typ, m.ID, Context{Member: m}.Encode())
}

// PromoteChange returns the change that makes a voter of a learner.
func PromoteChange(id, member uint64) *raftpb.ConfChange {
	return change(id, raftpb.ConfChangeAddNode, member, Context{Member: Member{ID: member}, IsPromote: true}.Encode())
}

// UpdateChange returns the change that replaces a member's peer URLs.
func UpdateChange(id, member uint64, peerURLs []string) *raftpb.ConfChange {
	return change(id, raftpb.ConfChangeUpdateNode, member, Context{Member: Member{ID: member, PeerURLs: peerURLs}}.Encode())
}

// RemoveChange returns the change that removes a member.
func RemoveChange(id, member uint64) *raftpb.ConfChange {
	return change(id, raftpb.ConfChangeRemoveNode, member, nil)
}

func change(id uint64, typ raftpb.ConfChangeType, member uint64, context []byte) *raftpb.ConfChange {
	cc := &raftpb.ConfChange{Type: typ.Enum(), NodeId: proto.Uint64(member), Context: context}
	if id != 0 {
		cc.Id = proto.Uint64(id)
	}
	return cc
}

// ValidateConfChange says whether a change can be made, with the error that
// applying it would give. Whoever is to propose one asks first.
func (r *Root) ValidateConfChange(cc *raftpb.ConfChange) error {
	_, err := r.judge(cc)
	return err
}

// judge decides about a change and returns its context, which is zero for a
// removal.
func (r *Root) judge(cc *raftpb.ConfChange) (ctx Context, err error) {
	id, typ := cc.GetNodeId(), cc.GetType()
	defer func() {
		if err != nil {
			err = fmt.Errorf("%v of member %x: %w", typ, id, err)
		}
	}()
	if id == 0 {
		return ctx, ErrMalformed
	}
	if typ != raftpb.ConfChangeRemoveNode {
		if err := json.Unmarshal(cc.GetContext(), &ctx); err != nil {
			return ctx, fmt.Errorf("context %q: %w: %w", cc.GetContext(), ErrMalformed, err)
		}
		if ctx.ID != id {
			return ctx, fmt.Errorf("context is of member %x: %w", ctx.ID, ErrMalformed)
		}
	}
	if r.Removed(id) {
		return ctx, ErrRemoved
	}
	m := r.Member(id)
	voters, learners := r.Count()
	switch typ {
	case raftpb.ConfChangeAddNode, raftpb.ConfChangeAddLearnerNode:
		if ctx.IsPromote {
			return ctx, judgePromotion(m, typ)
		}
		if m != nil {
			return ctx, ErrExists
		}
		if err := r.judgeURLs(ctx); err != nil {
			return ctx, err
		}
		if typ == raftpb.ConfChangeAddLearnerNode && learners >= r.maxLearners {
			return ctx, fmt.Errorf("there are %d learners, at most %d are allowed: %w", learners, r.maxLearners, ErrTooManyLearners)
		}
		// Raft goes by the type, so the table does too (M2).
		ctx.IsLearner = typ == raftpb.ConfChangeAddLearnerNode
		return ctx, nil
	case raftpb.ConfChangeRemoveNode:
		if m == nil {
			return ctx, ErrNotFound
		}
		if voters == 1 && !m.IsLearner {
			return ctx, ErrLastVoter // raft cannot go on without any
		}
		return ctx, nil
	case raftpb.ConfChangeUpdateNode:
		if m == nil {
			return ctx, ErrNotFound
		}
		return ctx, r.judgeURLs(ctx)
	}
	return ctx, ErrMalformed
}

func judgePromotion(m *Member, typ raftpb.ConfChangeType) error {
	switch {
	case typ != raftpb.ConfChangeAddNode:
		return ErrMalformed
	case m == nil:
		return ErrNotFound
	case !m.IsLearner:
		return ErrNotLearner
	}
	return nil
}

// judgeURLs looks for the peer URLs of a change at other members.
func (r *Root) judgeURLs(ctx Context) error {
	for _, m := range r.members {
		for _, url := range ctx.PeerURLs {
			if m.ID != ctx.ID && slices.Contains(m.PeerURLs, url) {
				return fmt.Errorf("%s is used by member %x: %w", url, m.ID, ErrPeerURLExists)
			}
		}
	}
	return nil
}

// ApplyConfChange judges a change and makes it, and returns what is to be given
// to raft: the change, or if it was refused, a copy with node ID 0, which does
// nothing but end its being pending. The error is for who proposed it.
func (t *Table) ApplyConfChange(b *storage.Batch, cc *raftpb.ConfChange) (forRaft *raftpb.ConfChange, err error) {
	ctx, err := t.root.judge(cc)
	if err != nil {
		refused := proto.Clone(cc).(*raftpb.ConfChange)
		refused.NodeId = proto.Uint64(0)
		return refused, err
	}
	id := cc.GetNodeId()
	switch {
	case cc.GetType() == raftpb.ConfChangeRemoveNode:
		t.remove(b, id)
	case ctx.IsPromote:
		m := *t.root.Member(id)
		m.IsLearner = false
		t.set(b, &m)
	case cc.GetType() == raftpb.ConfChangeUpdateNode:
		m := *t.root.Member(id)
		m.PeerURLs = ctx.PeerURLs
		t.set(b, &m)
	default:
		t.set(b, &ctx.Member)
		t.setFeatureLevel(b, 0) // nobody knows yet what the new one is
	}
	return cc, nil
}
