package peer

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"time"
)

// maxClockDifference is what is worth a warning.
const maxClockDifference = time.Second

// health is the answer to /raft/probing.
type health struct {
	OK  bool
	Now time.Time
}

// probe measures the way to the peer and the difference of the clocks, until the peer is dropped.
func (p *peer) probe() {
	var smooth time.Duration
	apart := false
	for {
		if rtt, diff, ok := p.probeOnce(); ok {
			if smooth == 0 {
				smooth = rtt
			}
			smooth += (rtt - smooth) / 8
			p.t.opts.Metrics.RoundTrip.WithLabelValues(p.name).Observe(smooth.Seconds())
			if now := diff.Abs() > maxClockDifference; now != apart {
				if apart = now; apart {
					p.t.opts.Logger.Warn("the clock of a peer differs", "member", p.name, "difference", diff.String(), "roundTrip", smooth.String())
				} else {
					p.t.opts.Logger.Info("the clock of a peer agrees again", "member", p.name, "difference", diff.String())
				}
			}
		}
		if !p.sleep(p.t.opts.ProbeInterval) {
			return
		}
	}
}

// probeOnce asks once. diff is by how much this clock is ahead.
func (p *peer) probeOnce() (rtt, diff time.Duration, ok bool) {
	u := p.urls.pick()
	if u == "" {
		return 0, 0, false
	}
	ctx, cancel := context.WithTimeout(p.ctx, p.t.opts.ReadTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target(u, "/raft/probing"), nil)
	if err != nil {
		return 0, 0, false
	}
	p.t.announce(req.Header)
	began := time.Now() // the wall clock, which is what is compared
	resp, err := p.t.requestClient.Do(req)
	if err != nil {
		return 0, 0, false
	}
	defer resp.Body.Close()
	var h health
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err != nil || resp.StatusCode != http.StatusOK || json.Unmarshal(body, &h) != nil || !h.OK {
		return 0, 0, false
	}
	p.heard(resp.Header)
	now := time.Now()
	rtt = now.Sub(began)
	return rtt, now.Sub(h.Now) - rtt/2, true
}
