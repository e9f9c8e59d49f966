package mvcc

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// An index checkpoint is the index of one moment in a file, so that a start
// needs to read only the records after it.
//
//	head:   magic (8) | revision BE64 | applied index BE64 | CRC-32C of these (4)
//	blocks: length BE32 (> 0) | CRC-32C of the payload (4) | payload, see index.Encoder
//	end:    length 0 (4) | keys BE64 | CRC-32C of the keys (4)
//
// A file under the final name is always whole: it is written under another
// name, synced and renamed, after a flush that makes its moment durable in
// Pebble. While it exists, no compaction has deleted records above its
// revision without being superseded by a newer file: see saver.ensure.
const (
	CheckpointFile  = "index.checkpoint"
	CheckpointTemp  = "index.checkpoint.tmp" // while it is written
	checkpointMagic = "ENGRIDX1"
	checkpointHead  = 8 + 8 + 8
	// checkpointBlock is the size at which a block ends.
	checkpointBlock = 64 << 10

	checkpointCategory = "index-checkpoint" // of the file's writes, for Pebble's vfs
)

// maxCheckpointBlock refuses lengths that only damage can explain. A block is
// longer than checkpointBlock by at most one key and its history; one with more is
// not written. Only a test changes it.
var maxCheckpointBlock uint32 = 1 << 30

// errCheckpoint says that a checkpoint file is damaged.
var errCheckpoint = errors.New("mvcc: damaged index checkpoint")

// errNoCheckpoint says that a checkpoint was given up, for a reason with which the
// member can live: the next start is slower.
var errNoCheckpoint = errors.New("mvcc: no index checkpoint")

// writeCheckpoint writes the index of r, with memory for one block.
func writeCheckpoint(out io.Writer, r Root, applied uint64) error {
	w := bufio.NewWriterSize(out, 256<<10)
	head := append(make([]byte, 0, checkpointHead+4), checkpointMagic...)
	head = binary.BigEndian.AppendUint64(head, uint64(r.revision))
	head = binary.BigEndian.AppendUint64(head, applied)
	w.Write(binary.BigEndian.AppendUint32(head, crc32.Checksum(head, castagnoli)))
	var keys uint64
	err := r.index.Encode(checkpointBlock, func(block []byte, records int) error {
		if uint64(len(block)) > uint64(maxCheckpointBlock) {
			return fmt.Errorf("%w: a key has a history of %d bytes, more than a block of %d can hold: compact more often", errNoCheckpoint, len(block), maxCheckpointBlock)
		}
		var h [8]byte
		binary.BigEndian.PutUint32(h[:], uint32(len(block)))
		binary.BigEndian.PutUint32(h[4:], crc32.Checksum(block, castagnoli))
		w.Write(h[:])
		_, err := w.Write(block) // an error sticks, so the last one tells
		keys += uint64(records)
		runtime.Gosched() // all of the index at once would keep a processor from the requests for long
		return err
	})
	if err != nil {
		return err
	}
	end := binary.BigEndian.AppendUint64(make([]byte, 4, 16), keys)
	w.Write(binary.BigEndian.AppendUint32(end, crc32.Checksum(end[4:], castagnoli)))
	return w.Flush()
}

// readCheckpoint reads what writeCheckpoint wrote and gives each record to add,
// which must not keep it. accept decides by the head whether to go on.
func readCheckpoint(in io.Reader, accept func(revision int64, applied uint64) error, add func(*index.Record) error) error {
	r := bufio.NewReaderSize(in, 256<<10)
	var head [checkpointHead + 4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return fmt.Errorf("%w: head: %w", errCheckpoint, err)
	}
	if string(head[:8]) != checkpointMagic || crc32.Checksum(head[:checkpointHead], castagnoli) != binary.BigEndian.Uint32(head[checkpointHead:]) {
		return fmt.Errorf("%w: bad head", errCheckpoint)
	}
	if err := accept(int64(binary.BigEndian.Uint64(head[8:])), binary.BigEndian.Uint64(head[16:])); err != nil {
		return err
	}
	var (
		keys  uint64
		block []byte
		rec   index.Record
	)
	for n := 0; ; n++ {
		var h [4]byte
		if _, err := io.ReadFull(r, h[:]); err != nil {
			return fmt.Errorf("%w: block %d: %w", errCheckpoint, n, err)
		}
		length := binary.BigEndian.Uint32(h[:])
		if length == 0 {
			return readCheckpointEnd(r, keys)
		}
		var err error
		if block, err = readCheckpointBlock(r, block, length); err != nil {
			return fmt.Errorf("%w: block %d: %w", errCheckpoint, n, err)
		}
		d := index.NewDecoder(block)
		for {
			if err := d.Next(&rec); err == io.EOF {
				break
			} else if err != nil {
				return fmt.Errorf("%w: block %d: %w", errCheckpoint, n, err)
			}
			if err := add(&rec); err != nil {
				return fmt.Errorf("%w: block %d: %w", errCheckpoint, n, err)
			}
			keys++
		}
	}
}

