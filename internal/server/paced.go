package server

import (
	"context"
	"io"

	"github.com/engram-kv/engram/internal/pace"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
)

// pacer writes at the pace of all long work, and counts.
type pacer struct {
	ctx  context.Context
	work *pace.Work
	w    io.Writer
	n    int64
}

func (p *pacer) Write(b []byte) (int, error) {
	n, err := p.w.Write(b)
	p.n += int64(n)
	if err == nil {
		err = p.work.Wait(p.ctx, n)
	}
	return n, err
}

// writePaced has write write to w at the pace of all long work.
func writePaced(ctx context.Context, p *pace.Pace, w io.Writer, write func(io.Writer) error) (int64, error) {
	work := p.Begin()
	defer work.End()
	out := &pacer{ctx: ctx, work: work, w: w}
	err := write(out)
	return out.n, err
}

// planEtcd is the first pass over what is sent as etcd's file.
func planEtcd(ctx context.Context, p *pace.Pace, pinned state.Snapshot) (*snapfile.Plan, error) {
	const readingShare = 2 // a byte that is only read costs so much less than one that is also sent
	work := p.Begin()
	defer work.End()
	return snapfile.PlanEtcd(ctx, snapfile.Source{
		Reader: pinned.Store, Applied: pinned.Applied, Term: pinned.Term, Members: pinned.Members,
		Planned: func(bytes int) error { return work.Wait(ctx, bytes/readingShare) },
	})
}

// writeEtcd is the second pass.
func writeEtcd(ctx context.Context, p *pace.Pace, plan *snapfile.Plan, w io.Writer) (int64, error) {
	return writePaced(ctx, p, w, func(w io.Writer) error {
		_, err := plan.WriteTo(w)
		return err
	})
}
