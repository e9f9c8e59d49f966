package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/rpc"
)

// membership changes who belongs to the cluster and who leads it: the part of
// rpc.Cluster that decides. Everything is checked before it is proposed, for an
// entry stays in everybody's log.
type membership struct {
	self           uint64
	strict         bool // --strict-reconfig-check
	tick           time.Duration
	requestTimeout time.Duration

	root     func() *member.Root // what this member has applied
	raft     changer
	ids      *consensus.IDs
	active   func(id uint64) time.Time       // since when a member is connected, zero if it is not
	caughtUp func(ctx context.Context) error // waits until all that is committed now is applied here
	peers    promoter
	clock    clock.Clock

	promotions *promotionMetrics
}

// changer is the part of *consensus.Node that changes members.
type changer interface {
	Leader() uint64
	Progress() []consensus.Progress
	ProposeConfChange(p consensus.ConfProposal) error
	Cancel(id uint64)
	TransferLeadership(to uint64)
	HandOver(ctx context.Context) error
}

// promoter asks another member to promote: *peer.Client.
type promoter interface {
	Promote(ctx context.Context, urls []string, id uint64, token string) ([]peer.Member, error)
}

// AddMember implements rpc.Cluster.
func (c *membership) AddMember(ctx context.Context, peerURLs []string, learner bool) (*pb.Member, []*pb.Member, error) {
	if err := member.CheckPeerURLs(peerURLs); err != nil {
		return nil, nil, err
	}
	if c.strict {
		if err := c.health().mayAdd(learner); err != nil {
			return nil, nil, err
		}
	}
	urls := slices.Sorted(slices.Values(peerURLs))
	m := member.Member{ID: c.newID(urls), PeerURLs: urls, IsLearner: learner}
	members, err := c.change(ctx, member.AddChange(c.ids.Next(), m))
	if err != nil {
		return nil, nil, err
	}
	return wireMember(&m), members, nil
}

// newID is an ID that no member has or had. It is made of the URLs and the
// second, so one that is removed and added again at once needs another second.
func (c *membership) newID(urls []string) uint64 {
	root := c.root()
	for now := c.clock.Now(); ; now = now.Add(time.Second) {
		if id := member.NewID(urls, now); id != 0 && !root.Removed(id) && root.Member(id) == nil {
			return id
		}
	}
}

// RemoveMember implements rpc.Cluster.
func (c *membership) RemoveMember(ctx context.Context, id uint64) ([]*pb.Member, error) {
	if c.strict {
		if err := c.health().mayRemove(id); err != nil {
			return nil, err
		}
	}
	if id == c.self && c.raft.Leader() == c.self {
		// Whoever follows a leader that was removed waits for an election. If
		// nobody can take over, the removal itself will tell.
		handing, cancel := context.WithTimeout(ctx, c.requestTimeout)
		_ = c.raft.HandOver(handing)
		cancel()
	}
	return c.change(ctx, member.RemoveChange(c.ids.Next(), id))
}

// UpdateMember implements rpc.Cluster.
func (c *membership) UpdateMember(ctx context.Context, id uint64, peerURLs []string) ([]*pb.Member, error) {
	if err := member.CheckPeerURLs(peerURLs); err != nil {
		return nil, err
	}
	return c.change(ctx, member.UpdateChange(c.ids.Next(), id, slices.Sorted(slices.Values(peerURLs))))
}

// PromoteMember implements rpc.Cluster. Only the leader knows how far a learner
// is, so a follower has it do the work.
func (c *membership) PromoteMember(ctx context.Context, id uint64, token string) ([]*pb.Member, error) {
	ctx, cancel := context.WithTimeout(ctx, c.requestTimeout)
	defer cancel()
	for {
		leader := c.raft.Leader()
		if leader == c.self {
			members, err := c.promote(ctx, id)
			if !errors.Is(err, rpc.ErrNotLeader) {
				return members, err
			}
		}
		err := errors.New("no leader is known")
		if m := c.root().Member(leader); m != nil && leader != c.self {
			var list []peer.Member
			if list, err = c.peers.Promote(ctx, m.PeerURLs, id, token); err == nil {
				return c.promoted(ctx, list), nil
			}
			for _, e := range []struct{ theirs, ours error }{
				{peer.ErrMemberNotFound, member.ErrNotFound}, {peer.ErrNotLearner, member.ErrNotLearner}, {peer.ErrLearnerNotReady, member.ErrLearnerNotReady},
			} {
				if errors.Is(err, e.theirs) {
					return nil, fmt.Errorf("leader %x on member %x: %w", leader, id, e.ours)
				}
			}
		}
		if perr := pause(ctx, c.clock, c.tick); perr != nil {
			ended := consensus.ErrTimeout
			if errors.Is(perr, context.Canceled) {
				ended = consensus.ErrCanceled
			}
			return nil, fmt.Errorf("promotion of member %x by leader %x: %v: %w", id, leader, err, ended)
		}
	}
}

