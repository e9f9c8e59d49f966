package mvcc

import (
	"context"
	"errors"
	"fmt"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// promotion is a value that was read from disk and may go into memory.
type promotion struct {
	item index.Item
	kv   []byte
}

const (
	promotionQueue = 256
	promotionBytes = 32 << 10 // larger values are not promoted: their read is dear, but seldom
)

// promote offers a value that was read from disk to the value memory. The
// writer takes it when it has time; if there are too many they are dropped.
func (s *Store) promote(it index.Item, kv []byte) {
	if len(kv) > promotionBytes {
		return
	}
	select {
	case s.promotions <- promotion{it, kv}:
	default:
	}
}

// takePromotions moves some promoted values into memory.
func (s *Store) takePromotions(most int) {
	for range most {
		select {
		case p := <-s.promotions:
			s.remember(p.item.Key, p.item.Mod, p.kv)
		default:
			return
		}
	}
}

// remember puts the value of a live key into memory unless it is there or
// memory is full.
func (s *Store) remember(key []byte, mod Revision, kv []byte) {
	if s.values.full() {
		return
	}
	if it, ok := s.tree.Now().Get(key, 0); ok && it.Mod == mod && !s.values.has(it.Ref) {
		s.move(it, kv)
	}
}

// move copies the value of the live item it to a new place in memory.
func (s *Store) move(it index.Item, kv []byte) {
	buf, ref := s.values.addMoved(len(kv))
	copy(buf, kv)
	s.tree.SetRef(it.Key, it.Mod, ref)
}

// trim brings the value memory back to its budget. It may look at as many
// entries as moves.
func (s *Store) trim(moves int) {
	s.values.trim(moves, func(ref index.ValueRef, kv []byte) {
		it, ok := s.tree.Now().Get(keyOf(kv), 0)
		if ok && it.Ref == ref {
			s.move(it, kv)
			s.values.dead(ref, it.Size)
		}
	})
}

// warmRecords bounds the records that one warm step looks at, beside scanBytes.
const warmRecords = 256

// warm reads records into the value memory after a start, the newest first,
// until the memory is full, Options.WarmBytes were read, or all. It does one bounded step and
// returns whether there is more to do.
func (s *Store) warm() (more bool, err error) {
	if s.values.full() || s.warmed >= s.o.WarmBytes {
		s.warmBelow = Revision{}
	}
	if s.warmBelow == (Revision{}) {
		s.endWarm()
		return false, nil
	}
	lower, _ := storage.RevisionBounds(0, 0)
	iter, err := s.storage.Iter(context.Background(), lower, storage.AppendRevisionKey(nil, s.warmBelow.Main, s.warmBelow.Sub))
	if err != nil {
		return false, fmt.Errorf("mvcc: warm: %w", err)
	}
	defer func() { err = errors.Join(err, iter.Close()) }()
	records, bytes := 0, 0
	for ok := iter.Last(); ok; ok = iter.Prev() {
		if records == warmRecords || bytes > scanBytes {
			s.root.index = s.tree.Root()
			return true, nil
		}
		rec, size, err := readRecord(iter)
		if err != nil {
			return false, fmt.Errorf("mvcc: warm: %w", err)
		}
		records, bytes = records+1, bytes+size
		s.warmBelow = rec.rev
		if !rec.Tombstone {
			s.warmed += int64(size)
			s.remember(rec.key(), rec.rev, rec.KV)
		}
	}
	s.warmBelow = Revision{}
	s.root.index = s.tree.Root()
	s.endWarm()
	return false, iter.Error()
}

// endWarm gives the block cache its room back: what was read meanwhile is in the
// value memory, and would have stood there twice.
func (s *Store) endWarm() {
	if s.cacheBack == nil {
		return
	}
	s.cacheBack()
	s.cacheBack = nil
	if s.o.OnWarm != nil {
		s.o.OnWarm()
	}
}
