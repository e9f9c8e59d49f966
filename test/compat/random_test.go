package compat

import (
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/random"
)

const (
	operations = 200_000
	restarts   = 4

	shrinkWithin = time.Minute
)

// TestRandom runs operations made from a seed against both servers.
func TestRandom(t *testing.T) {
	o := random.Options{Operations: operations, Restarts: restarts, Methods: methods, Seed: rand.Uint64(), Log: t.Logf}
	if s := os.Getenv("COMPAT_SEED"); s != "" {
		var err error
		if o.Seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("COMPAT_SEED: %v", err)
		}
	}
	if s := os.Getenv("COMPAT_OPS"); s != "" {
		var err error
		if o.Operations, err = strconv.Atoi(s); err != nil {
			t.Fatalf("COMPAT_OPS: %v", err)
		}
	}
	coverage := runRandom(t, o)
	for again := 0; coverage == nil && again < 2; again++ {
		o.Seed++
		coverage = runRandom(t, o)
	}
	if coverage == nil {
		t.Fatal("etcd ended by itself three times")
	}
	t.Logf("coverage:\n%s", coverage)
	if o.Operations < operations {
		return // too few to try everything
	}
	for _, m := range coverage.Missing() {
		t.Errorf("not covered: %s", m)
	}
}

// etcdsOwnDeath is the last that etcd says when a Txn of its reads, at an old revision, what a compaction takes away at the
// same moment: a race of its own.
const etcdsOwnDeath = "range failed to find revision pair"

// runRandom makes one run. It returns nil if etcd died of its own fault, which ends the comparison.
func runRandom(t *testing.T, o random.Options) *random.Coverage {
	t.Logf("COMPAT_SEED=%d COMPAT_OPS=%d repeats this run", o.Seed, o.Operations)
	pair, err := process.StartPair(programs.Etcd, subject, t.TempDir(), "--unsafe-no-fsync")
	if err != nil {
		t.Fatal(err)
	}
	defer pair.Close()
	coverage, err := random.Run(pair, o)
	if err != nil && pair[0].Died(etcdsOwnDeath) {
		t.Logf("etcd ended by itself, so this run says nothing: %v\n%s", err, pair[0].LogTail())
		return nil
	}
	if difference := (*random.Difference)(nil); errors.As(err, &difference) {
		t.Error(err)
		lines, err := random.Shrink(pair, methods, difference, shrinkWithin)
		if lines == "" {
			t.Fatalf("not shrunk to a script: %v", err)
		}
		t.Fatalf("a shorter way there, as a script:\n\ncall\n%s\n----", lines)
	}
	if err != nil {
		t.Fatal(err)
	}
	return coverage
}
