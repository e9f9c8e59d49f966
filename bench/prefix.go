package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"

	"github.com/engram-kv/engram/bench/api"
)

const (
	defaultPrefix = "/engram-bench/"
	// markerName is the key below the prefix that says that what lies there is ours.
	markerName = ".engram-bench"
	keyDigits  = 9
	maxKeySize = 4096
	clearPage  = 2_000 // keys deleted at once: a server is not to be held up for long
	fillBytes  = 64 << 10
	fillOps    = 100 // puts in one transaction: etcd takes 128
)

// marker is the value of that key.
type marker struct {
	Keys      int  `json:"keys"`
	KeySize   int  `json:"key_size"`
	ValueSize int  `json:"value_size"`
	Filled    bool `json:"filled"` // all of them are there, and of that size
}

// checkKeys settles prefix and key size.
func (o *options) checkKeys() error {
	if o.prefix == "" {
		o.prefix = fmt.Sprintf("%s%08x/", defaultPrefix, rand.Uint32())
	}
	digits := len(strconv.Itoa(max(o.keys-1, 0)))
	if o.keySize == 0 {
		o.keySize = len(o.prefix) + max(digits, keyDigits)
	}
	if o.keySize < len(o.prefix)+digits || o.keySize > maxKeySize {
		return fmt.Errorf("--key-size=%d: with the prefix %q and --keys=%d give a number from %d to %d", o.keySize, o.prefix, o.keys, len(o.prefix)+digits, maxKeySize)
	}
	if o.prefix[0] == 0xff {
		return fmt.Errorf("--prefix=%q: begin it with a byte below 0xff", o.prefix)
	}
	return nil
}

// appendKey appends the i-th key. Every numbered key is made here, so none lies outside the prefix.
func (o *options) appendKey(b []byte, i int) []byte {
	b = append(b, o.prefix...)
	end := len(b) + o.keySize - len(o.prefix)
	for len(b) < end {
		b = append(b, '0')
	}
	for at := end - 1; i > 0; at-- {
		b[at] = '0' + byte(i%10)
		i /= 10
	}
	return b
}

// numbered is the range of all numbered keys.
func (o *options) numbered() (from, end []byte) {
	return append([]byte(o.prefix), '0'), append([]byte(o.prefix), '9'+1)
}

// all is the range of everything below the prefix.
func (o *options) all() (from, end []byte) { return []byte(o.prefix), api.PrefixEnd([]byte(o.prefix)) }

func (o *options) markerKey() []byte { return append([]byte(o.prefix), markerName...) }

func (r *runner) list(ctx context.Context, key []byte, opts api.RangeOptions) (*api.Pages, error) {
	answer, err := r.do(ctx, api.Range, api.AppendRange(nil, key, opts))
	if err != nil {
		return nil, err
	}
	p := &api.Pages{}
	p.Add(answer)
	return p, p.Err()
}

// claim makes sure that nothing below the prefix is somebody else's, and marks it as ours. filled tells if the keys that
// the options ask for are there.
func (r *runner) claim(ctx context.Context, dirties bool) (filled bool, err error) {
	from, end := r.o.all()
	count, err := r.list(ctx, from, api.RangeOptions{End: end, CountOnly: true})
	if err != nil {
		return false, fmt.Errorf("looking at prefix %q: %w", r.o.prefix, err)
	}
	answer, err := r.do(ctx, api.Range, api.AppendRange(nil, r.o.markerKey(), api.RangeOptions{}))
	if err != nil {
		return false, err
	}
	have, err := api.KvsOf(answer)
	if err != nil {
		return false, err
	}
	want := marker{Keys: r.o.keys, KeySize: r.o.keySize, ValueSize: r.o.valueSize}
	if have.Keys == 0 {
		if count.Count > 0 {
			return false, fmt.Errorf("--prefix=%q holds %d keys that engram bench did not write, and it deletes all below its prefix in the end: choose another one", r.o.prefix, count.Count)
		}
		r.claimed = true // also if the answer is lost
		err := r.mark(ctx, want, 0)
		if errors.Is(err, errOthers) {
			r.claimed = false
		}
		return false, err
	}
	var m marker
	if err := json.Unmarshal(have.Value, &m); err != nil {
		return false, fmt.Errorf("key %q is no marker of engram bench (%w): choose another --prefix", r.o.markerKey(), err)
	}
	r.claimed = true
	from, end = r.o.numbered()
	numbered, err := r.list(ctx, from, api.RangeOptions{End: end, CountOnly: true})
	if err != nil {
		return false, err
	}
	want.Filled = true
	filled = m == want && numbered.Count == int64(want.Keys)
	if dirties && !filled && m.Filled {
		want.Filled = false
		return false, r.mark(ctx, want, have.ModRevision)
	}
	return filled, nil
}

var errOthers = errors.New("is being used by another run of engram bench")

