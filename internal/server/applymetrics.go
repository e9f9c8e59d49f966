package server

import (
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// applyMetrics is etcd_server_apply_duration_seconds. Entries are run and
// committed in batches, so what is observed of an entry is its share of the
// batch. It is a prometheus.Collector of its own because the library's histogram
// takes one observation at a time, and a batch has hundreds.
type applyMetrics struct {
	desc   *prometheus.Desc
	bounds []float64 // in seconds

	mu     sync.Mutex
	series [1 << 8][2]*applySeries // by command.Kind and success; nil if there was none
}

type applySeries struct {
	counts []uint64 // by bound, and one for what is beyond
	sum    float64
}

func newApplyMetrics() *applyMetrics {
	return &applyMetrics{
		desc: prometheus.NewDesc("etcd_server_apply_duration_seconds",
			"The time that entries take to be run and committed, each as its share of a batch.", []string{"version", "op", "success"}, nil),
		bounds: prometheus.ExponentialBuckets(0.0001, 2, 20), // 0.1 ms to 52.4288 s
	}
}

// applied counts a batch of entries that took so long. Results may be fewer than
// entries.
func (a *applyMetrics) applied(entries []*raftpb.Entry, results []state.Result, took time.Duration) {
	if len(results) == 0 {
		return
	}
	share := took.Seconds() / float64(len(results))
	bucket := 0
	for bucket < len(a.bounds) && share > a.bounds[bucket] {
		bucket++
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range results {
		if entries[i].GetType() != raftpb.EntryNormal {
			continue
		}
		kind := kindOfEntry(entries[i].GetData())
		if kind == command.KindNone {
			continue // of a new leader
		}
		success := 0
		if err := results[i].Err; err == nil || errors.Is(err, mvcc.ErrCompacted) { // to etcd that is none
			success = 1
		}
		s := a.series[kind][success]
		if s == nil {
			s = &applySeries{counts: make([]uint64, len(a.bounds)+1)}
			a.series[kind][success] = s
		}
		s.counts[bucket]++
		s.sum += share
	}
}

// Describe implements prometheus.Collector.
func (a *applyMetrics) Describe(c chan<- *prometheus.Desc) { c <- a.desc }

// Collect implements prometheus.Collector.
func (a *applyMetrics) Collect(c chan<- prometheus.Metric) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for kind, both := range a.series {
		for success, s := range both {
			if s == nil {
				continue
			}
			upTo, sum := make(map[float64]uint64, len(a.bounds)), uint64(0)
			for i, bound := range a.bounds {
				sum += s.counts[i]
				upTo[bound] = sum
			}
			sum += s.counts[len(a.bounds)]
			c <- prometheus.MustNewConstHistogram(a.desc, sum, s.sum, upTo, "v3", opName(command.Kind(kind)), strconv.FormatBool(success == 1))
		}
	}
}

// opName is what etcd calls a kind in labels: DeleteRange for delete_range.
func opName(kind command.Kind) string {
	var b strings.Builder
	for word := range strings.SplitSeq(kind.String(), "_") {
		b.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	return b.String()
}

// kindsByField holds all kinds by the number of their field, KindNone between.
var kindsByField = func() (all []command.Kind) {
	for k := command.KindNone + 1; k.Field() != 0; k++ {
		if more := int(k.Field()) + 1 - len(all); more > 0 {
			all = append(all, make([]command.Kind, more)...)
		}
		all[k.Field()] = k
	}
	return all
}()

// kindOfEntry is what the command in an entry does, without decoding it;
// KindNone if there is none.
func kindOfEntry(data []byte) command.Kind {
	for len(data) > 0 {
		field, wire, n := protowire.ConsumeTag(data)
		if n < 0 {
			break
		}
		if int(field) < len(kindsByField) && kindsByField[field] != command.KindNone {
			return kindsByField[field]
		}
		size := protowire.ConsumeFieldValue(field, wire, data[n:])
		if size < 0 {
			break
		}
		data = data[n+size:]
	}
	return command.KindNone
}
