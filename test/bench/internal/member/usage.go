package member

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

// tick is the unit of /proc's CPU times: Linux reports them in hundredths of a second on every architecture.
const tick = 10 * time.Millisecond

// CPU is the time that the running process has spent on all its threads, user and system together.
func (m *Member) CPU() (time.Duration, error) {
	path := fmt.Sprintf("/proc/%d/stat", m.cmd.Process.Pid)
	stat, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.Name, err)
	}
	// The name in parentheses may hold spaces; utime and stime are the 12th and 13th field after it.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("%s: %s has %d fields after the name, want 13 or more", m.Name, path, len(fields))
	}
	var sum int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %s: %w", m.Name, path, err)
		}
		sum += n
	}
	return time.Duration(sum) * tick, nil
}

// Resident is the memory of the running process in bytes.
func (m *Member) Resident() (int64, error) {
	path := fmt.Sprintf("/proc/%d/status", m.cmd.Process.Pid)
	status, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.Name, err)
	}
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("VmRSS:")); ok {
			kib, err := strconv.ParseInt(string(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte(" kB"))), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %s: %w", m.Name, path, err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("%s: %s has no VmRSS", m.Name, path)
}

// Profile records a CPU profile of the running process for a whole number of seconds into a file.
func (m *Member) Profile(file string, seconds int) error {
	resp, err := http.Get(fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", m.Address, seconds))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: profile: %s: %w\n%.200s", m.Name, resp.Status, err, data)
	}
	return os.WriteFile(file, data, 0o600)
}
