// Package process reads what processes of this machine have used, and finds those that listen at an address. It needs Linux's /proc.
package process

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// CPU is the time that a running process has spent on all its threads, user and system together, to the nanosecond.
func CPU(pid int) (time.Duration, error) {
	// The kernel's name of another process's CPU clock: the inverted pid, and 2 for the scheduler's count.
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// Resident is the memory of a running process in bytes.
func Resident(pid int) (int64, error) {
	path := fmt.Sprintf("/proc/%d/status", pid)
	status, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("VmRSS:")); ok {
			kib, err := strconv.ParseInt(string(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte(" kB"))), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", path, err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("%s has no VmRSS", path)
}

// Listening finds the processes that listen at a TCP address of this machine, host:port. It finds none for an address of
// another machine, and none whose open files may not be looked at.
func Listening(address string) ([]int, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	wanted, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("port %q of %s: %w", port, address, err)
	}
	local, err := here(host)
	if err != nil || len(local) == 0 {
		return nil, err
	}
	sockets := make(map[string]bool)
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if err := listeners(table, local, uint16(wanted), sockets); err != nil {
			return nil, err
		}
	}
	return owners(sockets)
}

// here are those addresses of a host that are of this machine.
func here(host string) ([]netip.Addr, error) {
	ips, err := net.LookupIP(host)
	if err != nil {
		return nil, err
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, ip := range ips {
		local := ip.IsLoopback() || slices.ContainsFunc(own, func(a net.Addr) bool {
			n, ok := a.(*net.IPNet)
			return ok && n.IP.Equal(ip)
		})
		if a, ok := netip.AddrFromSlice(ip); ok && local {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}

// listeners adds the inodes of the sockets in a table that listen at a port of one of the addresses, or of all addresses.
func listeners(table string, local []netip.Addr, port uint16, sockets map[string]bool) error {
	f, err := os.Open(table)
	if os.IsNotExist(err) {
		return nil // no IPv6
	}
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		const listen, address, state, inode = "0A", 1, 3, 9
		fields := strings.Fields(lines.Text())
		if len(fields) <= inode || fields[state] != listen {
			continue
		}
		at, ok := parseAddress(fields[address])
		if ok && at.Port() == port && (at.Addr().IsUnspecified() || slices.Contains(local, at.Addr())) {
			sockets["socket:["+fields[inode]+"]"] = true
		}
	}
	return lines.Err()
}

// parseAddress reads the tables' form: words of 32 bits as they lie in memory, in hexadecimal.
func parseAddress(s string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err != nil || err2 != nil || len(b)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(b, 4) {
		slices.Reverse(word) // of a little-endian machine, as all that we build for
	}
	a, ok := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), ok
}

// owners are the processes that have one of the sockets open.
func owners(sockets map[string]bool) ([]int, error) {
	if len(sockets) == 0 {
		return nil, nil
	}
	files, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return nil, err
	}
	var out []int
	for _, file := range files {
		target, err := os.Readlink(file)
		if err != nil || !sockets[target] { // closed meanwhile, or not ours to see
			continue
		}
		pid, err := strconv.Atoi(strings.Split(file, "/")[2])
		if err == nil && !slices.Contains(out, pid) {
			out = append(out, pid)
		}
	}
	return out, nil
}
