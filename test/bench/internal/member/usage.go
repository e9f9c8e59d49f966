package member

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/engram-kv/engram/bench/process"
)

// CPU is the time that the running process has spent on all its threads, user and system together.
func (m *Member) CPU() (time.Duration, error) { return process.CPU(m.cmd.Process.Pid) }

// Resident is the memory of the running process in bytes.
func (m *Member) Resident() (int64, error) { return process.Resident(m.cmd.Process.Pid) }

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
