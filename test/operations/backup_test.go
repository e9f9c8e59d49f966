package operations

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// save takes a backup from a member, as the page says.
func (r *rig) save(m *cluster.Member, path string) {
	r.Helper()
	told := r.block("save", "10.0.0.1:2379", m.Endpoint(), "/backup/engram.db", path)
	if !strings.Contains(told, "Snapshot saved at "+path) || !strings.Contains(told, "Checked: ") {
		r.Fatalf("snapshot save told %q", told)
	}
}

// stopAll ends all members and moves their directories away.
func (r *rig) stopAll() {
	r.Helper()
	for _, m := range r.c.Members() {
		r.must(m.Stop())
		r.must(os.Rename(m.DataDir, m.DataDir+".old"))
	}
}

// startAll starts all members at once: one alone has no quorum.
func (r *rig) startAll() {
	r.Helper()
	for _, m := range r.c.Members() {
		r.must(m.Spawn())
	}
	for _, m := range r.c.Members() {
		r.must(m.Ready(r.ctx))
	}
}

func (r *rig) initialCluster() string {
	var parts []string
	for _, m := range r.c.Members() {
		parts = append(parts, m.Name+"="+m.PeerURL)
	}
	return strings.Join(parts, ",")
}

// TestRestoreAfterAccident: keys are deleted by accident, more is written, and the cluster is taken back to its backup: the
// keys are there, what came later is not, writes work, all members agree, and who watched before is told to start anew.
func TestRestoreAfterAccident(t *testing.T) {
	for _, members := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", members), func(t *testing.T) {
			r := begin(t, members)
			c := r.client()
			lease, err := c.Grant(r.ctx, 3000)
			r.must(err)
			for i := range 200 {
				_, err := c.Put(r.ctx, fmt.Sprintf("object/%03d", i), strconv.Itoa(i), clientv3.WithLease(lease.ID))
				r.must(err)
			}
			backup := filepath.Join(t.TempDir(), "engram.db")
			r.save(r.c.Members()[members-1], backup)
			if told := r.block("status", "/backup/engram.db", backup); !strings.Contains(told, "│        200 │") {
				t.Errorf("status: %s", told)
			}
			// The accident, and life goes on.
			if got := strings.TrimSpace(r.typed("del", "object/", "--prefix")); got != "200" {
				t.Fatalf("deleted %s", got)
			}
			for i := range 50 {
				_, err := c.Put(r.ctx, fmt.Sprintf("later/%d", i), "x")
				r.must(err)
			}
			got, err := c.Get(r.ctx, "later/0")
			r.must(err)
			seen := got.Header.Revision

			r.stopAll()
			first := r.c.Members()[0]
			if members == 1 {
				r.block("restore-one", "/backup/engram.db", backup, "/var/lib/engram", first.DataDir, "m1", first.Name, "http://10.0.0.1:2380", first.PeerURL)
			} else {
				out := filepath.Join(t.TempDir(), "restored")
				r.block("restore-all", "/backup/engram.db", backup, "/var/lib/restored", out,
					"m1=http://10.0.0.1:2380,m2=http://10.0.0.2:2380,m3=http://10.0.0.3:2380", r.initialCluster())
				for _, m := range r.c.Members() {
					r.must(os.Rename(filepath.Join(out, m.Name), m.DataDir))
				}
			}
			r.startAll()
			told := r.block("check", "10.0.0.1:2379", first.Endpoint())
			if strings.Count(told, "is healthy") != members {
				t.Errorf("health: %s", told)
			}
			r.oneHash(told, members)
			c = r.client()
			all, err := c.Get(r.ctx, "", clientv3.WithPrefix())
			r.must(err)
			if all.Count != 200 || all.Header.Revision < seen+900_000_000 {
				t.Error(broken.Errorf("%d keys at revision %d, clients had seen %d", all.Count, all.Header.Revision, seen))
			}
			for i, kv := range all.Kvs {
				if string(kv.Key) != fmt.Sprintf("object/%03d", i) || string(kv.Value) != strconv.Itoa(i) || kv.Lease != int64(lease.ID) {
					t.Fatal(broken.Errorf("key %d is %v", i, kv))
				}
			}
			if ttl, err := c.TimeToLive(r.ctx, lease.ID, clientv3.WithAttachedKeys()); err != nil || ttl.GrantedTTL != 3000 || len(ttl.Keys) != 200 {
				t.Errorf("lease: %+v, %v", ttl, err)
			}
			w := <-c.Watch(r.ctx, "object/", clientv3.WithPrefix(), clientv3.WithRev(seen+1))
			if w.CompactRevision <= seen {
				t.Error(broken.Errorf("a watcher from before the restore got %+v", w))
			}
			p, err := c.Put(r.ctx, "object/new", "x")
			if err != nil || p.Header.Revision != all.Header.Revision+1 {
				t.Errorf("put: %v, %v", p, err)
			}
			// And once more, from a backup of what was restored.
			r.save(first, backup)
			for _, m := range r.c.Members() {
				r.must(m.Stop())
				if told := r.block("verify", "/var/lib/engram", m.DataDir); !strings.Contains(told, "sound: ") {
					t.Errorf("verify: %s", told)
				}
			}
			if _, errs, err := r.run(r.p.Path, "util", "snapshot", "restore", backup, "--data-dir", first.DataDir); err == nil || !strings.Contains(errs, "not empty") {
				t.Errorf("restore into a directory that is in use: %v, %s", err, errs)
			}
			r.startAll()
		})
	}
}

