package history

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/internal/broken"
)

// effect is one change that a request makes: a put of value, or a delete.
type effect struct {
	key, value string
	deleted    bool
}

// ledger is what clients were told of their writes, and what may have come of those without an answer.
type ledger struct {
	mu     sync.Mutex
	told   map[int64][]effect // acknowledged, by revision
	doubts [][]effect         // without an answer
	count  int                // answers
	top    int64              // highest revision in any answer
}

func newLedger() *ledger { return &ledger{told: map[int64][]effect{}} }

// tell notes an acknowledged request, and no effects of one that changed nothing.
func (l *ledger) tell(revision int64, effects ...effect) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	l.top = max(l.top, revision)
	if len(effects) == 0 {
		return nil
	}
	if other, taken := l.told[revision]; taken {
		return broken.Errorf("revision %d was told of %v and of %v", revision, other, effects)
	}
	l.told[revision] = effects
	return nil
}

func (l *ledger) doubt(effects ...effect) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(effects) > 0 {
		l.doubts = append(l.doubts, effects)
	}
}

func (l *ledger) answers() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// reconcile accounts for every event of a whole history: each revision is what one client asked for, all that was
// acknowledged is there at its revision, and what has no answer happened whole or not at all.
func (l *ledger) reconcile(events []*mvccpb.Event) (kept, dropped int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	doubts := make(map[effect][][]effect) // by their first effect
	for _, d := range l.doubts {
		doubts[d[0]] = append(doubts[d[0]], d)
	}
	seen := 0
	for at := 0; at < len(events); {
		end := at + 1
		revision := events[at].Kv.ModRevision
		for end < len(events) && events[end].Kv.ModRevision == revision {
			end++
		}
		var group []effect
		for _, e := range events[at:end] {
			group = append(group, effect{string(e.Kv.Key), string(e.Kv.Value), e.Type == mvccpb.DELETE})
		}
		at = end
		if told, ok := l.told[revision]; ok {
			if !sameEffects(told, group) {
				return 0, 0, broken.Errorf("acknowledged at revision %d was %v, there is %v", revision, told, group)
			}
			seen++
			continue
		}
		first := slices.IndexFunc(group, func(e effect) bool {
			return slices.ContainsFunc(doubts[e], func(d []effect) bool { return sameEffects(d, group) })
		})
		if first < 0 {
			return 0, 0, broken.Errorf("revision %d holds what nobody asked for, or half of a request: %v", revision, group)
		}
		all := doubts[group[first]]
		i := slices.IndexFunc(all, func(d []effect) bool { return sameEffects(d, group) })
		doubts[group[first]] = slices.Delete(all, i, i+1)
		kept++
	}
	if seen < len(l.told) {
		return 0, 0, broken.Errorf("%d of %d acknowledged writes are lost: %v", len(l.told)-seen, len(l.told), l.lost(events))
	}
	return kept, len(l.doubts) - kept, nil
}

// lost describes the first acknowledged writes that are not among the events.
func (l *ledger) lost(events []*mvccpb.Event) (lines []string) {
	there := make(map[int64]bool)
	for _, e := range events {
		there[e.Kv.ModRevision] = true
	}
	for revision, effects := range l.told {
		if !there[revision] && len(lines) < 5 {
			lines = append(lines, fmt.Sprintf("revision %d, %v", revision, effects))
		}
	}
	return lines
}

func sameEffects(a, b []effect) bool {
	if len(a) != len(b) {
		return false
	}
	for _, e := range a {
		if !slices.Contains(b, e) {
			return false
		}
	}
	return true
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// hashKV computes etcd's HashKV at the last revision from the events of a whole history.
func hashKV(events []*mvccpb.Event, compacted int64) uint32 {
	// Of what is compacted counts only what a key still holds at the revision of the hash.
	live := map[string]int64{}
	for _, e := range events {
		if e.Type == mvccpb.DELETE {
			delete(live, string(e.Kv.Key))
		} else {
			live[string(e.Kv.Key)] = e.Kv.ModRevision
		}
	}
	h := crc32.New(castagnoli)
	h.Write([]byte("key"))
	var revision, sub int64
	for _, e := range events {
		if e.Kv.ModRevision == revision {
			sub++
		} else {
			revision, sub = e.Kv.ModRevision, 0
		}
		deleted := e.Type == mvccpb.DELETE
		if revision <= compacted && (deleted || live[string(e.Kv.Key)] != revision) {
			continue
		}
		key := binary.BigEndian.AppendUint64(nil, uint64(revision))
		key = binary.BigEndian.AppendUint64(append(key, '_'), uint64(sub))
		kv := e.Kv
		if deleted {
			key, kv = append(key, 't'), &mvccpb.KeyValue{Key: kv.Key}
		}
		value, err := proto.MarshalOptions{Deterministic: true}.Marshal(kv)
		if err != nil {
			panic(err) // a message of plain fields
		}
		h.Write(key)
		h.Write(value)
	}
	return h.Sum32()
}
