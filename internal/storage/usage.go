package storage

import (
	"sync"
	"time"
)

// recentWithin is how long RecentDiskBytes waits for what is so now.
const recentWithin = 100 * time.Millisecond

// DiskBytes is the space that the store's files take. Pebble does not tell while it writes to its MANIFEST, for as long as the disk takes.
func (s *Store) DiskBytes() uint64 { return s.db.Metrics().DiskSpaceUsage() }

// RecentDiskBytes is DiskBytes for who cannot wait: if the disk is slow, what was told last.
func (s *Store) RecentDiskBytes() uint64 {
	u := &s.usage
	u.mu.Lock()
	told := u.told
	if told == nil {
		told = make(chan struct{})
		u.told = told
		u.asking.Go(func() {
			bytes := s.DiskBytes()
			u.mu.Lock()
			u.last, u.told = bytes, nil
			u.mu.Unlock()
			close(told)
		})
	}
	u.mu.Unlock()
	wait := time.NewTimer(recentWithin)
	defer wait.Stop()
	select {
	case <-told:
	case <-wait.C:
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.last
}

// diskUsage is what Pebble told last.
type diskUsage struct {
	asking sync.WaitGroup

	mu   sync.Mutex
	last uint64
	told chan struct{} // closed when the question that is under way is answered; nil if none is
}
