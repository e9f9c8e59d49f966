package fault

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
	"github.com/engram-kv/engram/test/internal/stall"
)

const (
	// A leader has a slow disk when storing entries takes longer than slowLimit three times in a row, or once three times as long.
	slowLimit = 500 * time.Millisecond
	// handOverWithin is how long it may lead on: those three, each of two writes to the disk, and an election. What the machine stands still comes on top.
	handOverWithin = 15 * time.Second
	// slowFor is how long the disk stays slow after that.
	slowFor = 10 * time.Second
	// quickly is how long a write through another member may take meanwhile: less than one that waits for the slow disk.
	quickly = time.Second
	// muchFaster is by how much whoever takes over is faster, at least.
	muchFaster = 8
)

// TestSlowDisk lets the leader's disk become so slow that each write takes a second: leadership goes to another member and stays away, the member
// says that it was slow and why, its metrics and those of the next leader show it, and the others go on meanwhile.
func TestSlowDisk(t *testing.T) {
	if cluster.Chosen() != "engram" {
		return // it is a promise of Engram's: etcd's leader leads on
	}
	disk := newSlowDisk(t)
	b := begin(t, 3, history.Options{Compact: true}, func(c *cluster.Cluster) {
		c.Hosts = func(i int) cluster.Host {
			if i == 0 {
				return cluster.Host{Dir: disk.dir}
			}
			return cluster.Host{}
		}
	})
	stalls, err := stall.Begin()
	b.must(err)
	defer func() { b.must(stalls.Close()) }()
	t.Cleanup(func() { b.must(disk.fast()) }) // before the members end: they write
	all := b.c.Members()
	slow, others := all[0], all[1:]
	b.must(disk.confine(slow.PID()))
	b.must(b.load.Disturb(func() error { return b.c.MoveLeader(b.ctx, slow) }))
	b.during("the disk of the leader is slow", badTimes, func() error {
		if err := disk.slow(); err != nil {
			return err
		}
		began := time.Now()
		next, err := b.c.LeaderOf(b.ctx, others...)
		if err != nil {
			return fmt.Errorf("%v has a slow disk and leads on: %w", slow, err)
		}
		took, machine := time.Since(began), stalls.Longest(began)
		b.Logf("%v leads %v after the disk of %v became slow; the machine stood still for %v", next, took.Round(time.Millisecond), slow, machine)
		if took > handOverWithin+machine {
			return fmt.Errorf("%v has a slow disk, and led on for %v, want %v at most beside the %v for which the machine stood still", slow, took, handOverWithin, machine)
		}
		if err := errors.Join(
			b.eventually("line of the log", func() error { return handedOver(slow, next) }),
			b.eventually("slowness in the metrics of the slow member", func() error {
				return above(slow, "engram_raft_persist_latency_seconds", slowLimit)
			}),
			b.eventually("slowness in the metrics of the leader", func() error {
				return above(next, fmt.Sprintf(`engram_raft_ack_latency_seconds{To="%x"}`, slow.ID), slowLimit)
			}),
		); err != nil {
			return err
		}
		for until := time.Now().Add(slowFor); time.Now().Before(until); {
			if err := b.load.Answers(b.ctx, badTimes); err != nil {
				return err
			}
			for _, m := range others {
				began := time.Now()
				if err := b.write(m); err != nil {
					return fmt.Errorf("a write through %v: %w", m, err)
				}
				if took, machine := time.Since(began), stalls.Longest(began); took > quickly+machine {
					return fmt.Errorf("a write through %v took %v, want %v at most beside the %v for which the machine stood still", m, took, quickly, machine)
				}
			}
			for _, m := range all {
				if s, err := m.Status(b.ctx); err != nil {
					return err
				} else if s.Leader == slow.ID {
					return broken.Errorf("%v leads again in term %d, says %v, and its disk is still slow", slow, s.RaftTerm, m)
				}
			}
		}
		return above(slow, "engram_raft_persist_latency_seconds", slowLimit)
	}, disk.fast)
	b.judge()
}

