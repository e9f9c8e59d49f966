package crash

import (
	"fmt"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/engram-kv/engram/test/internal/broken"
)

// registerInput is one operation on one key of the few that clients fight over.
type registerInput struct {
	op       byte // 'g' get, 'p' put, 'c' put if it is what was expected, 'd' delete
	key      string
	expected string // of 'c'; "" is absent
	value    string
}

// registerOutput is what the client was told.
type registerOutput struct {
	unknown bool
	value   string // of 'g'
	done    bool   // of 'c': it was as expected; of 'd': there was something
}

// registers is the model: each key holds a value, "" for none. An operation
// without an answer took place or not, before its member was gone.
var registers = (&porcupine.NondeterministicModel{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		by := map[string]int{}
		var parts [][]porcupine.Operation
		for _, o := range history {
			key := o.Input.(registerInput).key
			i, ok := by[key]
			if !ok {
				i = len(parts)
				by[key] = i
				parts = append(parts, nil)
			}
			parts[i] = append(parts[i], o)
		}
		return parts
	},
	Init: func() []any { return []any{""} },
	Step: func(state, input, output any) []any {
		now, in, out := state.(string), input.(registerInput), output.(registerOutput)
		next := now
		switch in.op {
		case 'p':
			next = in.value
		case 'd':
			next = ""
		case 'c':
			if now == in.expected {
				next = in.value
			}
		}
		if out.unknown {
			return []any{now, next}
		}
		ok := true
		switch in.op {
		case 'g':
			ok = out.value == now
		case 'd':
			ok = out.done == (now != "")
		case 'c':
			ok = out.done == (now == in.expected)
		}
		if !ok {
			return nil
		}
		return []any{next}
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}).ToModel()

// journal is the history of those keys.
type journal struct {
	mu      sync.Mutex
	begin   time.Time
	history []porcupine.Operation
	open    []int // operations without an answer in this life
}

func newJournal() *journal { return &journal{begin: time.Now()} }

func (j *journal) now() int64 { return int64(time.Since(j.begin)) }

func (j *journal) note(client int, call int64, in registerInput, out registerOutput) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if out.unknown {
		if in.op == 'g' {
			return
		}
		j.open = append(j.open, len(j.history))
	}
	j.history = append(j.history, porcupine.Operation{ClientId: client, Input: in, Call: call, Output: out, Return: j.now()})
}

// bury says that the member of this life is gone: what has no answer took place
// before now or never will.
func (j *journal) bury() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, i := range j.open {
		j.history[i].Return = j.now()
	}
	j.open = nil
}

// check judges the whole history.
func (j *journal) check() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch result := porcupine.CheckOperationsTimeout(registers, j.history, time.Minute); result {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return fmt.Errorf("the history of %d operations could not be judged within a minute", len(j.history))
	default:
		return broken.Errorf("the history of %d operations is not linearizable", len(j.history))
	}
}
