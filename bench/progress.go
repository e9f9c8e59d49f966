package bench

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// progress tells how the run goes: on a terminal a line that is written over each second.
type progress struct {
	out  io.Writer
	live bool // a terminal

	mu    sync.Mutex
	shown bool
}

const clearLine = "\r\x1b[K"

// say writes a line that stays.
func (p *progress) say(format string, args ...any) {
	p.clear()
	fmt.Fprintf(p.out, format+"\n", args...)
}

// show writes the line over. recent was counted since a time that long ago; at is how long it has been measured.
func (p *progress) show(w workload, recent, all *stats, since, at time.Duration, e extent) {
	if !p.live {
		return
	}
	var errs int64
	for i := range all.kinds {
		errs += all.kinds[i].failures.count()
	}
	stage := fmt.Sprintf("%3.0fs", at.Seconds())
	switch {
	case at < 0:
		stage = "warm-up"
	case e.total > 0:
		stage = fmt.Sprintf("%d of %d", all.kinds[0].count(), e.total)
	case e.duration > 0:
		stage = fmt.Sprintf("%3.0f of %.0f s", at.Seconds(), e.duration.Seconds())
	}
	now := &recent.kinds[0]
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown = true
	fmt.Fprintf(p.out, "%s%s  %s: %s/s  p50 %s  p99 %s  errors %d", clearLine, stage, w.kinds()[0], number(float64(now.count())/max(since.Seconds(), 1e-3)),
		duration(micros(now.latency.Quantile(0.5))), duration(micros(now.latency.Quantile(0.99))), errs)
}

// clear takes the line away.
func (p *progress) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown {
		fmt.Fprint(p.out, clearLine)
		p.shown = false
	}
}
