package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/clock"
)

// ErrRemoved says that the cluster has removed this member: its data directory
// is of no use any more. A member that is removed while it runs has done its
// duty, and its process ends as after a stop (exit code 0, as etcd's); a start
// that finds it removed fails.
var ErrRemoved = errors.New("the member has been permanently removed from the cluster")

func removedError(self uint64) error {
	return fmt.Errorf("member %x: %w: delete its data directory; to take part again it must be added anew, and will have another ID", self, ErrRemoved)
}

// removalGrace is how long a removed member still answers: the entry that
// removes it goes out to others, and calls in hand end.
const removalGrace = time.Second

// departure stops a member that was removed.
type departure struct {
	self    uint64
	running context.Context // ends when the member stops
	stop    func(error)     // asks for the member's stop and does not block
	clock   clock.Clock
	log     *slog.Logger
	begun   atomic.Bool
}

// applied looks at a membership change as it was accepted. It is called by the
// applier and does not block; the batch is finished meanwhile.
func (d *departure) applied(cc *raftpb.ConfChange) {
	if cc.GetType() == raftpb.ConfChangeRemoveNode && cc.GetNodeId() == d.self {
		d.begin(errors.New("the removal was applied here"))
	}
}

// told takes what a peer said: it does not talk to this member any more.
func (d *departure) told(why error) { d.begin(why) }

func (d *departure) begin(why error) {
	if !d.begun.CompareAndSwap(false, true) {
		return
	}
	d.log.Warn("this member was removed from the cluster and stops; its data directory must be deleted",
		"member", fmt.Sprintf("%x", d.self), "reason", why)
	t := d.clock.NewTimer(removalGrace)
	go func() {
		defer t.Stop()
		select {
		case <-t.C():
			d.stop(removedError(d.self))
		case <-d.running.Done(): // it stops anyway
		}
	}()
}

// onRemoved hears from the transport that a peer takes this member for removed.
func (m *Member) onRemoved(why error) { m.departure.told(why) }