// handedOver is nil if a member has logged, once, that it gave leadership to another one for want of a fast disk.
func handedOver(from, to *cluster.Member) error {
	var lines []string
	for line := range strings.Lines(from.Log()) {
		if strings.Contains(line, "asked another one to lead") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 {
		return fmt.Errorf("%v says %d times that it handed over, want once: %q", from, len(lines), lines)
	}
	var said struct {
		Member, To, Reason string
		Own                string `json:"own-latency"`
		Their              string `json:"their-latency"`
	}
	if err := json.Unmarshal([]byte(lines[0]), &said); err != nil {
		return fmt.Errorf("%s: %w", lines[0], err)
	}
	own, err := time.ParseDuration(said.Own)
	their, err2 := time.ParseDuration(said.Their)
	why := "storing entries takes this leader longer than " + slowLimit.String()
	if err := errors.Join(err, err2); err != nil || said.Member != fmt.Sprintf("%x", from.ID) || said.To != fmt.Sprintf("%x", to.ID) ||
		said.Reason != why || own <= slowLimit || their*muchFaster > own {
		return fmt.Errorf("%v, of ID %x, handed over to %x and says %s, want both, %q and the latencies of both: %v", from, from.ID, to.ID, lines[0], why, err)
	}
	return nil
}

// above is nil if a series of a member is above a time.
func above(m *cluster.Member, series string, limit time.Duration) error {
	resp, err := http.Get(m.ClientURL + "/metrics")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(io.LimitReader(resp.Body, 16<<20))
	for lines.Scan() {
		text, ok := strings.CutPrefix(lines.Text(), series+" ")
		if !ok {
			continue
		}
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%s: %w", lines.Text(), err)
		}
		if seconds <= limit.Seconds() {
			return fmt.Errorf("%v says %s, want more than %v", m, lines.Text(), limit)
		}
		return nil
	}
	return fmt.Errorf("%v has no metric %s: %v", m, series, lines.Err())
}

const (
	diskBytes = 2 << 30 // of which little is written
	groups    = "/sys/fs/cgroup/blkio"
)

// slowDisk is a file system of its own, of which a control group can make all that its processes write take as long as one likes.
type slowDisk struct {
	dir    string // where it is mounted
	group  string
	device string // its numbers
}

// newSlowDisk makes a disk in a file. Only root can.
func newSlowDisk(t *testing.T) *slowDisk {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "a disk that is slow needs root")
	}
	for _, tool := range []string{"mkfs.ext4", "mount"} {
		if _, err := exec.LookPath(tool); err != nil {
			missing(t, "%s is not installed: apt-get install e2fsprogs mount", tool)
		}
	}
	d := &slowDisk{dir: t.TempDir()}
	var err error
	if d.group, err = os.MkdirTemp(groups, "engram-"); err != nil {
		t.Skipf("SKIPPED, also in CI, for no package brings it: a control group for disks cannot be made, which needs cgroup v1 with blkio: %v", err)
	}
	t.Cleanup(func() { // after the members have ended
		if err := os.Remove(d.group); err != nil {
			t.Errorf("the control group stays: %v", err)
		}
	})
	image := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(image)
	if err == nil {
		err = errors.Join(f.Truncate(diskBytes), f.Close())
	}
	if err == nil {
		err = run("mkfs.ext4", "-q", image)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := run("mount", "-o", "loop", image, d.dir); err != nil {
		t.Skipf("SKIPPED, also in CI, for no package brings it: a file cannot be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := run("umount", d.dir); err != nil {
			t.Error(err)
		}
	})
	var at unix.Stat_t
	if err := unix.Stat(d.dir, &at); err != nil {
		t.Fatal(err)
	}
	d.device = fmt.Sprintf("%d:%d", unix.Major(at.Dev), unix.Minor(at.Dev))
	return d
}

// confine makes a process one of those that the disk is slow for.
func (d *slowDisk) confine(pid int) error { return d.set("cgroup.procs", strconv.Itoa(pid)) }

// slow lets pass one write a second.
func (d *slowDisk) slow() error { return d.limit(1) }

// fast lets all pass.
func (d *slowDisk) fast() error { return d.limit(0) }

func (d *slowDisk) limit(writes int) error {
	return d.set("blkio.throttle.write_iops_device", fmt.Sprintf("%s %d", d.device, writes))
}

func (d *slowDisk) set(file, text string) error {
	return os.WriteFile(filepath.Join(d.group, file), []byte(text), 0o600)
}
