package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/bench/histogram"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	watchConns   = 10 // one stream on each, which the watchers share
	fanoutPuts   = 500
	resumeKeys   = 10_000 // that the history of resume goes round
	watchWithin  = 5 * time.Minute
	stampBytes   = 8 // of a value: when the put was due, in Unix nanoseconds
	deliverLimit = 6 // windows after the puts in which every event must have arrived
)

// fanout is many watchers on one prefix.
var fanout = scenario{
	name:  "fanout",
	about: fmt.Sprintf("watchers on one prefix, that of all keys of a large store, %d puts/s of %d bytes", fanoutPuts, smallValue),
	figures: []figure{
		{name: "server CPU per delivered event", unit: "us"},
		{name: "delivery p50", unit: "ms"},
		{name: "delivery p99", unit: "ms"},
		{name: "delivered", unit: "events/s", more: true},
		{name: "delivered of due", unit: "share", more: true},
		{name: "generator late p99", unit: "ms"},
	},
	prepare: fillLarge,
	measure: measureFanout,
}

// watching is a set of watchers and what they have received.
type watching struct {
	created atomic.Int64
	events  atomic.Int64
	latency []histogram.Histogram // by connection; callbacks of one run one after another
	stamped bool
	all     chan struct{} // closed when want is reached
	want    atomic.Int64
	failed  chan error // capacity 1
}

// watch opens n watchers over the connections and waits until all exist.
func watch(conns member.Conns, n int, stamped bool, want int64, request func(i int) []byte) (*watching, error) {
	w := &watching{latency: make([]histogram.Histogram, len(conns)), stamped: stamped, all: make(chan struct{}), failed: make(chan error, 1)}
	w.want.Store(want)
	created := make(chan struct{})
	for at, c := range conns {
		var stream *load.Stream
		for i := at; i < n; i += len(conns) {
			if stream != nil {
				stream.Send(request(i))
				continue
			}
			stream = c.Open(api.Watch, request(i), func(m []byte) {
				if err := w.message(at, m, int64(n), created); err != nil {
					w.fail(err)
				}
			}, w.fail)
		}
	}
	return w, w.wait(created, watchWithin)
}

func (w *watching) message(at int, m []byte, n int64, created chan struct{}) error {
	var value []byte // of the last event
	e, err := api.EventsOf(m, func(_ int64, e *api.Event) { value = e.Value })
	if err != nil {
		return err
	}
	if e.Canceled {
		return fmt.Errorf("watcher %d was cancelled", e.Watcher)
	}
	if e.Created && w.created.Add(1) == n {
		close(created)
	}
	if e.Count == 0 {
		return nil
	}
	if w.stamped && len(value) >= stampBytes {
		w.latency[at].Add(time.Since(time.Unix(0, int64(binary.BigEndian.Uint64(value)))))
	}
	now := w.events.Add(int64(e.Count))
	if want := w.want.Load(); want > 0 && now >= want && now-int64(e.Count) < want {
		close(w.all)
	}
	return nil
}

func (w *watching) fail(err error) {
	if err == nil {
		err = errors.New("the stream ended")
	}
	select {
	case w.failed <- fmt.Errorf("watch: %w", err):
	default:
	}
}

var errLate = errors.New("not within the time given")

func (w *watching) wait(done <-chan struct{}, within time.Duration) error {
	select {
	case <-done:
		return nil
	case err := <-w.failed:
		return err
	case <-time.After(within):
		return fmt.Errorf("%d watchers created, %d events received after %v: %w", w.created.Load(), w.events.Load(), within, errLate)
	}
}

func measureFanout(e *env) (out sample, err error) {
	err = e.with(watchConns, func(watchers member.Conns) error {
		return e.with(2, func(writers member.Conns) error {
			out, err = e.fanOut(watchers, writers)
			return err
		})
	})
	return out, err
}

func (e *env) fanOut(watchers, writers member.Conns) (sample, error) {
	due := int64(e.window.Seconds() * fanoutPuts)
	w, err := watch(watchers, e.watchers, true, due*int64(e.watchers), func(int) []byte {
		return api.AppendWatch(nil, []byte(load.KeyPrefix), load.KeysEnd(), 0, 0)
	})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	value := api.Value(smallValue)
	var puts load.Result
	began := time.Now()
	spent, err := e.spend("fanout", func() error {
		var sent int64
		puts, err = load.Open{Conns: writers, Rate: fanoutPuts, Next: func(s *load.Source) (string, []byte) {
			binary.BigEndian.PutUint64(value, uint64(time.Now().UnixNano()))
			s.Buf = api.AppendPut(s.Buf[:0], load.Key(s.Rand.IntN(e.keys)), value, 0)
			if sent++; sent == due {
				stop()
			}
			return api.Put, s.Buf
		}}.Run(ctx)
		if err != nil {
			return err
		}
		// A server that cannot keep up is measured as far as it came.
		if err := w.wait(w.all, deliverLimit*e.window); !errors.Is(err, errLate) {
			return err
		}
		return nil
	})
	took := time.Since(began)
	if err != nil {
		return nil, err
	}
	events := w.events.Load()
	watchers.Close()
	var latency histogram.Histogram
	for i := range w.latency {
		latency.Merge(&w.latency[i])
	}
	return sample{
		"server CPU per delivered event": microsPer(spent, events),
		"delivery p50":                   millis(latency.Quantile(0.5)), "delivery p99": millis(latency.Quantile(0.99)),
		"delivered": float64(events) / took.Seconds(), "delivered of due": float64(events) / float64(due*int64(e.watchers)),
		"generator late p99": millis(puts.Late.Quantile(0.99)),
	}, nil
}

// resume is many one-key watchers that come back after a long absence.
var resume = scenario{
	name:  "resume",
	about: "one-key watchers that resume at the beginning of a history, which began when the store was large already",
	figures: []figure{
		{name: "until all caught up", unit: "ms"},
		{name: "server CPU", unit: "ms"},
		{name: "resident afterwards", unit: "MB"},
	},
	prepare: func(e *env) error {
		if err := fillLarge(e); err != nil {
			return err
		}
		return e.with(8, func(c member.Conns) error {
			return load.Overwrite(c, e.revisions, e.resumedKeys(), smallValue)
		})
	},
	measure: func(e *env) (out sample, err error) {
		err = e.with(watchConns, func(c member.Conns) error {
			out, err = e.resumeAll(c)
			return err
		})
		return out, err
	},
}

// resumedKeys is how many keys the history goes round.
func (e *env) resumedKeys() int { return min(resumeKeys, e.keys, int(e.revisions)) }

func (e *env) resumeAll(c member.Conns) (sample, error) {
	keys := e.resumedKeys()
	each := e.revisions / int64(keys)
	last, err := revisionOf(c[0])
	if err != nil {
		return nil, err
	}
	var took time.Duration
	spent, err := e.spend("resume", func() error {
		began := time.Now()
		w, err := watch(c, e.watchers, false, each*int64(e.watchers), func(i int) []byte {
			return api.AppendWatch(nil, load.Key(i*keys/e.watchers), nil, last-e.revisions+1, 0) // where the history begins
		})
		if err != nil {
			return err
		}
		err = w.wait(w.all, watchWithin)
		took = time.Since(began)
		return err
	})
	if err != nil {
		return nil, err
	}
	resident, err := e.Resident()
	return sample{"until all caught up": millis(took), "server CPU": millis(spent), "resident afterwards": float64(resident) / bytesPerMB}, err
}
