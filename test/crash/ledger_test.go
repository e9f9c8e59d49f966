package crash

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"maps"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/internal/broken"
)

// effect is one change that a request makes: a put of value, or a delete.
type effect struct {
	key, value string
	deleted    bool
}

// change is the effects of one request, all at one revision or none at all.
type change struct {
	revision int64 // 0 while unknown
	effects  []effect
}

// record is one event with its place in the revision log.
type record struct {
	main, sub int64
	deleted   bool
	kv        *mvccpb.KeyValue
}

// grant is a lease that clients were told of.
type grant struct {
	ttl     int64 // seconds
	revoked bool
	doubt   bool // a revoke has no answer
}

// ledger is what clients were told, and all events since the first revision as
// one resumed watcher saw them.
type ledger struct {
	mu     sync.Mutex
	frozen bool // a crash has begun: answers that come now say nothing

	told      map[int64]change // acknowledged since the last audit, by revision
	doubts    []change         // without an answer, since the last audit
	top       int64            // highest revision in any answer
	leases    map[int64]grant
	compacted int64 // highest compaction that was acknowledged
	count     int   // answers, of all lives

	records []record
	live    map[string]*mvccpb.KeyValue
	audited int // records that an audit has accounted for
	wake    chan struct{}

	kept, dropped int // doubts that took place and that did not
}

func newLedger() *ledger {
	return &ledger{
		told: map[int64]change{}, leases: map[int64]grant{}, live: map[string]*mvccpb.KeyValue{}, wake: make(chan struct{}, 1),
	}
}

// freeze marks the crash: what is noted from now on was not told in time.
func (l *ledger) freeze() {
	l.mu.Lock()
	l.frozen = true
	l.mu.Unlock()
}

func (l *ledger) thaw() {
	l.mu.Lock()
	l.frozen = false
	l.mu.Unlock()
}

// tell notes an acknowledged request. It reports whether the acknowledgement
// came before the crash; one that did not is in doubt.
func (l *ledger) tell(revision int64, effects ...effect) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.frozen {
		l.doubtLocked(effects)
		return false
	}
	l.count++
	l.top = max(l.top, revision)
	if len(effects) > 0 {
		l.told[revision] = change{revision, effects}
	}
	return true
}

func (l *ledger) doubt(effects ...effect) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.doubtLocked(effects)
}

func (l *ledger) doubtLocked(effects []effect) {
	if len(effects) > 0 {
		l.doubts = append(l.doubts, change{effects: effects})
	}
}

// noteLease changes what is known of a lease if the crash has not come yet.
func (l *ledger) noteLease(id int64, f func(*grant)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.frozen {
		g := l.leases[id]
		f(&g)
		l.leases[id] = g
	}
}

func (l *ledger) noteCompaction(revision int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.frozen {
		l.compacted = max(l.compacted, revision)
	}
}

// seen is the revision of the last event.
func (l *ledger) seen() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seenLocked()
}

func (l *ledger) seenLocked() int64 {
	if len(l.records) == 0 {
		return 1
	}
	return l.records[len(l.records)-1].main
}

// observe adds what the watcher got. Each revision comes once, whole, in order.
func (l *ledger) observe(r clientv3.WatchResponse) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.frozen {
		return nil
	}
	before := l.seenLocked()
	for _, e := range r.Events {
		rec := record{main: e.Kv.ModRevision, deleted: e.Type == mvccpb.DELETE, kv: e.Kv}
		if n := len(l.records); n > 0 && l.records[n-1].main == rec.main {
			rec.sub = l.records[n-1].sub + 1
		}
		switch last := l.seenLocked(); {
		case rec.main <= before:
			return broken.Errorf("watch: event of %q at revision %d comes after revision %d was seen", e.Kv.Key, rec.main, before)
		case rec.main != last && rec.main != last+1:
			return broken.Errorf("watch: event of %q at revision %d follows revision %d: events between are missing", e.Kv.Key, rec.main, last)
		}
		if err := l.follows(&rec); err != nil {
			return err
		}
		l.records = append(l.records, rec)
		if rec.deleted {
			delete(l.live, string(e.Kv.Key))
		} else {
			l.live[string(e.Kv.Key)] = e.Kv
		}
	}
	if len(r.Events) > 0 && r.Header.Revision < l.seenLocked() {
		return broken.Errorf("watch: header revision %d with events up to %d", r.Header.Revision, l.seenLocked())
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return nil
}

// follows checks that an event fits what was live before.
func (l *ledger) follows(r *record) error {
	prev := l.live[string(r.kv.Key)]
	switch {
	case r.deleted && prev == nil:
		return broken.Errorf("watch: delete of %q at revision %d, which was not there", r.kv.Key, r.main)
	case r.deleted:
	case prev == nil && (r.kv.CreateRevision != r.main || r.kv.Version != 1):
		return broken.Errorf("watch: new key %v at revision %d", r.kv, r.main)
	case prev != nil && (r.kv.CreateRevision != prev.CreateRevision || r.kv.Version != prev.Version+1):
		return broken.Errorf("watch: %v at revision %d follows %v", r.kv, r.main, prev)
	}
	return nil
}

