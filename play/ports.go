package play

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
)

// Ports are taken from below those that systems give to outgoing connections, so that a member finds its ports again
// when it starts once more.
const (
	lowestPort = 20000
	portRange  = 10000
)

// ports gives out ports that nobody listens on.
type ports struct{ given map[int]bool }

func (p *ports) take() (int, error) {
	for range 200 {
		port := lowestPort + rand.IntN(portRange)
		if p.given[port] || !portFree(port) {
			continue
		}
		p.given[port] = true
		return port, nil
	}
	return 0, errors.New("no free port was found on 127.0.0.1 between 20000 and 29999")
}

// again returns port if it is free still, or another.
func (p *ports) again(port int) (int, error) {
	if port != 0 && portFree(port) {
		return port, nil
	}
	return p.take()
}

func portFree(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}
