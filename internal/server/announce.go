package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
)

// announcer tells the cluster this member's name and client URLs at a start,
// unless it knows them: a member whose disk is full cannot propose, and yet is
// to serve reads. When that is applied here, or a read is confirmed, so is
// everything committed before (B2), and clients can be served.
type announcer struct {
	self           uint64
	name           string
	clientURLs     []string
	requestTimeout time.Duration
	pause          time.Duration // between two looks or tries

	root     func() *member.Root
	caughtUp func(ctx context.Context) error
	propose  func(ctx context.Context, kind command.Kind, msg proto.Message) error // returns once it is applied here
	failed   <-chan error                                                          // why the member must stop
	clock    clock.Clock
	log      *slog.Logger
}

// announce returns when what this member tells of itself is applied here.
func (a *announcer) announce(ctx context.Context) error {
	if err := a.belong(ctx); err != nil {
		return err
	}
	for {
		err := a.try(ctx)
		if err == nil {
			return nil
		}
		a.log.Warn("publishing this member failed, trying again", "member", fmt.Sprintf("%x", a.self), "error", err)
		if err := a.wait(ctx, "publishing this member"); err != nil {
			return err
		}
		if err := a.belong(ctx); err != nil {
			return err
		}
	}
}

// belong waits until this member stands in its own table: the attributes of a
// member that nobody knows would stop the etcd members that apply them.
func (a *announcer) belong(ctx context.Context) error {
	for waited := false; ; waited = true {
		root := a.root()
		switch {
		case root.Removed(a.self):
			return removedError(a.self)
		case root.Member(a.self) != nil:
			return nil
		case !waited:
			a.log.Info("waiting for the cluster to send its log", "member", fmt.Sprintf("%x", a.self))
		}
		if err := a.wait(ctx, "waiting for the cluster to send its log"); err != nil {
			return err
		}
	}
}

func (a *announcer) try(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, a.requestTimeout)
	defer cancel()
	switch m := a.root().Member(a.self); {
	case m == nil:
		return errors.New("it is in the table of members no more")
	case m.Name == a.name && slices.Equal(m.ClientURLs, a.clientURLs):
		return a.caughtUp(ctx)
	}
	return a.propose(ctx, command.KindClusterMemberAttrSet, &membershippb.ClusterMemberAttrSetRequest{
		Member_ID: a.self, MemberAttributes: &membershippb.Attributes{Name: a.name, ClientUrls: a.clientURLs},
	})
}

// wait pauses, or says why there is nothing to wait for.
func (a *announcer) wait(ctx context.Context, doing string) error {
	t := a.clock.NewTimer(a.pause)
	defer t.Stop()
	select {
	case <-t.C():
		return nil
	case err := <-a.failed:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", doing, ctx.Err())
	}
}