// TestTwoOfThreeLost saves from the survivor, which has no quorum, and makes a cluster of it again; the others rejoin empty.
func TestTwoOfThreeLost(t *testing.T) {
	r := begin(t, 3)
	c := r.client()
	for i := range 100 {
		_, err := c.Put(r.ctx, fmt.Sprintf("k%d", i), "v")
		r.must(err)
	}
	_, err := r.c.Settle(r.ctx)
	r.must(err)
	survivor, lost := r.c.Members()[0], r.c.Members()[1:]
	for _, m := range lost {
		r.must(m.Kill())
		r.must(os.RemoveAll(m.DataDir))
	}
	if _, errs, err := r.run(r.ctl, "--endpoints="+survivor.Endpoint(), "--command-timeout=2s", "put", "a", "b"); err == nil {
		t.Fatalf("one of three took a write: %s", errs)
	}
	backup := filepath.Join(t.TempDir(), "engram.db")
	r.save(survivor, backup)
	r.must(survivor.Stop())
	r.must(os.Rename(survivor.DataDir, survivor.DataDir+".old"))
	r.block("restore-one", "/backup/engram.db", backup, "/var/lib/engram", survivor.DataDir, "m1", survivor.Name, "http://10.0.0.1:2380", survivor.PeerURL)
	r.must(survivor.Restart(r.ctx))
	for _, m := range lost {
		// `member add` waits for the member: it is started with what it shows, on an empty directory.
		cmd := r.blockCommand("add", "10.0.0.1:2379", survivor.Endpoint(), "m2", m.Name, "http://10.0.0.2:2380", m.PeerURL)
		var told strings.Builder
		cmd.Stderr = &told
		out, err := cmd.StdoutPipe()
		r.must(err)
		r.must(cmd.Start())
		var env []string
		lines := bufio.NewScanner(out)
		for len(env) < 4 && lines.Scan() {
			if name, value, ok := strings.Cut(lines.Text(), "="); ok && strings.HasPrefix(name, "ETCD_") {
				value, err := strconv.Unquote(value)
				r.must(err)
				env = append(env, name+"="+value)
			}
		}
		defer r.startMember(m, []string{"--data-dir=" + m.DataDir}, env)()
		rest, err := io.ReadAll(out)
		r.must(err)
		if err := cmd.Wait(); err != nil || !strings.Contains(string(rest), "promoted") {
			t.Fatalf("member add: %v\n%s%s", err, rest, told.String())
		}
	}
	told := r.block("check", "10.0.0.1:2379", survivor.Endpoint())
	if strings.Count(told, "is healthy") != 3 {
		t.Errorf("health: %s", told)
	}
	for _, m := range r.c.Members() {
		c, err := m.Client()
		r.must(err)
		got, err := c.Get(r.ctx, "k", clientv3.WithPrefix(), clientv3.WithCountOnly())
		r.must(err)
		if got.Count != 100 {
			t.Error(broken.Errorf("%v has %d keys, want 100", m, got.Count))
		}
	}
	r.oneHash(told, 3)
}

// oneHash looks for one hash of so many members in what the page's check prints.
func (r *rig) oneHash(told string, members int) {
	r.Helper()
	lines := regexp.MustCompile(`(?m)^http\S+, (\d+), (\d+)$`).FindAllStringSubmatch(told, -1)
	hashes := map[string]bool{}
	for _, line := range lines {
		hashes[line[1]] = true
	}
	if len(hashes) != 1 || len(lines) != members {
		r.Errorf("hashes: %s", told)
	}
}

