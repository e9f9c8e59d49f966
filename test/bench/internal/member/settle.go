package member

import "time"

// Settle waits until servers whose CPU time cpu sums up work no more in the background: with all at rest, one is measured. Servers
// that do not come to rest within the time are measured as they are. quiet is what they may spend in half a second.
func Settle(cpu func() (time.Duration, error), quiet, within time.Duration) error {
	const look = 500 * time.Millisecond
	last, err := cpu()
	for began := time.Now(); err == nil && time.Since(began) < within; {
		time.Sleep(look) // what is waited for is that nothing happens
		var now time.Duration
		if now, err = cpu(); now-last <= quiet {
			break
		}
		last = now
	}
	return err
}
