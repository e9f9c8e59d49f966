package mvcc

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"hash/crc32"
	"slices"
)

// model is the store as a slice of records, with the rules of
// state-machine.md 3 and 4 written down as plainly as possible.
type model struct {
	records   []modelRecord // in revision order, logically present
	revision  int64
	compacted int64
	// compaction is the hash of the last compaction, as it would be cached.
	compaction HashResult
}

type modelRecord struct {
	rev       Revision
	kv        keyValue
	tombstone bool
}

func newModel() *model { return &model{revision: 1, compacted: -1} }

func (m *model) clone() *model {
	c := *m
	c.records = slices.Clone(m.records)
	return &c
}

// at returns the live records at rev, in key order.
func (m *model) at(rev int64) []modelRecord {
	last := map[string]modelRecord{}
	for _, r := range m.records {
		if r.rev.Main <= rev {
			last[string(r.kv.key)] = r
		}
	}
	var out []modelRecord
	for _, r := range last {
		if !r.tombstone {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, func(a, b modelRecord) int { return bytes.Compare(a.kv.key, b.kv.key) })
	return out
}

func inRange(k, key, end []byte) bool {
	switch {
	case len(end) == 0:
		return bytes.Equal(k, key)
	case bytes.Equal(end, []byte{0}):
		return bytes.Compare(k, key) >= 0
	}
	return bytes.Compare(k, key) >= 0 && bytes.Compare(k, end) < 0
}

func (m *model) put(rev Revision, key, value []byte, lease int64) {
	kv := keyValue{key: key, value: value, create: rev.Main, mod: rev.Main, version: 1, lease: lease}
	for _, r := range slices.Backward(m.records) {
		if bytes.Equal(r.kv.key, key) {
			if !r.tombstone {
				kv.create, kv.version = r.kv.create, r.kv.version+1
			}
			break
		}
	}
	m.records = append(m.records, modelRecord{rev: rev, kv: kv})
}

func (m *model) delete(main int64, sub int64, key, end []byte) (deleted int64) {
	for _, r := range m.at(1 << 60) {
		if inRange(r.kv.key, key, end) {
			m.records = append(m.records, modelRecord{rev: Revision{Main: main, Sub: sub + deleted}, kv: keyValue{key: r.kv.key}, tombstone: true})
			deleted++
		}
	}
	return deleted
}

func (m *model) compact(rev int64) error {
	if rev <= m.compacted {
		return ErrCompacted
	}
	if rev > m.revision {
		return ErrFutureRevision
	}
	newest := map[string]Revision{}
	for _, r := range m.records {
		if r.rev.Main <= rev {
			newest[string(r.kv.key)] = r.rev
		}
	}
	survives := func(r modelRecord) bool {
		return r.rev.Main > rev || newest[string(r.kv.key)] == r.rev && (!r.tombstone || r.rev.Main == rev)
	}
	keep := map[Revision]bool{}
	for _, r := range m.records {
		if r.rev.Main <= rev && survives(r) {
			keep[r.rev] = true
		}
	}
	m.compaction = HashResult{Hash: m.hashWith(rev, keep), CompactRevision: m.compacted, HashRevision: rev}
	m.compacted = rev
	m.records = slices.DeleteFunc(m.records, func(r modelRecord) bool { return !survives(r) })
	return nil
}

func (m *model) usage() (n int64) {
	for _, r := range m.records {
		n += int64(r.kv.size())
	}
	return n
}

func (m *model) rangeOf(key, end []byte, o RangeOptions) (RangeResult, error) {
	rev := o.Revision
	if rev <= 0 {
		rev = m.revision
	}
	if rev > m.revision {
		return RangeResult{}, ErrFutureRevision
	}
	if rev < m.compacted {
		return RangeResult{}, ErrCompacted
	}
	var res RangeResult
	live := slices.DeleteFunc(m.at(rev), func(r modelRecord) bool { return !inRange(r.kv.key, key, end) })
	res.Count = int64(len(live))
	if o.CountOnly {
		return res, nil
	}
	filters := o.MinMod != 0 || o.MaxMod != 0 || o.MinCreate != 0 || o.MaxCreate != 0
	if (o.Order == OrderNone || o.Target == TargetKey && o.Order == OrderAscend) && !filters && o.Limit > 0 && int64(len(live)) > o.Limit {
		live = live[:o.Limit+1]
	}
	live = slices.DeleteFunc(live, func(r modelRecord) bool {
		return o.MinMod != 0 && r.kv.mod < o.MinMod || o.MaxMod != 0 && r.kv.mod > o.MaxMod ||
			o.MinCreate != 0 && r.kv.create < o.MinCreate || o.MaxCreate != 0 && r.kv.create > o.MaxCreate
	})
	slices.SortStableFunc(live, func(a, b modelRecord) int {
		if o.Order == OrderDescend {
			a, b = b, a
		}
		switch o.Target {
		case TargetVersion:
			return cmp.Compare(a.kv.version, b.kv.version)
		case TargetCreate:
			return cmp.Compare(a.kv.create, b.kv.create)
		case TargetMod:
			return cmp.Compare(a.kv.mod, b.kv.mod)
		case TargetValue:
			return bytes.Compare(a.kv.value, b.kv.value)
		}
		return bytes.Compare(a.kv.key, b.kv.key)
	})
	if o.Limit > 0 && int64(len(live)) > o.Limit {
		live, res.More = live[:o.Limit], true
	}
	for _, r := range live {
		kv := r.kv
		if o.KeysOnly {
			kv.value = nil
			if o.Target != TargetValue {
				kv.lease = 0
			}
		}
		res.KVs = append(res.KVs, kv.append(nil))
		res.Bytes += int64(kv.size())
	}
	return res, nil
}

// hash is HashKV over what a finished compaction leaves.
func (m *model) hash(rev int64) uint32 {
	keep := map[Revision]bool{}
	for _, r := range m.at(rev) {
		keep[r.rev] = true
	}
	return m.hashWith(rev, keep)
}

func (m *model) hashWith(rev int64, keep map[Revision]bool) uint32 {
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	h.Write([]byte("key"))
	for _, r := range m.records {
		if r.rev.Main > rev || r.rev.Main <= m.compacted && len(keep) > 0 && !keep[r.rev] || r.rev.Main == m.compacted && r.tombstone {
			continue
		}
		k := binary.BigEndian.AppendUint64(nil, uint64(r.rev.Main))
		k = binary.BigEndian.AppendUint64(append(k, '_'), uint64(r.rev.Sub))
		if r.tombstone {
			k = append(k, 't')
		}
		h.Write(k)
		h.Write(r.kv.append(nil))
	}
	return h.Sum32()
}

func (m *model) events(from int64) (out []Event) {
	for _, r := range m.records {
		if r.rev.Main < from {
			continue
		}
		e := Event{Rev: r.rev, Key: r.kv.key, Delete: r.tombstone, Create: !r.tombstone && r.kv.version == 1}
		kv := r.kv
		if r.tombstone {
			kv.mod = r.rev.Main
		}
		e.KV = kv.append(nil)
		if r.rev.Main-1 >= m.compacted {
			for _, p := range slices.Backward(m.records) {
				if p.rev.Main < r.rev.Main && bytes.Equal(p.kv.key, r.kv.key) {
					if !p.tombstone {
						e.Prev = p.rev
					}
					break
				}
			}
		}
		out = append(out, e)
	}
	return out
}
