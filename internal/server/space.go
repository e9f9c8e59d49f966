package server

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/leader"
	"github.com/engram-kv/engram/internal/state"
)

// quota is rpc.Quota.
type quota struct{ m *Member }

// Admit implements rpc.Quota.
func (q quota) Admit(cost int64) error {
	limit, usage := q.m.cfg.Quota(), q.m.machine().Root().UsageBytes()
	if cost == 0 || limit == 0 || usage+cost < limit {
		return nil
	}
	_, members, alarms := q.m.machine().Tables()
	reserve := false
	if alarms.Has(pb.AlarmType_NOSPACE) {
		reserve = state.ReserveHas(alarms, usage, cost)
	} else {
		notify(q.m.overQuota)
		reserve = members.FeatureLevel() > 0 && cost <= state.ReserveLastCost // it begins with the alarm, and pass looks till then
	}
	if reserve {
		return nil // whether it may come out of the reserve is for the machine to say
	}
	return state.ErrNoSpace
}

// pass returns nil if a client's request may be proposed, and otherwise why not.
// Until the alarm is in the log the machine refuses nothing: what the reserve is
// not for must not get there.
func (q quota) pass(data []byte) error {
	limit, usage := q.m.cfg.Quota(), q.m.machine().Root().UsageBytes()
	if limit == 0 || usage+state.ReserveLastCost < limit {
		return nil // Admit has seen to the larger ones
	}
	if _, _, alarms := q.m.machine().Tables(); alarms.Has(pb.AlarmType_NOSPACE) {
		return nil
	}
	var c command.Command
	if err := command.Decode(data, &c); err != nil {
		return err
	}
	cost := state.Cost(&c)
	if cost == 0 || usage+cost < limit || cost <= state.ReserveLastCost && q.m.machine().Overwrites(&c) {
		return nil
	}
	notify(q.m.overQuota) // it may have fitted when Admit looked
	return state.ErrNoSpace
}

// raiseAlarms proposes the NOSPACE alarm when a request passed the quota.
func (m *Member) raiseAlarms(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.overQuota:
		}
		_, _, alarms := m.machine().Tables()
		if alarms.Has(pb.AlarmType_NOSPACE) {
			continue
		}
		m.log.Warn("the store is above its quota: alarm NOSPACE is raised; delete keys and compact, or raise --quota-backend-bytes on every member",
			"quota-bytes", m.cfg.Quota(), "usage-bytes", m.machine().Root().UsageBytes())
		r := &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: m.id.member, Alarm: pb.AlarmType_NOSPACE}
		if err := m.proposeAndWait(ctx, command.KindAlarm, r); err != nil {
			m.log.Warn("raising alarm NOSPACE failed", "error", err)
		}
	}
}

// spaceUse is what the leader judges by whether the alarm goes by itself. In a
// cluster with a real member it stays until somebody clears it, as there.
func (m *Member) spaceUse() (leader.SpaceUse, bool) {
	_, members, alarms := m.machine().Tables()
	return leader.SpaceUse{
		Alarm: alarms.Has(pb.AlarmType_NOSPACE), UsageBytes: m.machine().Root().UsageBytes(), QuotaBytes: m.cfg.Quota(),
	}, m.cfg.AutoClearNoSpace && members.FeatureLevel() > 0
}

// ClearNoSpace implements leader.Proposer.
func (p systemProposer) ClearNoSpace(term uint64, done func(error)) {
	p = p.leading(term)
	_, _, alarms := p.m.machine().Tables()
	standing := alarms.List(pb.AlarmType_NOSPACE)
	if len(standing) == 0 {
		done(nil)
		return
	}
	var left atomic.Int64
	left.Store(int64(len(standing)))
	results := make(chan error, len(standing))
	for _, a := range standing {
		p.propose(command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: a.Member, Alarm: a.Type}, func(err error) {
			results <- err
			if left.Add(-1) > 0 {
				return
			}
			var errs []error
			for range standing {
				errs = append(errs, <-results)
			}
			done(errors.Join(errs...))
		})
	}
}

// quotaMarks are the shares of the quota, in percent, at which somebody is told.
var quotaMarks = []int64{80, 90}

const (
	quotaWatchEvery = time.Second
	// quotaMarkSlack is how far below a mark, in percent of the quota, usage must
	// fall before passing it again is told again.
	quotaMarkSlack = 2
)

// quotaWatch finds out when usage passes a mark. The zero value has seen none.
type quotaWatch struct{ passed [2]bool }

// step returns the marks that were passed since the last look.
func (w *quotaWatch) step(usageBytes, quotaBytes int64) (passed []int64) {
	if quotaBytes == 0 {
		return nil
	}
	percent := float64(usageBytes) / float64(quotaBytes) * 100
	for i, mark := range quotaMarks {
		switch {
		case !w.passed[i] && percent >= float64(mark):
			w.passed[i] = true
			passed = append(passed, mark)
		case w.passed[i] && percent < float64(mark-quotaMarkSlack):
			w.passed[i] = false
		}
	}
	return passed
}

// quotaMetrics tell how full the store is.
type quotaMetrics struct{ warnings *prometheus.CounterVec }

func newQuotaMetrics() *quotaMetrics {
	q := &quotaMetrics{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "engram_quota_warnings_total", Help: "How often usage passed a share of the quota on its way up.",
	}, []string{"percent"})}
	for _, mark := range quotaMarks {
		q.warnings.WithLabelValues(fmt.Sprint(mark))
	}
	return q
}

// watchQuota tells people in time that the store is getting full.
func (m *Member) watchQuota(ctx context.Context) {
	t := m.clock.NewTicker(quotaWatchEvery)
	defer t.Stop()
	var w quotaWatch
	for {
		usage := m.machine().Root().UsageBytes()
		for _, mark := range w.step(usage, m.cfg.Quota()) {
			m.timed.quota.warnings.WithLabelValues(fmt.Sprint(mark)).Inc()
			m.log.Warn("the store is getting full: at its quota writes are refused; compact history, delete keys, or raise --quota-backend-bytes on every member",
				"percent", mark, "usage-bytes", usage, "quota-bytes", m.cfg.Quota())
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C():
		}
	}
}

// quotaUsed is the share of the quota that is used, 0 if there is no quota.
func (m *Member) quotaUsed() float64 {
	if m.cfg.Quota() == 0 {
		return 0
	}
	return float64(m.machine().Root().UsageBytes()) / float64(m.cfg.Quota())
}
