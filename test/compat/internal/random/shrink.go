package random

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/wire"
)

// Shrink looks for fewer writes after which the servers still differ, by leaving out ever smaller parts, and returns them as
// the lines of a script, with the request that shows the difference last. It empties both servers for every try and gives up
// after about budget; empty means that the writes alone do not show it: a restart, a watcher or the order of two reads was
// needed.
func Shrink(pair *process.Pair, methods map[string]wire.Method, d *Difference, budget time.Duration) (string, error) {
	deadline := time.Now().Add(budget)
	if _, known := methods[d.Operation.Method]; !known || d.Operation.Method == "Watch" {
		return "", nil
	}
	differs := func(writes []Operation) (bool, error) {
		return replay(pair, methods, append(slices.Clone(writes), d.Operation))
	}
	left := d.writes
	for _, op := range slices.Backward(left) {
		if op.Method == d.Operation.Method && op.Request == d.Operation.Request {
			left = left[:len(left)-1] // the difference showed after the write was taken for done
		}
		break
	}
	if ok, err := differs(left); err != nil || !ok {
		return "", err
	}
	// Most often only the writes to the same keys matter.
	related := slices.DeleteFunc(slices.Clone(left), func(op Operation) bool { return !overlap(op.Request, d.Operation.Request) })
	if ok, err := differs(related); err != nil {
		return "", err
	} else if ok {
		left = related
	}
	for part := (len(left) + 1) / 2; part >= 1; part /= 2 {
		for start := 0; start < len(left) && time.Now().Before(deadline); {
			without := slices.Delete(slices.Clone(left), start, min(start+part, len(left)))
			ok, err := differs(without)
			if err != nil {
				return "", err
			}
			if ok {
				left = without
			} else {
				start += part
			}
		}
	}
	var lines []string
	for _, op := range append(left, d.Operation) {
		lines = append(lines, op.Method+" "+requestText(op.Request))
	}
	return strings.Join(lines, "\n"), nil
}

// replay empties both servers, runs the operations one by one, and tells if any answer differed.
func replay(pair *process.Pair, methods map[string]wire.Method, ops []Operation) (bool, error) {
	if err := pair.Each(func(_ int, s *process.Side) error { return s.Reset() }); err != nil {
		return false, err
	}
	d := &driver{
		Options: Options{Methods: methods}, pair: pair, generator: NewGenerator(0), coverage: NewCoverage(),
	}
	for _, op := range ops {
		if err := d.write(op); err != nil {
			if difference := (*Difference)(nil); errors.As(err, &difference) {
				return true, nil
			}
			return false, err
		}
	}
	return false, nil
}
