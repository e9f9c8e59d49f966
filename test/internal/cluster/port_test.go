package cluster

import (
	"errors"
	"net"
	"strconv"
	"syscall"
	"testing"
)

// TestFreePort: a member can listen at a port that was given, again and again, and no other process that looks for a free one gets it.
func TestFreePort(t *testing.T) {
	given := map[string]bool{}
	for range 300 {
		port, err := FreePort()
		if err != nil {
			t.Fatal(err)
		}
		if given[port] {
			t.Fatalf("port %s was given twice", port)
		}
		given[port] = true
		for range 2 {
			if err := bindAlone(t, port); !errors.Is(err, syscall.EADDRINUSE) {
				t.Fatalf("another takes port %s while nobody listens there: %v", port, err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:"+port)
			if err != nil {
				t.Fatalf("port %s was given, and nobody can listen there: %v", port, err)
			}
			l.Close()
		}
	}
}

// bindAlone takes a port for a moment if nobody has it.
func bindAlone(t *testing.T, port string) error {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	n, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	return syscall.Bind(fd, &syscall.SockaddrInet4{Port: n, Addr: [4]byte{127, 0, 0, 1}})
}
