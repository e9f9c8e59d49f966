package rpc

import "sync"

// pool makes answers that may need the disk or much copying: a fixed number of
// goroutines and a bounded number of jobs in hand.
type pool struct {
	slots chan struct{} // one token per place
	jobs  chan func()   // as long as slots, so that run never blocks
	done  sync.WaitGroup
}

func newPool(workers, pending int) *pool {
	p := &pool{slots: make(chan struct{}, pending), jobs: make(chan func(), pending)}
	for range workers {
		p.done.Go(func() {
			for job := range p.jobs {
				job()
			}
		})
	}
	return p
}

// reserve takes a place for one job at a time, or says that there is none.
// Whoever has a place gives it up by cancel.
func (p *pool) reserve() bool {
	select {
	case p.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// cancel gives a place up.
func (p *pool) cancel() { <-p.slots }

// run has the job done by a worker. The caller holds a place, which the job may
// give up or keep for another run. It does not block.
func (p *pool) run(job func()) { p.jobs <- job }

// close waits until every place was given up, so whatever can complete a
// reserved job must not be stopped for good before. None is reserved after.
func (p *pool) close() {
	for range cap(p.slots) {
		p.slots <- struct{}{}
	}
	close(p.jobs)
	p.done.Wait()
}
