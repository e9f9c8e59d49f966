package server

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/storage"
)

// announcerOf is member 2 of a cluster; tries takes what each proposal gets.
func announcerOf(c *fakeCluster, tries chan error) *announcer {
	return &announcer{
		self: 2, name: "two", clientURLs: []string{"http://c:1"}, requestTimeout: 7 * time.Second, pause: 100 * time.Millisecond,
		root: c.Root, failed: make(chan error), clock: c.clock, log: slog.New(slog.DiscardHandler),
		caughtUp: func(context.Context) error { return <-tries },
		propose: func(_ context.Context, _ command.Kind, msg proto.Message) error {
			err := <-tries
			if err == nil {
				c.apply(func(b *storage.Batch) error {
					return c.table.SetAttributes(b, msg.(*membershippb.ClusterMemberAttrSetRequest))
				})
			}
			return err
		},
	}
}

func TestAnnounce(t *testing.T) {
	c := newFakeCluster(t, "1")
	tries := make(chan error)
	a := announcerOf(c, tries)
	ended := make(chan error, 1)
	go func() { ended <- a.announce(t.Context()) }()
	// Not before it is in its own table: etcd members would stop.
	c.clock.WaitAlarms(1)
	select {
	case tries <- nil:
		t.Fatal("a member that nobody knows told of itself")
	default:
	}
	c.apply(func(b *storage.Batch) error {
		_, err := c.table.ApplyConfChange(b, member.AddChange(0, member.Member{ID: 2, PeerURLs: []string{peerURL(2)}}))
		return err
	})
	c.clock.Advance(a.pause)
	tries <- errors.New("no leader")
	c.clock.WaitAlarms(1)
	c.clock.Advance(a.pause)
	tries <- nil
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if m := c.Root().Member(2); m.Name != "two" || !slices.Equal(m.ClientURLs, []string{"http://c:1"}) {
		t.Errorf("%+v", m)
	}
	// When all know it already, nothing is told, but asked whether all before is applied.
	a.propose = nil
	go func() { ended <- a.announce(t.Context()) }()
	tries <- nil
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAnnounceEnds(t *testing.T) {
	c := newFakeCluster(t, "1 2")
	tries := make(chan error)
	a := announcerOf(c, tries)
	failed := make(chan error, 1)
	a.failed = failed
	disk := errors.New("disk")
	ended := make(chan error, 1)
	go func() { ended <- a.announce(t.Context()) }()
	tries <- errors.New("stopped")
	failed <- disk
	if err := <-ended; !errors.Is(err, disk) {
		t.Errorf("a failed member: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- a.announce(ctx) }()
	tries <- errors.New("no leader")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("called off: %v", err)
	}
	c.apply(func(b *storage.Batch) error {
		_, err := c.table.ApplyConfChange(b, member.RemoveChange(0, 2))
		return err
	})
	if err := a.announce(t.Context()); !errors.Is(err, ErrRemoved) {
		t.Errorf("removed: %v", err)
	}
}

// TestAnnounceOfAMemberRemovedMeanwhile: between the look whether it belongs and the try, a snapshot may take this member away.
func TestAnnounceOfAMemberRemovedMeanwhile(t *testing.T) {
	c := newFakeCluster(t, "1 2")
	a := announcerOf(c, make(chan error))
	looks := 0
	a.root = func() *member.Root {
		if looks++; looks == 2 {
			c.apply(func(b *storage.Batch) error {
				_, err := c.table.ApplyConfChange(b, member.RemoveChange(0, 2))
				return err
			})
		}
		return c.Root()
	}
	ended := make(chan error, 1)
	go func() { ended <- a.announce(t.Context()) }()
	c.clock.WaitAlarms(1)
	c.clock.Advance(a.pause)
	if err := <-ended; !errors.Is(err, ErrRemoved) {
		t.Error(err)
	}
}

func TestDeparture(t *testing.T) {
	for _, c := range []struct {
		what string
		do   func(*departure)
		goes bool
	}{
		{"own removal", func(d *departure) { d.applied(member.RemoveChange(0, 2)) }, true},
		{"a peer's word", func(d *departure) { d.told(errors.New("410")) }, true},
		{"both", func(d *departure) { d.told(errors.New("410")); d.applied(member.RemoveChange(0, 2)) }, true},
		{"another's removal", func(d *departure) { d.applied(member.RemoveChange(0, 1)) }, false},
		{"a refused removal", func(d *departure) {
			d.applied(&raftpb.ConfChange{Type: raftpb.ConfChangeRemoveNode.Enum(), NodeId: proto.Uint64(0)})
		}, false},
		{"own promotion", func(d *departure) { d.applied(member.PromoteChange(0, 2)) }, false},
	} {
		clk := newFakeCluster(t, "").clock
		stopped := make(chan error, 2)
		d := &departure{self: 2, running: t.Context(), stop: func(err error) { stopped <- err }, clock: clk, log: slog.New(slog.DiscardHandler)}
		c.do(d)
		if clk.Alarms() != map[bool]int{true: 1}[c.goes] || len(stopped) > 0 {
			t.Errorf("%s: %d alarms, stopped at once %v", c.what, clk.Alarms(), len(stopped) > 0)
		}
		clk.Advance(removalGrace)
		if c.goes {
			if err := <-stopped; !errors.Is(err, ErrRemoved) {
				t.Errorf("%s: %v", c.what, err)
			}
		}
	}
	// A member that stops meanwhile is not stopped again.
	clk := newFakeCluster(t, "").clock
	ctx, cancel := context.WithCancel(t.Context())
	d := &departure{self: 2, running: ctx, stop: func(error) { t.Error("stopped") }, clock: clk, log: slog.New(slog.DiscardHandler)}
	d.told(errors.New("410"))
	cancel()
	for clk.Alarms() > 0 {
		clk.Advance(0)
	}
}
