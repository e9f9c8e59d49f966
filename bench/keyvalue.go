package bench

import (
	"encoding/binary"
	"fmt"

	"github.com/engram-kv/engram/bench/api"
)

// putting puts random ones of the keys.
type putting struct {
	plain
	o     *options
	value []byte
}

func (w *putting) kinds() []string { return []string{"put"} }

func (w *putting) next(s *slot) (op, bool) {
	var room [maxKeySize]byte
	key := w.o.appendKey(room[:0], s.rng.IntN(w.o.keys))
	s.buf = api.AppendPut(s.buf[:0], key, w.value, 0)
	stamp(s, w.value)
	return op{method: api.Put, request: s.buf}, true
}

// stamp makes the value that the request ends with another one than the last.
func stamp(s *slot, value []byte) {
	if len(value) >= 8 {
		binary.LittleEndian.PutUint64(s.buf[len(s.buf)-8:], s.rng.Uint64())
	}
}

func (w *putting) message(_ *slot, m []byte) error {
	_, err := api.Revision(m)
	return err
}

// getting gets random ones of the keys.
type getting struct {
	plain
	o *options
}

func (w *getting) kinds() []string { return []string{"get"} }

func (w *getting) next(s *slot) (op, bool) {
	var room [maxKeySize]byte
	key := w.o.appendKey(room[:0], s.rng.IntN(w.o.keys))
	s.buf = api.AppendRange(s.buf[:0], key, api.RangeOptions{Serializable: w.o.serializable})
	return op{method: api.Range, request: s.buf}, true
}

func (w *getting) message(_ *slot, m []byte) error {
	k, err := api.KvsOf(m)
	if err == nil && (k.Keys != 1 || len(k.Value) != w.o.valueSize) {
		err = fmt.Errorf("a get of an existing key answered %d keys and %d bytes, want 1 and %d", k.Keys, len(k.Value), w.o.valueSize)
	}
	return err
}

// updating updates keys as Kubernetes does: put if the key was last changed when we think it was, else get. Each slot has
// keys of its own, so updates do not meet, unless somebody else writes.
type updating struct {
	plain
	o       *options
	value   []byte
	slots   int
	changed []int64 // of each key; an element is its slot's
	lease   int64
}

// updateState is the key of a slot's running update.
type updateState struct{ key int }

func (w *updating) kinds() []string { return []string{"txn"} }

func (w *updating) next(s *slot) (op, bool) {
	at, _ := s.own.(*updateState)
	if at == nil {
		at = &updateState{}
		s.own = at
	}
	// Slot i has the keys i, i+slots, i+2*slots and so on.
	own := (w.o.keys - s.id + w.slots - 1) / w.slots
	if own <= 0 {
		return op{}, false
	}
	at.key = s.id + s.rng.IntN(own)*w.slots
	var room [maxKeySize]byte
	key := w.o.appendKey(room[:0], at.key)
	s.buf = api.AppendUpdate(s.buf[:0], key, w.value, w.lease, w.changed[at.key])
	return op{method: api.Txn, request: s.buf}, true
}

func (w *updating) message(s *slot, m []byte) error {
	t, err := api.TxnOf(m)
	if err != nil {
		return err
	}
	at := s.own.(*updateState)
	switch {
	case t.Succeeded:
		w.changed[at.key] = t.Revision
		return nil
	case t.Found:
		w.changed[at.key] = t.Changed
	default:
		w.changed[at.key] = 0
	}
	return conflict(w.changed[at.key])
}

// conflict is the error of a transaction on a key that only one slot of ours writes.
func conflict(changed int64) error {
	return fmt.Errorf("a transaction found its key changed at revision %d: by somebody else, or by an earlier call whose answer was lost", changed)
}

// listing lists pages of the keys, each from a random one of the first tenth on: lists begin at the beginning, but not all
// at the same key.
type listing struct {
	plain
	o       *options
	keysEnd []byte
	stream  bool
}

// pageState reads a slot's running list.
type pageState struct {
	api.Pages
	want int
}

func (w *listing) kinds() []string {
	if w.stream {
		return []string{"list-stream"}
	}
	return []string{"list"}
}

func (w *listing) next(s *slot) (op, bool) {
	p, _ := s.own.(*pageState)
	if p == nil {
		p = &pageState{}
		s.own = p
	}
	p.Reset()
	from := s.rng.IntN(max(1, w.o.keys/10))
	p.want = w.o.keys - from
	if w.o.limit > 0 {
		p.want = int(min(w.o.limit, int64(p.want)))
	}
	var room [maxKeySize]byte
	key := w.o.appendKey(room[:0], from)
	s.buf = api.AppendRange(s.buf[:0], key, api.RangeOptions{End: w.keysEnd, Limit: w.o.limit, Serializable: w.o.serializable})
	if w.stream {
		return op{method: api.RangeStream, request: s.buf, many: true, pieces: true}, true
	}
	return op{method: api.Range, request: s.buf, pieces: true}, true
}

func (w *listing) piece(s *slot, p []byte, last bool) error {
	if w.stream {
		s.own.(*pageState).AddStream(p, last)
	} else {
		s.own.(*pageState).Add(p)
	}
	return nil
}

func (w *listing) message(*slot, []byte) error { return nil } // it comes in pieces

func (w *listing) end(s *slot) error {
	p := s.own.(*pageState)
	if err := p.Err(); err != nil {
		return err
	}
	if p.Keys != p.want {
		return fmt.Errorf("a list answered %d keys, want %d", p.Keys, p.want)
	}
	return nil
}