func readCheckpointBlock(r io.Reader, block []byte, length uint32) ([]byte, error) {
	if length > maxCheckpointBlock {
		return nil, fmt.Errorf("length %d", length)
	}
	var sum [4]byte
	if _, err := io.ReadFull(r, sum[:]); err != nil {
		return nil, err
	}
	// Memory grows with what is really there, not with what a length claims.
	block = block[:0]
	for uint32(len(block)) < length {
		n := min(int(length)-len(block), max(checkpointBlock*2, len(block)))
		start := len(block)
		block = append(block, make([]byte, n)...)
		if _, err := io.ReadFull(r, block[start:]); err != nil {
			return nil, err
		}
	}
	if got, want := crc32.Checksum(block, castagnoli), binary.BigEndian.Uint32(sum[:]); got != want {
		return nil, fmt.Errorf("checksum %08x, want %08x", got, want)
	}
	return block, nil
}

func readCheckpointEnd(r *bufio.Reader, keys uint64) error {
	var end [12]byte
	if _, err := io.ReadFull(r, end[:]); err != nil {
		return fmt.Errorf("%w: end: %w", errCheckpoint, err)
	}
	if crc32.Checksum(end[:8], castagnoli) != binary.BigEndian.Uint32(end[8:]) {
		return fmt.Errorf("%w: bad end", errCheckpoint)
	}
	if want := binary.BigEndian.Uint64(end[:]); want != keys {
		return fmt.Errorf("%w: %d keys, want %d", errCheckpoint, keys, want)
	}
	if _, err := r.ReadByte(); err != io.EOF {
		return fmt.Errorf("%w: bytes after the end", errCheckpoint)
	}
	return nil
}

// saver decides when checkpoints are written, and writes them one at a time.
type saver struct {
	s *Store

	bytes int64     // written since the last checkpoint; the applier's
	last  time.Time // start of the last checkpoint; the applier's

	mu       sync.Mutex
	idle     *sync.Cond // running became false
	running  bool
	revision int64         // of the file, -1 if there is none
	took     time.Duration // the last one that was started
	failed   error         // of the last attempt
}

func newSaver(s *Store) *saver {
	v := &saver{s: s, revision: -1, last: s.o.Now()}
	v.idle = sync.NewCond(&v.mu)
	return v
}

// wrote counts what a batch wrote, and starts a checkpoint when it is due.
func (v *saver) wrote(n int64) {
	v.bytes += n
	o := &v.s.o
	if o.Dir == "" || o.CheckpointBytes < 0 || v.bytes < o.CheckpointBytes || o.Now().Sub(v.last) < v.interval() {
		return
	}
	v.start()
}

const (
	// savingShare is the part of the time in which checkpoints may be written,
	savingShare = 12
	// unless they would be further apart than this. After one that failed they are.
	longestInterval = time.Minute
)

// interval is the least time from the start of one checkpoint to that of the next.
func (v *saver) interval() time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	wait := min(savingShare*v.took, longestInterval)
	if v.failed != nil {
		wait = longestInterval
	}
	return max(v.s.o.CheckpointInterval, wait)
}

// start writes a checkpoint in the background unless one is being written.
func (v *saver) start() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.running {
		return
	}
	v.running = true
	began := v.s.o.Now()
	v.bytes, v.last = 0, began
	root, applied := v.s.root, v.s.index
	// The job may run in place, so the lock must be free.
	v.mu.Unlock()
	v.s.o.Go(func() {
		err := v.save(root, applied)
		if err != nil {
			v.s.log.Warn("cannot write the index checkpoint, the next start will be slower", "error", err)
		}
		v.mu.Lock()
		v.running, v.failed, v.took = false, err, v.s.o.Now().Sub(began)
		v.mu.Unlock()
		v.idle.Broadcast()
	})
	v.mu.Lock()
}

