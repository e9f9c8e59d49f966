package storage

import (
	"bytes"
	"fmt"
)

// loadBatchBytes is the size at which a Loader commits.
const loadBatchBytes = 4 << 20

// Loader fills a new store with keys in ascending order. One goroutine uses it.
// Until Finish a crash leaves any part of them: a directory that was not
// finished is thrown away.
//
// It commits batches like anybody else. To write tables and have Pebble ingest
// them takes a fifth less time (200 MB: 0.69 s and 0.85 s), which is not worth
// another kind of file to clean up after a crash.
type Loader struct {
	s    *Store
	b    *Batch
	last []byte
}

// NewLoader returns a loader. It is spent by Finish or Discard.
func (s *Store) NewLoader() *Loader { return &Loader{s: s, b: s.NewBatch()} }

// Set adds a key and its value, as they are on disk. Both are copied.
func (l *Loader) Set(key, value []byte) error {
	if bytes.Compare(key, l.last) <= 0 {
		return fmt.Errorf("storage: load: key %x follows %x", key, l.last)
	}
	l.last = append(l.last[:0], key...)
	if !known(key) {
		return fmt.Errorf("storage: load: key %.40x is of no table of format %d: %w", key, FormatVersion, ErrFormat)
	}
	l.b.Set(key, value)
	if l.b.Len() < loadBatchBytes {
		return nil
	}
	return l.commit()
}

func (l *Loader) commit() error {
	b := l.b
	l.b = l.s.NewBatch()
	return l.s.Commit(b)
}

// Finish makes all keys durable.
func (l *Loader) Finish() error {
	if err := l.s.Commit(l.b); err != nil {
		return err
	}
	return l.s.Flush()
}

// Discard gives up. What was added may be in the store.
func (l *Loader) Discard() { l.b.Discard() }

// known says whether a disk key is one that this format has.
func known(key []byte) bool {
	if len(key) < 2 {
		return false
	}
	if key[0] == prefixRevision {
		return len(key) == revisionKeySize
	}
	return key[0] >= prefixMeta && key[0] <= prefixMemberGone
}
