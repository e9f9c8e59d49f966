package raftlog

import (
	"slices"

	"go.etcd.io/raft/v3/raftpb"
)

// entryOverhead is what an entry in memory costs beside its data.
const entryOverhead = 160

func memoryOf(e *raftpb.Entry) int64 { return int64(len(e.Data)) + entryOverhead }

// tailCache keeps the newest entries, without gaps up to the log's last one.
type tailCache struct {
	budget int64
	bytes  int64
	first  uint64 // index of entries[0]; meaningless if there are none
	// entries is never handed out: its elements are, by copying the pointers.
	entries []*raftpb.Entry
}

// add appends e after dropping what it replaces, and the oldest if over budget.
func (c *tailCache) add(e *raftpb.Entry) {
	i := e.GetIndex()
	if n := len(c.entries); n == 0 || i <= c.first || i > c.first+uint64(n) {
		c.clear()
		c.first = i
	} else {
		c.drop(int(i-c.first), n)
	}
	c.entries = append(c.entries, e)
	c.bytes += memoryOf(e)
	n := 0
	for ; c.bytes > c.budget && n < len(c.entries); n++ {
		c.bytes -= memoryOf(c.entries[n])
		c.entries[n] = nil
	}
	c.entries = c.entries[n:]
	c.first += uint64(n)
}

// drop removes entries[from:to], which reach the end.
func (c *tailCache) drop(from, to int) {
	for _, e := range c.entries[from:to] {
		c.bytes -= memoryOf(e)
	}
	clear(c.entries[from:to])
	c.entries = c.entries[:from]
}

// compact drops the entries up to index.
func (c *tailCache) compact(index uint64) {
	if len(c.entries) == 0 || index < c.first {
		return
	}
	n := min(int(index-c.first)+1, len(c.entries))
	for _, e := range c.entries[:n] {
		c.bytes -= memoryOf(e)
	}
	c.entries = slices.Clone(c.entries[n:])
	c.first = index + 1
}

func (c *tailCache) clear() { c.entries, c.bytes = nil, 0 }

// from returns the cached entries from lo on, or none.
func (c *tailCache) from(lo uint64) []*raftpb.Entry {
	if len(c.entries) == 0 || lo < c.first || lo >= c.first+uint64(len(c.entries)) {
		return nil
	}
	return c.entries[lo-c.first:]
}

// windows keeps runs of older entries for members that lag behind, the most
// recently loaded or used last.
type windows struct {
	budget int64
	bytes  int64
	list   []*window
}

type window struct {
	first   uint64
	entries []*raftpb.Entry
	bytes   int64
}

// maxWindows bounds how many runs are kept, whatever their size: one for each
// member that lags, and clusters have few.
const maxWindows = 16

func (ws *windows) add(entries []*raftpb.Entry) {
	w := &window{first: entries[0].GetIndex(), entries: entries}
	for _, e := range entries {
		w.bytes += memoryOf(e)
	}
	ws.list = slices.DeleteFunc(ws.list, func(o *window) bool {
		inside := o.first >= w.first && o.first+uint64(len(o.entries)) <= w.first+uint64(len(entries))
		if inside {
			ws.bytes -= o.bytes
		}
		return inside
	})
	ws.list = append(ws.list, w)
	ws.bytes += w.bytes
	for len(ws.list) > 1 && (ws.bytes > ws.budget || len(ws.list) > maxWindows) {
		ws.bytes -= ws.list[0].bytes
		ws.list = slices.Delete(ws.list, 0, 1)
	}
}

// from returns the entries of a window from lo on, or none.
func (ws *windows) from(lo uint64) []*raftpb.Entry {
	for _, w := range slices.Backward(ws.list) {
		if lo >= w.first && lo < w.first+uint64(len(w.entries)) {
			return w.entries[lo-w.first:]
		}
	}
	return nil
}

// truncate drops the windows that hold an entry at index or above.
func (ws *windows) truncate(index uint64) {
	ws.deleteIf(func(w *window) bool { return w.first+uint64(len(w.entries)) > index })
}

// compact drops the windows that hold nothing above index.
func (ws *windows) compact(index uint64) {
	ws.deleteIf(func(w *window) bool { return w.first+uint64(len(w.entries)) <= index+1 })
}

func (ws *windows) clear() { ws.deleteIf(func(*window) bool { return true }) }

func (ws *windows) deleteIf(f func(*window) bool) {
	ws.list = slices.DeleteFunc(ws.list, func(w *window) bool {
		gone := f(w)
		if gone {
			ws.bytes -= w.bytes
		}
		return gone
	})
}