func (v *saver) wait() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.running {
		v.idle.Wait()
	}
}

// renewBytes is what may be written after a checkpoint before one that is to be
// used elsewhere is made anew: whoever opens it reads these records.
const renewBytes = 16 << 20

// renew starts a checkpoint if there is none, or much was written since.
func (v *saver) renew() {
	if v.s.o.Dir == "" || v.s.o.CheckpointBytes < 0 {
		return
	}
	v.mu.Lock()
	none := v.revision < 0
	v.mu.Unlock()
	if none || v.bytes >= renewBytes {
		v.start()
	}
}

// link gives the file, if there is one, a second name in dir.
func (v *saver) link(dir string) error {
	if v.s.o.Dir == "" {
		return nil
	}
	if err := v.s.o.FS.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("mvcc: copy index checkpoint: %w", err)
	}
	err := storage.Link(v.s.o.FS, v.path(CheckpointFile), v.s.o.FS.PathJoin(dir, CheckpointFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("mvcc: copy index checkpoint: %w", err)
	}
	return nil
}

// ensure says whether records up to rev may be deleted: the file on disk is not
// older, or there is none. If it is older, ensure starts a checkpoint; when
// that fails it removes the file.
func (v *saver) ensure(rev int64) (ready bool, err error) {
	if v.s.o.Dir == "" {
		return true, nil
	}
	v.mu.Lock()
	running, revision, failed := v.running, v.revision, v.failed
	v.mu.Unlock()
	switch {
	case running:
		return false, nil
	case revision >= rev:
		return true, nil
	case failed != nil:
		v.mu.Lock()
		v.failed = nil
		v.mu.Unlock()
		return true, v.remove()
	}
	v.start()
	return false, nil
}

func (v *saver) path(name string) string { return v.s.o.FS.PathJoin(v.s.o.Dir, name) }

// save writes the checkpoint of r. The flush comes before the rename, so that
// the file is never ahead of what Pebble has on disk.
func (v *saver) save(r Root, applied uint64) error {
	v.mu.Lock()
	current := v.revision == r.revision
	v.mu.Unlock()
	if v.s.o.Dir == "" || current {
		return nil
	}
	if err := v.write(r, applied); err != nil {
		return fmt.Errorf("mvcc: write index checkpoint: %w", err)
	}
	if err := v.s.storage.Flush(); err != nil {
		return err
	}
	if err := v.s.o.FS.Rename(v.path(CheckpointTemp), v.path(CheckpointFile)); err != nil {
		return fmt.Errorf("mvcc: publish index checkpoint: %w", err)
	}
	if err := v.syncDir(); err != nil {
		return err
	}
	v.mu.Lock()
	v.revision = r.revision
	v.mu.Unlock()
	return nil
}

func (v *saver) write(r Root, applied uint64) (err error) {
	out := limited{room: math.MaxInt64}
	if v.s.o.Room != nil {
		out.room = v.s.o.Room()
	}
	f, err := storage.CreateFile(v.s.o.FS, v.path(CheckpointTemp), checkpointCategory)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			// What a disk had no room for must not go on taking it.
			err = errors.Join(err, v.s.o.FS.Remove(v.path(CheckpointTemp)))
		}
	}()
	out.w = f
	if err := writeCheckpoint(&out, r, applied); err != nil {
		return err
	}
	return f.Sync()
}

// limited is a writer that has room for so many bytes, those of Options.Room.
type limited struct {
	w    io.Writer
	room int64
}

func (l *limited) Write(b []byte) (int, error) {
	if l.room -= int64(len(b)); l.room < 0 {
		return 0, fmt.Errorf("%w: the disk has too little room for it", errNoCheckpoint)
	}
	return l.w.Write(b)
}

// remove deletes the file, durably.
func (v *saver) remove() error {
	v.mu.Lock()
	v.revision = -1
	v.mu.Unlock()
	if err := v.s.o.FS.Remove(v.path(CheckpointFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("mvcc: remove index checkpoint: %w", err)
	}
	return v.syncDir()
}

func (v *saver) syncDir() (err error) {
	dir, err := v.s.o.FS.OpenDir(v.s.o.Dir)
	if err != nil {
		return fmt.Errorf("mvcc: sync %s: %w", v.s.o.Dir, err)
	}
	return errors.Join(dir.Sync(), dir.Close())
}