// promoted is the list of members after the leader promoted one: what this
// member has, once it has applied that, or else what the leader says.
func (c *membership) promoted(ctx context.Context, said []peer.Member) []*pb.Member {
	if err := c.caughtUp(ctx); err == nil {
		return wireMembers(c.root())
	}
	out := make([]*pb.Member, len(said))
	for i, m := range said {
		m := member.Member(m)
		out[i] = wireMember(&m)
	}
	return out
}

// readyRatio is how much of the leader's log a learner has when it may vote.
const readyRatio = 0.9

// promote is for the leader. ErrNotLeader says that it is not.
func (c *membership) promote(ctx context.Context, id uint64) ([]*pb.Member, error) {
	members, err := c.tryPromote(ctx, id)
	c.promotions.ended(err)
	return members, err
}

func (c *membership) tryPromote(ctx context.Context, id uint64) ([]*pb.Member, error) {
	cc := member.PromoteChange(c.ids.Next(), id)
	if err := c.validate(ctx, cc); err != nil {
		return nil, err
	}
	if ready, known := ready(c.raft.Progress(), c.self, id); !known && c.raft.Leader() != c.self {
		return nil, rpc.ErrNotLeader
	} else if !ready { // or so new that raft has not told of it
		return nil, fmt.Errorf("promotion of member %x: %w", id, member.ErrLearnerNotReady)
	}
	if c.strict {
		if err := c.health().mayPromote(); err != nil {
			return nil, err
		}
	}
	return c.change(ctx, cc)
}

// ready says whether a member has nearly all of the leader's log; known is false
// if raft knows no such member.
func ready(list []consensus.Progress, leader, id uint64) (ready, known bool) {
	var last, match uint64
	for _, p := range list {
		if p.ID == leader {
			last = p.Match
		}
		if p.ID == id {
			match, known = p.Match, true
		}
	}
	return known && float64(match) >= float64(last)*readyRatio, known
}

// MoveLeader implements rpc.Cluster.
func (c *membership) MoveLeader(ctx context.Context, target uint64) error {
	if c.raft.Leader() != c.self {
		return rpc.ErrNotLeader
	}
	if m := c.root().Member(target); m == nil || m.IsLearner {
		return fmt.Errorf("member %x: %w", target, rpc.ErrBadLeaderTransferee)
	}
	if target == c.self {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.requestTimeout)
	defer cancel()
	t := c.clock.NewTicker(c.tick)
	defer t.Stop()
	c.raft.TransferLeadership(target)
	for c.raft.Leader() != target {
		select {
		case <-t.C():
		case <-ctx.Done():
			return fmt.Errorf("to member %x, %x leads: %w", target, c.raft.Leader(), rpc.ErrLeaderTransferTimeout)
		}
	}
	return nil
}

// validate says whether a change can be made. What this member has applied may
// be old, so it refuses only after it has caught up.
func (c *membership) validate(ctx context.Context, cc *raftpb.ConfChange) error {
	if c.root().ValidateConfChange(cc) == nil {
		return nil
	}
	if err := c.caughtUp(ctx); err != nil {
		return err
	}
	return c.root().ValidateConfChange(cc)
}

// change proposes a change of members and waits until it is applied here.
func (c *membership) change(ctx context.Context, cc *raftpb.ConfChange) ([]*pb.Member, error) {
	if err := c.validate(ctx, cc); err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	done := make(chan error, 1)
	err := c.raft.ProposeConfChange(consensus.ConfProposal{Change: cc, Deadline: deadline, Done: func(r consensus.Result, err error) {
		release(r)
		if err == nil {
			err = r.Err
		}
		done <- err
	}})
	if err != nil {
		return nil, err
	}
	select {
	case err = <-done:
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.Canceled) {
			c.raft.Cancel(cc.GetId())
		}
		err = <-done // within a tick
	}
	if err != nil {
		return nil, err
	}
	return wireMembers(c.root()), nil
}

// wireMembers are the members as clients see them, by ID.
func wireMembers(root *member.Root) []*pb.Member {
	var out []*pb.Member
	for _, m := range root.List() {
		out = append(out, wireMember(m))
	}
	return out
}

func wireMember(m *member.Member) *pb.Member {
	return &pb.Member{ID: m.ID, Name: m.Name, PeerURLs: slices.Clone(m.PeerURLs), ClientURLs: slices.Clone(m.ClientURLs), IsLearner: m.IsLearner}
}
