package mvcc

import (
	"slices"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// pageCache keeps the index of a few moments whose range was answered with
// More: the client will ask for the next page at that revision, while writes
// go on. In its own index the revision is the present, so that counting and
// finding the page stay O(log n). What it keeps is bounded in number, keys and
// time, since each moment may hold on to a whole index.
type pageCache struct {
	mu    sync.Mutex
	pages []page // oldest first
	keys  int64
}

type page struct {
	revision int64
	index    index.Root
	expires  time.Time
}

const (
	maxPages    = 8
	maxPageKeys = 2 << 20
	pageAge     = time.Minute
)

// keep remembers the index of a revision, in place of older ones if need be.
func (c *pageCache) keep(revision int64, ix index.Root, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := c.search(revision); i >= 0 {
		c.pages[i].expires = now.Add(pageAge)
		return
	}
	if ix.Len() > maxPageKeys {
		return
	}
	c.pages = append(c.pages, page{revision, ix, now.Add(pageAge)})
	c.keys += ix.Len()
	for len(c.pages) > maxPages || c.keys > maxPageKeys {
		c.drop(0)
	}
}

// find returns the index in which revision is the present.
func (c *pageCache) find(revision int64) (index.Root, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := c.search(revision); i >= 0 {
		return c.pages[i].index, true
	}
	return index.Root{}, false
}

// expire forgets what nobody came back for.
func (c *pageCache) expire(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := 0; i < len(c.pages); {
		if now.Before(c.pages[i].expires) {
			i++
			continue
		}
		c.drop(i)
	}
}

func (c *pageCache) search(revision int64) int {
	return slices.IndexFunc(c.pages, func(p page) bool { return p.revision == revision })
}

func (c *pageCache) drop(i int) {
	c.keys -= c.pages[i].index.Len()
	c.pages = slices.Delete(c.pages, i, i+1)
}
