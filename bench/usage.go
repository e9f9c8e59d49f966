package bench

import (
	"os"
	"slices"
	"time"

	"github.com/engram-kv/engram/bench/process"
)

// meter reads what the servers and this process spend.
type meter struct {
	servers []int // none if they are not on this machine
	before  []time.Duration
	own     time.Duration
	sent    int64
	got     int64
	at      time.Time
}

// newMeter finds the servers' processes: each endpoint's, or none if one of them is not to be found.
func newMeter(r *runner) *meter {
	m := &meter{servers: r.o.serverPIDs}
	if len(m.servers) > 0 {
		return m
	}
	for _, e := range r.endpoints {
		if e.network != "tcp" {
			return &meter{}
		}
		pids, err := process.Listening(e.address)
		if err != nil || len(pids) == 0 {
			return &meter{}
		}
		for _, pid := range pids {
			if !slices.Contains(m.servers, pid) {
				m.servers = append(m.servers, pid)
			}
		}
	}
	return m
}

// begin is the beginning of what is measured.
func (m *meter) begin(r *runner) {
	m.before = m.before[:0]
	for _, pid := range m.servers {
		cpu, err := process.CPU(pid)
		if err != nil {
			m.servers = nil
			break
		}
		m.before = append(m.before, cpu)
	}
	m.own, _ = process.CPU(os.Getpid()) // of ourselves it can always be read
	m.sent, m.got = r.bytes()
	m.at = time.Now()
}

// end adds what was spent since begin. Operations are counted in res already.
func (m *meter) end(r *runner, res *Result) {
	ops := float64(max(res.Operations, 1))
	sent, got := r.bytes()
	res.BytesSent, res.BytesReceived = sent-m.sent, got-m.got
	own, _ := process.CPU(os.Getpid())
	res.Client.CPUSeconds = (own - m.own).Seconds()
	res.Client.CPUPerOperation = micros(own-m.own) / ops
	res.Client.ResidentBytes, _ = process.Resident(os.Getpid()) // likewise
	var u Usage
	var spent time.Duration
	for i, pid := range m.servers {
		cpu, err := process.CPU(pid)
		if err != nil {
			return // it has ended
		}
		resident, err := process.Resident(pid)
		if err != nil {
			return
		}
		spent += cpu - m.before[i]
		u.ResidentBytes += resident
	}
	if len(m.servers) == 0 || m.before == nil {
		return
	}
	u.PIDs, u.CPUSeconds, u.CPUPerOperation = m.servers, spent.Seconds(), micros(spent)/ops
	res.Server = &u
}