// mark writes the marker, if it was last changed at the revision.
func (r *runner) mark(ctx context.Context, m marker, modRevision int64) error {
	value, err := json.Marshal(m)
	if err != nil {
		return err
	}
	answer, err := r.do(ctx, api.Txn, api.AppendUpdate(nil, r.o.markerKey(), value, 0, modRevision))
	if err != nil {
		return fmt.Errorf("writing below prefix %q: %w", r.o.prefix, err)
	}
	t, err := api.TxnOf(answer)
	if err == nil && !t.Succeeded {
		err = fmt.Errorf("--prefix=%q %w: choose another one", r.o.prefix, errOthers)
	}
	return err
}

// markFilled says in the marker that all keys are there.
func (r *runner) markFilled(ctx context.Context) error {
	value, err := json.Marshal(marker{Keys: r.o.keys, KeySize: r.o.keySize, ValueSize: r.o.valueSize, Filled: true})
	if err != nil {
		return err
	}
	_, err = r.do(ctx, api.Put, api.AppendPut(nil, r.o.markerKey(), value, 0))
	return err
}

// clear deletes a range, a bounded number of keys at a time.
func (r *runner) clear(ctx context.Context, from, end []byte) error {
	for {
		page, err := r.list(ctx, from, api.RangeOptions{End: end, Limit: clearPage, KeysOnly: true})
		if err != nil {
			return fmt.Errorf("deleting the keys below %q: %w", r.o.prefix, err)
		}
		if page.Keys == 0 {
			return nil
		}
		to := end
		if last := page.Last(); last != nil && page.More {
			to = append(append([]byte(nil), last...), 0)
		}
		if _, err := r.do(ctx, api.DeleteRange, api.AppendDeleteRange(nil, from, to)); err != nil {
			return fmt.Errorf("deleting the keys below %q: %w", r.o.prefix, err)
		}
		if !page.More {
			return nil
		}
	}
}

// filler puts all numbered keys, many in each transaction.
type filler struct {
	plain
	o       *options
	per     int
	at      atomic.Int64
	value   []byte
	changed func(i int, revision int64) // told of each key's revision
}

func (r *runner) newFiller(changed func(int, int64)) *filler {
	return &filler{o: r.o, per: max(1, min(fillOps, fillBytes/(r.o.keySize+r.o.valueSize+16))), value: api.Value(r.o.valueSize), changed: changed}
}

// fillFrom is where a slot's running transaction begins.
type fillFrom struct{ from, to int }

func (f *filler) kinds() []string { return []string{"fill"} }

func (f *filler) next(s *slot) (op, bool) {
	from := int(f.at.Add(1)-1) * f.per
	if from >= f.o.keys {
		return op{}, false
	}
	at, _ := s.own.(*fillFrom)
	if at == nil {
		at = &fillFrom{}
		s.own = at
	}
	at.from, at.to = from, min(from+f.per, f.o.keys)
	s.buf = s.buf[:0]
	var key [maxKeySize]byte
	for i := at.from; i < at.to; i++ {
		s.buf = api.AppendPutOp(s.buf, f.o.appendKey(key[:0], i), f.value)
	}
	return op{method: api.Txn, request: s.buf}, true
}

func (f *filler) message(s *slot, m []byte) error {
	rev, err := api.Revision(m)
	if err == nil && f.changed != nil {
		at := s.own.(*fillFrom)
		for i := at.from; i < at.to; i++ {
			f.changed(i, rev)
		}
	}
	return err
}

var errFill = errors.New("filling the store failed")

// fill makes the keys that the workload works on, unless they are there.
func (r *runner) fill(ctx context.Context, filled bool, changed func(int, int64)) error {
	if !filled {
		from, end := r.o.numbered()
		if err := r.clear(ctx, from, end); err != nil {
			return err
		}
		r.progress.say("filling %q with %d keys of %d bytes", r.o.prefix, r.o.keys, r.o.valueSize)
		f := r.newFiller(changed)
		streams := max(1, min(32/len(r.lanes), r.o.streams))
		_, all, _, err := r.run(ctx, f, extent{streams: streams}, nil)
		if err != nil {
			return err
		}
		if n := all.kinds[0].failures.count(); n > 0 {
			for code, e := range all.kinds[0].failures {
				return fmt.Errorf("%w: %d calls, with %s: %s", errFill, n, codeName(code), e.first)
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return r.markFilled(ctx)
	}
	if changed == nil {
		return nil
	}
	return r.revisions(ctx, changed)
}

// revisions asks when each key was last changed.
func (r *runner) revisions(ctx context.Context, changed func(int, int64)) error {
	from, end := r.o.numbered()
	for i := 0; i < r.o.keys; {
		answer, err := r.do(ctx, api.Range, api.AppendRange(nil, from, api.RangeOptions{End: end, Limit: 10_000, KeysOnly: true}))
		if err != nil {
			return err
		}
		began := i
		err = api.EachKv(answer, func(key []byte, modRevision int64) {
			if i < r.o.keys {
				changed(i, modRevision)
			}
			i++
			from = append(append(from[:0], key...), 0)
		})
		if err != nil {
			return err
		}
		if i == began {
			return fmt.Errorf("only %d of %d keys are below %q", i, r.o.keys, r.o.prefix)
		}
	}
	return nil
}
