package history

import (
	"fmt"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/engram-kv/engram/test/internal/broken"
)

const judgeWithin = time.Minute

// register is one operation on one of the few keys that clients fight over.
type register struct {
	op       byte // 'g' get, 'p' put, 'c' put if it is what was expected, 'd' delete
	key      string
	expected string // of 'c'; "" is absent
	value    string // of 'p' and 'c': no other operation puts it
}

// answer is what the client was told.
type answer struct {
	unknown bool
	value   string // of 'g'
	done    bool   // of 'c': it was as expected; of 'd': there was something
}

// registers is the model: each key holds a value, "" for none.
var registers = (&porcupine.NondeterministicModel{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		by := map[string]int{}
		var parts [][]porcupine.Operation
		for _, o := range history {
			key := o.Input.(register).key
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
		now, in, out := state.(string), input.(register), output.(answer)
		next, ok := now, true
		switch in.op {
		case 'g':
			ok = out.value == now
		case 'p':
			next = in.value
		case 'd':
			next, ok = "", out.done == (now != "")
		case 'c':
			if ok = out.done == (now == in.expected); now == in.expected {
				next = in.value
			}
		}
		switch {
		case out.unknown && next == now:
			return []any{now}
		case out.unknown:
			return []any{now, next}
		case !ok:
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
}

func newJournal() *journal { return &journal{begin: time.Now()} }

func (j *journal) now() int64 { return int64(time.Since(j.begin)) }

func (j *journal) note(client int, call int64, in register, out answer) {
	if in.op == 'g' && out.unknown {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.history = append(j.history, porcupine.Operation{ClientId: client, Input: in, Call: call, Output: out, Return: j.now()})
}

// check judges the whole history. An operation without an answer took place at any time after its call or never: of one
// that puts a value, put tells which.
func (j *journal) check(put func(key, value string) bool) (count int, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var judged []porcupine.Operation
	end := j.now()
	for _, o := range j.history {
		in, out := o.Input.(register), o.Output.(answer)
		if out.unknown {
			o.Return = end
			if in.op != 'd' {
				if !put(in.key, in.value) {
					continue
				}
				o.Output = answer{done: true}
			}
		}
		judged = append(judged, o)
	}
	switch porcupine.CheckOperationsTimeout(registers, judged, judgeWithin) {
	case porcupine.Ok:
		return len(judged), nil
	case porcupine.Unknown:
		return 0, fmt.Errorf("the history of %d operations could not be judged within %v", len(judged), judgeWithin)
	}
	return 0, broken.Errorf("the history of %d operations is not linearizable", len(judged))
}
