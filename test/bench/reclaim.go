package main

import (
	"context"
	"fmt"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const reclaiming = "reclaiming"

// reclaim is the p99 of puts while the space of deleted keys goes back to the disk: every other key, so that all files are rewritten.
var reclaim = scenario{
	name:  "reclaim",
	about: fmt.Sprintf("every other key of a store of -size bytes is deleted; then a compaction and a defragmentation until the space is back, beside puts at %d/s, open loop", steadyPuts),
	figures: append([]figure{
		{name: "until the space is back", unit: "ms"}, {name: "left of the store's files", unit: "share"},
	}, besideFigures(reclaiming, true)...),
	prepare: func(e *env) error {
		return e.with(4, func(c member.Conns) error { return load.FillDistinct(c, e.reclaimKeys(), e.valueBytes) })
	},
	measure: func(e *env) (sample, error) {
		err := e.with(8, func(c member.Conns) error {
			if err := load.DeleteEvery(c, 2, e.reclaimKeys()); err != nil {
				return err
			}
			return settle([]*env{e}, e.settle)
		})
		if err != nil {
			return nil, err
		}
		before, err := metricOf(e.Address, storeSize)
		if err != nil {
			return nil, err
		}
		var took time.Duration
		out, err := e.besidePuts(reclaiming, load.RandomPutFrom(load.MaxKeys-putsApart, putsApart, smallValue), func(ctx context.Context) error {
			began := time.Now()
			err := e.compactAndDefragment(ctx)
			took = time.Since(began)
			return err
		})
		if err != nil {
			return nil, err
		}
		after, err := metricOf(e.Address, storeSize)
		if err != nil {
			return nil, err
		}
		out["until the space is back"], out["left of the store's files"] = millis(took), after/before
		return out, e.with(8, func(c member.Conns) error { // for the next round
			value := load.Distinct(e.valueBytes)
			_, err := load.Closed{Conns: c, Streams: 32, Count: int64(e.reclaimKeys()+1) / 2, Next: func(s *load.Source) (string, []byte) {
				i := 2 * int(s.Serial)
				s.Buf = api.AppendPut(s.Buf[:0], load.Key(i), value(i), 0)
				return api.Put, s.Buf
			}}.Run()
			return err
		})
	},
}

const (
	storeSize = "etcd_mvcc_db_total_size_in_bytes"
	defragged = "etcd_disk_backend_defrag_duration_seconds_count"
	putsApart = 1000 // keys behind those of a store, for puts that leave it as it is
)

func (e *env) reclaimKeys() int { return int(e.storeBytes) / e.valueBytes }

// compactAndDefragment returns when the space is back. Where a defragmentation goes on after its answer, the count of those
// that ended tells.
func (e *env) compactAndDefragment(ctx context.Context) error {
	before, err := metricOf(e.Address, defragged)
	if err != nil {
		return err
	}
	c, err := e.client()
	if err != nil {
		return err
	}
	defer c.Close()
	last, err := c.Get(ctx, "none")
	if err != nil {
		return err
	}
	if _, err := c.Compact(ctx, last.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		return err
	}
	if _, err := c.Defragment(ctx, e.Address); err != nil {
		return err
	}
	for {
		now, err := metricOf(e.Address, defragged)
		if err != nil || now > before {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond): // another process: there is no event to wait for
		case <-ctx.Done():
			return fmt.Errorf("no defragmentation ended: %w", ctx.Err())
		}
	}
}
