package process

import (
	"net"
	"os"
	"slices"
	"testing"
	"time"
)

func TestListening(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::]:0"} {
		l, err := net.Listen("tcp", at)
		if err != nil {
			t.Logf("%s: %v", at, err) // a machine without IPv6
			continue
		}
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		address := net.JoinHostPort("127.0.0.1", port)
		if pids, err := Listening(address); err != nil || !slices.Equal(pids, []int{os.Getpid()}) {
			t.Errorf("%s, listening at %s: %v, %v; want %d", address, at, pids, err, os.Getpid())
		}
		l.Close()
		if pids, err := Listening(address); err != nil || len(pids) != 0 {
			t.Errorf("%s, closed: %v, %v", address, pids, err)
		}
	}
	if pids, err := Listening("192.0.2.1:2379"); err != nil || len(pids) != 0 {
		t.Errorf("an address of another machine: %v, %v", pids, err)
	}
	if _, err := Listening("127.0.0.1:http"); err == nil {
		t.Error("a port that is no number")
	}
}

func TestUse(t *testing.T) {
	before, err := CPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for began := time.Now(); time.Since(began) < 20*time.Millisecond; { // spends some
	}
	after, err := CPU(os.Getpid())
	if err != nil || after <= before {
		t.Errorf("from %v to %v, %v", before, after, err)
	}
	if n, err := Resident(os.Getpid()); err != nil || n < 1<<20 || n > 1<<34 {
		t.Errorf("%d bytes resident, %v", n, err)
	}
	if _, err := CPU(1<<22 + 1); err == nil {
		t.Error("a process that is not")
	}
}