// reconcile accounts for every event since the last audit: each revision is what
// one client asked for, and everything that was acknowledged is there at its
// revision. Requests without an answer happened whole or not at all, and cannot
// happen any more: whoever had them is gone.
func (l *ledger) reconcile() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.audited < len(l.records) {
		end := l.audited + 1
		for end < len(l.records) && l.records[end].main == l.records[l.audited].main {
			end++
		}
		group := l.records[l.audited:end]
		revision := group[0].main
		if c, ok := l.told[revision]; ok {
			if !sameEffects(c.effects, group) {
				return broken.Errorf("acknowledged at revision %d was %v, there is %v", revision, c.effects, describe(group))
			}
			delete(l.told, revision)
		} else if i := slices.IndexFunc(l.doubts, func(c change) bool { return sameEffects(c.effects, group) }); i >= 0 {
			l.doubts = slices.Delete(l.doubts, i, i+1)
			l.kept++
		} else {
			return broken.Errorf("revision %d holds what nobody asked for, or half of a request: %v", revision, describe(group))
		}
		l.audited = end
	}
	if len(l.told) > 0 {
		first := slices.Min(slices.Collect(maps.Keys(l.told)))
		return broken.Errorf("%d acknowledged writes are lost, the first is %v at revision %d; the history ends at %d",
			len(l.told), l.told[first].effects, first, l.seenLocked())
	}
	l.dropped += len(l.doubts)
	l.doubts = nil
	return nil
}

func sameEffects(want []effect, got []record) bool {
	if len(want) != len(got) {
		return false
	}
	have := map[effect]bool{}
	for i := range got {
		have[effectOf(&got[i])] = true
	}
	for _, e := range want {
		if !have[e] {
			return false
		}
	}
	return true
}

func effectOf(r *record) effect {
	if r.deleted {
		return effect{key: string(r.kv.Key), deleted: true}
	}
	return effect{key: string(r.kv.Key), value: string(r.kv.Value)}
}

func describe(group []record) (out []effect) {
	for i := range group {
		out = append(out, effectOf(&group[i]))
	}
	return out
}

// compare checks a read of everything at the last revision that was seen.
func (l *ledger) compare(kvs []*mvccpb.KeyValue) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	got := map[string]*mvccpb.KeyValue{}
	for _, kv := range kvs {
		got[string(kv.Key)] = kv
		if want := l.live[string(kv.Key)]; want == nil || !proto.Equal(kv, want) {
			errs = append(errs, broken.Errorf("read: %v, by its events %v", kv, want))
		}
	}
	for key, kv := range l.live {
		if got[key] == nil {
			errs = append(errs, broken.Errorf("read: %q is not there, by its events %v", key, kv))
		}
	}
	return errors.Join(errs...)
}

// attached is the live keys of a lease, sorted.
func (l *ledger) attached(id int64) (keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key, kv := range l.live {
		if kv.Lease == id {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// hashKV computes etcd's HashKV at the last revision from the events alone.
func (l *ledger) hashKV(compacted int64) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	keep := map[int64]map[string]bool{}
	for key, kv := range l.live {
		if keep[kv.ModRevision] == nil {
			keep[kv.ModRevision] = map[string]bool{}
		}
		keep[kv.ModRevision][key] = true
	}
	h := crc32.New(castagnoli)
	h.Write([]byte("key"))
	for i := range l.records {
		r := &l.records[i]
		if r.main <= compacted && (r.deleted || !keep[r.main][string(r.kv.Key)]) {
			continue
		}
		key := binary.BigEndian.AppendUint64(nil, uint64(r.main))
		key = binary.BigEndian.AppendUint64(append(key, '_'), uint64(r.sub))
		kv := r.kv
		if r.deleted {
			key = append(key, 't')
			kv = &mvccpb.KeyValue{Key: kv.Key}
		}
		value, err := proto.MarshalOptions{Deterministic: true}.Marshal(kv)
		if err != nil {
			panic(err)
		}
		h.Write(key)
		h.Write(value)
	}
	return h.Sum32()
}

// from is the events after revision, for a second watcher to be compared with.
func (l *ledger) from(revision int64) []record {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, _ := slices.BinarySearchFunc(l.records, revision, func(r record, rev int64) int { return cmp.Compare(r.main, rev) })
	return slices.Clone(l.records[i:])
}

func (r *record) equal(e *clientv3.Event) bool {
	return r.main == e.Kv.ModRevision && r.deleted == (e.Type == mvccpb.DELETE) && bytes.Equal(r.kv.Key, e.Kv.Key) && bytes.Equal(r.kv.Value, e.Kv.Value)
}
