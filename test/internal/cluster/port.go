package cluster

import (
	"fmt"
	"strconv"
	"syscall"
)

// FreePort finds a port of loopback that nobody else gets until this process ends, however often who listens there stops and starts: not
// another call, not another process, and no outgoing connection. A socket keeps it that is bound and does not listen. It is in the way of
// all that ask for any free port, and not of who names this one, since both allow the address to be used again.
func FreePort() (string, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0) // never closed: it is the claim
	if err != nil {
		return "", fmt.Errorf("a free port: %w", err)
	}
	port, err := claim(fd)
	if err != nil {
		syscall.Close(fd)
		return "", fmt.Errorf("a free port: %w", err)
	}
	return strconv.Itoa(port), nil
}

func claim(fd int) (int, error) {
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return 0, err
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		return 0, err
	}
	return name.(*syscall.SockaddrInet4).Port, nil
}
