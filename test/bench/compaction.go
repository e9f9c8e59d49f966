package main

import (
	"context"
	"fmt"
	"time"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const compacting = "compacting"

// compaction is the p99 of puts at a fixed rate, in quiet and while a history is compacted.
var compaction = scenario{
	name:    "compaction",
	about:   fmt.Sprintf("puts at %d/s, open loop, in quiet and while a history is compacted, in a large store", steadyPuts),
	figures: append([]figure{{name: "compaction", unit: "ms"}}, besideFigures(compacting, false)...),
	prepare: fillLarge,
	measure: func(e *env) (sample, error) {
		if err := e.with(8, func(c member.Conns) error {
			return load.Overwrite(c, e.revisions, e.keys, e.valueBytes)
		}); err != nil {
			return nil, err
		}
		if err := settle([]*env{e}, e.settle); err != nil {
			return nil, err
		}
		var took time.Duration
		out, err := e.besidePuts(compacting, load.RandomPut(e.keys, e.valueBytes), func(context.Context) error {
			began := time.Now()
			err := e.compactAll()
			took = time.Since(began)
			return err
		})
		if err == nil {
			out["compaction"] = millis(took)
		}
		return out, err
	},
}

// compactAll asks for the compaction of all history, and waits for the answer.
func (e *env) compactAll() error {
	return e.with(1, func(c member.Conns) error {
		revision, err := revisionOf(c[0])
		if err != nil {
			return err
		}
		_, err = c[0].Do(api.Compact, api.AppendCompaction(nil, revision), workWithin)
		return err
	})
}

// revisionOf is the store's.
func revisionOf(c *load.Conn) (int64, error) {
	answer, err := c.Do(api.Range, api.AppendRange(nil, load.Key(0), api.RangeOptions{}), pageIn)
	if err != nil {
		return 0, err
	}
	return api.Revision(answer)
}