// TestRestoreRefuses gives `snapshot restore` and `snapshot status` what is no backup, as the page's table has it.
func TestRestoreRefuses(t *testing.T) {
	r := begin(t, 3)
	r.load()
	m := r.c.Members()[0]
	good := filepath.Join(t.TempDir(), "engram.db")
	r.save(m, good)
	whole, err := os.ReadFile(good)
	r.must(err)
	flipped := slices.Clone(whole)
	flipped[len(flipped)/2] ^= 4
	// Whole by its checksum, and nothing that a member ever gave.
	other := slices.Repeat([]byte("apiVersion: v1\n"), 1024)[:8<<10]
	sum := sha256.Sum256(other)
	other = append(other, sum[:]...)
	for _, c := range []struct {
		name    string
		content []byte
		want    string
	}{
		{"empty", nil, "nothing was written"},
		{"wrong file", []byte("apiVersion: v1\nkind: Pod\n"), "snapshot missing hash but --skip-hash-check=false"},
		{"wrong file with a checksum", other, "is no database file of etcd"},
		{"cut by a few bytes", whole[:len(whole)-10], "snapshot missing hash but --skip-hash-check=false"},
		{"half", whole[:len(whole)/2/512*512+32], "expected sha256 ["},
		{"one bit", flipped, "expected sha256 ["},
	} {
		path, dir := filepath.Join(t.TempDir(), "engram.db"), filepath.Join(t.TempDir(), "data")
		r.must(os.WriteFile(path, c.content, 0o600))
		words := []string{"/backup/engram.db", path, "/var/lib/engram", dir, "m1", m.Name, "http://10.0.0.1:2380", m.PeerURL}
		if _, errs, err := r.typeBlock("restore-one", words...); err == nil || !strings.Contains(errs, c.want) {
			t.Errorf("%s: restore: %v, %s", c.name, err, errs)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: there is a data directory", c.name)
		}
		all := []string{"/backup/engram.db", path, "/var/lib/restored", dir, "m1=http://10.0.0.1:2380,m2=http://10.0.0.2:2380,m3=http://10.0.0.3:2380", r.initialCluster()}
		if _, errs, err := r.typeBlock("restore-all", all...); err == nil || !strings.Contains(errs, c.want) {
			t.Errorf("%s: restore of all: %v, %s", c.name, err, errs)
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
			t.Errorf("%s: of all members there are %v, %v", c.name, left, err)
		}
		if _, errs, err := r.typeBlock("status", "/backup/engram.db", path); err == nil && !strings.Contains(errs, "no checksum stands behind the database") {
			t.Errorf("%s: status finds nothing wrong: %s", c.name, errs)
		}
	}
	text, err := os.ReadFile(operations)
	r.must(err)
	for _, row := range []string{"nothing was written", "snapshot missing hash but --skip-hash-check=false", "expected sha256 [", "is no database file of etcd"} {
		if !strings.Contains(string(text), row) {
			t.Errorf("the page does not have what is said: %s", row)
		}
	}
}

// TestBackupRotation runs the page's script for a scheduler some times. Of three members it names one that follows; when that one is away, there is no
// backup by this script, however well the cluster is, and one by that of another member goes on where it was.
func TestBackupRotation(t *testing.T) {
	for _, members := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", members), func(t *testing.T) {
			r := begin(t, members)
			m := r.c.Members()[members-1]
			if members > 1 {
				r.must(r.c.MoveLeader(r.ctx, r.c.Members()[0]))
			}
			dir := t.TempDir()
			rotate := func(m *cluster.Member) error {
				_, _, err := r.typeBlock("rotate", "10.0.0.1:2379", m.Endpoint(), "/backup/", dir+"/")
				return err
			}
			put := func(turn int) {
				t.Helper()
				r.typed("put", "turn", strconv.Itoa(turn))
				_, err := r.c.Settle(r.ctx) // who follows has it, too
				r.must(err)
			}
			kept := func(revisions ...int) (files []string) {
				t.Helper()
				files, err := filepath.Glob(filepath.Join(dir, "*"))
				r.must(err)
				slices.Sort(files)
				if len(files) != len(revisions) {
					t.Fatalf("there are %v", files)
				}
				for i, file := range files {
					out, errs, err := r.run(r.p.Path, "util", "snapshot", "status", file)
					if want := fmt.Sprintf(", %d, 1, ", revisions[i]); err != nil || !strings.Contains(out, want) {
						t.Errorf("%s: %s%s, want%s", file, out, errs, want)
					}
				}
				return files
			}
			for i := range 5 {
				put(i)
				r.must(rotate(m))
			}
			files := kept(4, 5, 6)
			// A member that does not answer costs no backup.
			r.must(m.Stop())
			if rotate(m) == nil {
				t.Error("the script does not say that there was no backup")
			}
			if again := kept(4, 5, 6); !slices.Equal(again, files) {
				t.Errorf("there are %v, there were %v", again, files)
			}
			if members > 1 {
				put(5)
				r.must(rotate(r.c.Members()[0]))
				kept(5, 6, 7)
			}
		})
	}
}

