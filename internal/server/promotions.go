package server

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/rpc"
)

// promotionMetrics counts the promotions of learners that this member was asked
// for as the leader.
type promotionMetrics struct {
	successes prometheus.Counter
	failures  *prometheus.CounterVec
}

func newPromotionMetrics() *promotionMetrics {
	return &promotionMetrics{
		successes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_server_learner_promote_successes", Help: "The number of learners promoted while this member leads."}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "etcd_server_learner_promote_failures", Help: "The number of promotions refused or failed while this member leads."}, []string{"Reason"}),
	}
}

func (p *promotionMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{p.successes, p.failures}
}

// promotionReasons are etcd's words for what a promotion fails with. Others are
// one series together, however many texts they have.
var promotionReasons = []struct {
	err    error
	reason string
}{
	{member.ErrLearnerNotReady, "etcdserver: can only promote a learner member which is in sync with leader"},
	{member.ErrNotFound, "membership: ID not found"},
	{member.ErrRemoved, "membership: ID removed"},
	{member.ErrNotLearner, "membership: can only promote a learner member"},
}

// ended counts a promotion, but not what another member is to be asked for.
func (p *promotionMetrics) ended(err error) {
	switch {
	case err == nil:
		p.successes.Inc()
	case !errors.Is(err, rpc.ErrNotLeader):
		reason := "other"
		for _, r := range promotionReasons {
			if errors.Is(err, r.err) {
				reason = r.reason
			}
		}
		p.failures.WithLabelValues(reason).Inc()
	}
}
