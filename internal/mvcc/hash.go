package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// recordHash is the CRC-32C of the word "key" and of records, each as etcd's
// bucket of that name has it: BE64(main) '_' BE64(sub) ['t'], then the
// KeyValue. The zero value has nothing hashed.
type recordHash struct {
	crc     uint32
	started bool
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (h *recordHash) add(r *logRecord) {
	var key [18]byte
	binary.BigEndian.PutUint64(key[:], uint64(r.rev.Main))
	key[8] = '_'
	binary.BigEndian.PutUint64(key[9:], uint64(r.rev.Sub))
	n := 17
	if r.Tombstone {
		key[17] = 't'
		n = 18
	}
	crc := crc32.Update(h.value(), castagnoli, key[:n])
	h.crc, h.started = crc32.Update(crc, castagnoli, r.KV), true
}

func (h *recordHash) value() uint32 {
	if !h.started {
		return crc32.Checksum([]byte("key"), castagnoli)
	}
	return h.crc
}

// keepSet answers whether any record at all is in the keep set of a hash, which
// is asked seldom and found once.
type keepSet struct{ known, some bool }

func (k *keepSet) any(find func() bool) bool {
	if !k.known {
		k.known, k.some = true, find()
	}
	return k.some
}

// liveAt says whether any key is live at rev.
func liveAt(ix index.Root, rev int64) (live bool) {
	ix.Ascend(nil, []byte{0}, rev, func(index.Item) bool {
		live = true
		return false
	})
	return live
}

// hashScanned adds a record that the scan of j meets, before its deletion, to
// the hash of the compaction: the rule of HashKV at j.rev with the compaction
// before as the compact revision and with j's survivors as the keep set.
func (s *Store) hashScanned(j *compactJob, r *logRecord, survives bool) {
	if r.rev.Main == j.previous && r.Tombstone {
		return
	}
	if r.rev.Main <= j.previous && !survives && j.keep.any(func() bool {
		return liveAt(s.root.index, j.rev) || s.tombstoneAt(j.rev)
	}) {
		return
	}
	j.sum.add(r)
}

// tombstoneAt says whether any record of main revision rev is a tombstone.
func (s *Store) tombstoneAt(rev int64) bool {
	found := false
	lower, upper := storage.RevisionBounds(rev, rev+1)
	err := s.eachRecord(context.Background(), lower, upper, nil, func(r *logRecord) bool {
		found = r.Tombstone
		return !found
	})
	if err != nil {
		// The scan that asks reads the same blocks next and reports it.
		s.log.Warn("cannot read records", "revision", rev, "error", err)
	}
	return found
}

// HashKV hashes the records up to rev (0: the newest) by state-machine.md 4.1.
// The error is ErrCompacted, ErrFutureRevision, the context's, or the disk's.
//
// Where etcd's answer would depend on how far a compaction has come with its
// deletions, HashKV waits for it, or answers ErrCompacted if deletion for a
// compaction newer than r has begun: the caller may try again with a newer
// Root.
func (s *Store) HashKV(ctx context.Context, r Root, rev int64) (HashResult, error) {
	return s.HashKVPaced(ctx, r, rev, nil)
}

// HashKVPaced is HashKV that calls pace, if it is not nil, with 0 before it reads
// anything, then from time to time with the bytes it has read since the last
// call. Its error ends the hash. An answer that needs no reading does not call it.
func (s *Store) HashKVPaced(ctx context.Context, r Root, rev int64, pace func(bytes int) error) (HashResult, error) {
	if h, ok := s.hashes.find(rev); ok {
		return HashResult{Hash: h.hash, CompactRevision: h.compacted, HashRevision: h.revision, Revision: r.revision}, nil
	}
	if rev > 0 && rev < r.compacted {
		return HashResult{}, fmt.Errorf("hash at revision %d, compacted at %d: %w", rev, r.compacted, ErrCompacted)
	}
	if rev > r.revision {
		return HashResult{}, fmt.Errorf("hash at revision %d, the store is at %d: %w", rev, r.revision, ErrFutureRevision)
	}
	if rev == 0 {
		rev = r.revision
	}
	res := HashResult{CompactRevision: r.compacted, HashRevision: rev, Revision: r.revision}
	var h recordHash
	if rev > 0 {
		if err := s.hashTo(ctx, r, rev, &h, pace); err != nil {
			return HashResult{}, err
		}
	}
	res.Hash = h.value()
	return res, nil
}

// paceBytes is how much is hashed between two calls of pace.
const paceBytes = 1 << 20

func (s *Store) hashTo(ctx context.Context, r Root, rev int64, h *recordHash, pace func(bytes int) error) error {
	keepSome := liveAt(r.index, rev)
	if !keepSome && s.finishedNow.Load() < r.compacted {
		select {
		case <-s.CompactionDone(r.compacted):
		case <-ctx.Done():
			return fmt.Errorf("hash at revision %d waits for the compaction at %d: %w", rev, r.compacted, ctx.Err())
		}
	}
	if pace != nil {
		if err := pace(0); err != nil {
			return err
		}
	}
	lower, upper := storage.RevisionBounds(0, rev+1)
	pinned := func() error {
		if deleted := s.deleting.Load(); deleted > r.compacted {
			return fmt.Errorf("hash at revision %d compacted at %d, records are being deleted up to %d: %w", rev, r.compacted, deleted, ErrCompacted)
		}
		return nil
	}
	check := walkCheck{ctx: ctx}
	var failed error
	read := 0
	err := s.eachRecord(ctx, lower, upper, pinned, func(rec *logRecord) bool {
		if check.stop() {
			return false
		}
		if read += len(rec.KV); pace != nil && read >= paceBytes {
			failed = pace(read)
			read = 0
		}
		if failed != nil {
			return false
		}
		if rec.rev.Main == r.compacted && rec.Tombstone {
			return true
		}
		if rec.rev.Main <= r.compacted && keepSome {
			if rec.Tombstone {
				return true
			}
			if it, ok := r.index.Get(rec.key(), rev); !ok || it.Mod != rec.rev {
				return true
			}
		}
		h.add(rec)
		return true
	})
	return errors.Join(err, failed, ctx.Err())
}

// hashCache keeps the hashes of the newest compactions.
type hashCache struct {
	mu     sync.Mutex
	hashes []cachedHash // ascending by revision
}

type cachedHash struct {
	hash                uint32
	compacted, revision int64
}

const cachedHashes = 10

func (c *hashCache) add(h cachedHash) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hashes = append(c.hashes, h)
	slices.SortFunc(c.hashes, func(a, b cachedHash) int { return int(a.revision - b.revision) })
	if n := len(c.hashes); n > cachedHashes {
		c.hashes = c.hashes[n-cachedHashes:]
	}
}

func (c *hashCache) find(rev int64) (cachedHash, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.hashes {
		if h.revision == rev {
			return h, true
		}
	}
	return cachedHash{}, false
}

// CompactionHashes returns the hashes of the newest finished compactions,
// oldest first, for checks between members. They are lost at a restart.
func (s *Store) CompactionHashes() []HashResult {
	s.hashes.mu.Lock()
	defer s.hashes.mu.Unlock()
	out := make([]HashResult, len(s.hashes.hashes))
	for i, h := range s.hashes.hashes {
		out[i] = HashResult{Hash: h.hash, CompactRevision: h.compacted, HashRevision: h.revision}
	}
	return out
}