// TestBackupUnderLoad takes a backup of some hundred MiB while puts go on: memory grows by little, and what a put takes is
// told. How much longer it takes is measured elsewhere, on a machine that does nothing else.
func TestBackupUnderLoad(t *testing.T) {
	mib := 256
	if testing.Short() {
		mib = 64
	}
	r := begin(t, 1, "--memory-budget=64MiB")
	m, c := r.c.Members()[0], r.client()
	rng := rand.New(rand.NewPCG(1, 2))
	value := make([]byte, 256<<10)
	for i := range mib * 4 {
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		_, err := c.Put(r.ctx, fmt.Sprintf("fill/%05d", i), string(value))
		r.must(err)
	}
	load := func(until <-chan struct{}) (took []time.Duration) {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-until:
				return took
			case due := <-tick.C:
				if _, err := c.Put(r.ctx, fmt.Sprintf("load/%d", i%100), "x"); err != nil {
					t.Error(err)
					return took
				}
				took = append(took, time.Since(due))
			}
		}
	}
	p99 := func(took []time.Duration) time.Duration {
		slices.Sort(took)
		return took[len(took)*99/100]
	}
	quietEnd := make(chan struct{})
	time.AfterFunc(3*time.Second, func() { close(quietEnd) })
	quiet := load(quietEnd)
	before := peakBytes(t, m.PID(), true)
	path, done := filepath.Join(t.TempDir(), "engram.db"), make(chan struct{})
	var saving sync.WaitGroup
	began := time.Now()
	saving.Go(func() {
		defer close(done)
		if out, errs, err := r.run(r.p.Path, "ctl", "--endpoints="+m.Endpoint(), "snapshot", "save", path); err != nil {
			t.Errorf("%v: %s%s", err, out, errs)
		}
	})
	busy := load(done)
	saving.Wait()
	grown := peakBytes(t, m.PID(), false) - before
	info, err := os.Stat(path)
	r.must(err)
	// Were puts held up until the end, there would be the one that waited, and one after it.
	if info.Size() < int64(mib)<<20 || len(busy) < 3 {
		t.Fatalf("the backup has %d bytes, %d puts went on", info.Size(), len(busy))
	}
	t.Logf("%d MiB in %v; put p99 %v, %v without a backup; peak of memory %d MiB above what it was", info.Size()>>20, time.Since(began), p99(busy), p99(quiet), grown>>20)
	if grown > 64<<20 {
		t.Errorf("memory grew by %d MiB for a backup of %d", grown>>20, info.Size()>>20)
	}
}

// peakBytes is the most memory that a process had at once since the last reset, which it may ask for.
func peakBytes(t *testing.T, pid int, reset bool) int64 {
	t.Helper()
	if reset {
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
			t.Skipf("the peak of memory cannot be reset here: %v", err)
		}
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindStringSubmatch(string(text))
	if found == nil {
		t.Fatalf("no VmHWM in %s", text)
	}
	kib, err := strconv.ParseInt(found[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// TestSaveInterrupted ends "ctl snapshot save" by a signal: no file is left.
func TestSaveInterrupted(t *testing.T) {
	r := begin(t, 1)
	m, c := r.c.Members()[0], r.client()
	value := strings.Repeat("x", 1<<20)
	for i := range 64 {
		_, err := c.Put(r.ctx, fmt.Sprintf("fill/%d", i), value)
		r.must(err)
	}
	interrupted := 0
	for range 20 {
		dir := t.TempDir()
		cmd := exec.CommandContext(r.ctx, r.p.Path, "ctl", "--endpoints="+m.Endpoint(), "snapshot", "save", filepath.Join(dir, "b.db"))
		r.must(cmd.Start())
		r.until("the file to grow", func() error {
			if names, err := os.ReadDir(dir); err != nil || len(names) == 0 {
				return fmt.Errorf("%v, %v", names, err)
			}
			return nil
		})
		r.must(cmd.Process.Signal(os.Interrupt))
		err := cmd.Wait()
		names, _ := os.ReadDir(dir)
		switch {
		case err == nil && len(names) == 1 && names[0].Name() == "b.db": // it was done before
		case err != nil && len(names) == 0 && cmd.ProcessState.ExitCode() == 5:
			interrupted++
		default:
			t.Errorf("ended with %v, left behind %v", err, names)
		}
	}
	if interrupted == 0 {
		t.Error("nothing was interrupted")
	}
}
