package server

import (
	"context"

	"github.com/engram-kv/engram/internal/hot"
)

// countHot counts what calls are about, beside the calls.
func (m *Member) countHot(ctx context.Context) {
	t := m.clock.NewTicker(hot.Interval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C():
			m.hot.Tick(now)
		}
	}
}
