package fault

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
)

const (
	within   = 5 * time.Minute // the start, each fault until the cluster is whole, and the judgement
	calm     = 100             // answers between two faults
	badTimes = 100             // answers during one

	callWithin = 20 * time.Second // longer than a member gives a request
)

// long says that the long versions are wanted.
func long() bool { return os.Getenv("ENGRAM_CI") != "" }

// turns is how often each fault happens.
func turns() int {
	if long() {
		return 3
	}
	return 1
}

// least is how long each fault lasts at least: longer than members need to notice it.
func least() time.Duration {
	if long() {
		return 6 * time.Second
	}
	return 1200 * time.Millisecond
}

// program is built once for all tests.
var program = sync.OnceValues(func() (cluster.Program, error) { return cluster.Build(cluster.Chosen()) })

// trial is a cluster, mostly under load.
type trial struct {
	*testing.T
	ctx  context.Context // of what is under way
	c    *cluster.Cluster
	load *history.Load // nil after gather
}

// begin starts members and clients. prepare may say where members run.
func begin(t *testing.T, members int, o history.Options, prepare func(c *cluster.Cluster)) *trial {
	t.Helper()
	b := gather(t, members, prepare)
	o.Seed, o.Within = rand.Uint64(), 3*time.Second
	var err error
	b.load, err = history.Start(b.c, o)
	b.must(err)
	t.Cleanup(b.load.Abandon)
	b.renew()
	return b
}

// gather starts members without clients.
func gather(t *testing.T, members int, prepare func(c *cluster.Cluster)) *trial {
	t.Helper()
	t.Parallel() // it waits more than it works
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	c := cluster.New(t.TempDir())
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	if prepare != nil {
		prepare(c)
	}
	b := &trial{T: t, c: c}
	b.renew()
	b.must(c.Start(b.ctx, slices.Repeat([]cluster.Program{p}, members)...))
	return b
}

// renew gives what is next its time.
func (b *trial) renew() {
	var cancel context.CancelFunc
	b.ctx, cancel = context.WithTimeout(b.Context(), within)
	b.Cleanup(cancel)
}

func (b *trial) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// during brings a fault about, has clients go on if they can, ends it, and waits for the cluster to be whole. What is next has its own time.
func (b *trial) during(name string, answers int, fault, end func() error) {
	b.Helper()
	b.must(b.load.Answers(b.ctx, calm))
	var began time.Time
	err := b.load.Disturb(func() error {
		began = time.Now()
		if err := fault(); err != nil {
			return err
		}
		if err := b.load.Answers(b.ctx, answers); err != nil {
			return errors.Join(err, end())
		}
		select {
		case <-time.After(time.Until(began.Add(least()))):
		case <-b.ctx.Done():
		}
		if err := end(); err != nil {
			return err
		}
		return b.whole()
	})
	if err != nil {
		b.Fatalf("%s: %v", name, err)
	}
	b.Logf("%s: %v", name, time.Since(began).Round(time.Millisecond))
	b.renew()
}

// whole waits until all members agree on a leader and each answers linearizable reads.
func (b *trial) whole() error {
	for _, m := range b.c.Members() {
		if err := m.Ready(b.ctx); err != nil {
			return err
		}
	}
	_, err := b.c.Leader(b.ctx)
	return err
}

func (b *trial) leader() *cluster.Member {
	b.Helper()
	m, err := b.c.Leader(b.ctx)
	b.must(err)
	return m
}

// followers are all but the leader.
func (b *trial) followers() []*cluster.Member {
	leader := b.leader()
	return slices.DeleteFunc(b.c.Members(), func(m *cluster.Member) bool { return m == leader })
}

// write asks a member for a write that changes nothing, so that nobody who judges the load learns of it. It goes past the client library, which
// asks again what may be asked again.
func (b *trial) write(m *cluster.Member) error {
	client, err := m.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(b.ctx, callWithin)
	defer cancel()
	absent := []byte("absent")
	_, err = etcdserverpb.NewKVClient(client.ActiveConnection()).Txn(ctx, &etcdserverpb.TxnRequest{
		Compare: []*etcdserverpb.Compare{{Key: absent, Target: etcdserverpb.Compare_VERSION, Result: etcdserverpb.Compare_GREATER,
			TargetUnion: &etcdserverpb.Compare_Version{}}},
		Success: []*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: &etcdserverpb.PutRequest{Key: absent}}}},
	})
	return err
}

// eventually asks again until there is no error, for a minute.
func (b *trial) eventually(what string, f func() error) error {
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no %s: %w", what, err)
		case <-time.After(20 * time.Millisecond): // another process: there is no event to wait for
		}
	}
}

func (b *trial) judge() {
	b.Helper()
	b.must(b.load.Answers(b.ctx, calm))
	r, err := b.load.Judge(b.ctx)
	b.Logf("%+v", r)
	b.must(err)
	if r.Judged == 0 || r.Notices == 0 || r.Events == 0 {
		b.Errorf("the load tried too little: %+v", r)
	}
	_, err = b.c.CheckHash(b.ctx)
	b.must(err)
}

// TestPartitions drops packets between members.
func TestPartitions(t *testing.T) {
	n := newNetwork(t)
	b := begin(t, 3, history.Options{Compact: true}, func(c *cluster.Cluster) {
		c.Hosts = func(i int) cluster.Host { return n.spaces[i] }
	})
	for range turns() {
		leader, all := b.leader(), b.c.Members()
		b.during("the leader alone", badTimes, func() error { return n.cut(leader, all...) }, n.heal)
		follower := b.followers()[0]
		b.during("a follower alone", badTimes, func() error { return n.cut(follower, all...) }, n.heal)
		leader, follower = b.leader(), b.followers()[1]
		b.during("leader to follower lost, one way", badTimes, func() error { return n.drop(leader, follower) }, n.heal)
		leader, follower = b.leader(), b.followers()[0]
		b.during("follower to leader lost, one way", badTimes, func() error { return n.drop(follower, leader) }, n.heal)
		leader = b.leader()
		b.during("leader to all lost, one way", badTimes, func() error {
			for _, f := range b.c.Members() {
				if f != leader {
					if err := n.drop(leader, f); err != nil {
						return err
					}
				}
			}
			return nil
		}, n.heal)
		b.during("no majority", 0, func() error {
			for i, m := range all {
				if err := n.cut(m, all[i+1:]...); err != nil {
					return err
				}
			}
			return b.load.Silence(b.ctx, 3*time.Second)
		}, n.heal)
		leader = b.leader()
		followers := b.followers()
		b.during("between two followers", badTimes, func() error { return n.cut(followers[0], followers[1]) }, n.heal)
	}
	b.judge()
}

// TestFiveVoters cuts two of five members off, with the leader among them and without. The three go on; the two know no leader, refuse what needs
// one, and still answer reads that ask for no more than what they have.
func TestFiveVoters(t *testing.T) {
	n := newNetwork(t)
	b := begin(t, 5, history.Options{Compact: true}, func(c *cluster.Cluster) {
		c.Hosts = func(i int) cluster.Host { return n.spaces[i] }
	})
	for range turns() {
		for _, with := range []string{"the leader", "followers"} {
			followers := b.followers()
			two, three := followers[:2], append(followers[2:], b.leader())
			if with == "the leader" {
				two, three = []*cluster.Member{b.leader(), followers[0]}, followers[1:]
			}
			b.during("two of five, "+with, badTimes, func() error {
				for _, m := range two {
					if err := n.cut(m, three...); err != nil {
						return err
					}
				}
				if _, err := b.c.LeaderOf(b.ctx, three...); err != nil {
					return err
				}
				errs := make([]error, len(two))
				var work sync.WaitGroup
				for i, m := range two {
					work.Go(func() { errs[i] = b.minority(m) })
				}
				work.Wait()
				return errors.Join(errs...)
			}, n.heal)
		}
	}
	b.judge()
}

// minority is an error unless a member behaves as one that no majority hears.
func (b *trial) minority(m *cluster.Member) error {
	if err := b.eventually("end of its leader", func() error {
		s, err := m.Status(b.ctx)
		if err == nil && s.Leader != 0 {
			err = fmt.Errorf("%v believes in the leader %x in term %d", m, s.Leader, s.RaftTerm)
		}
		return err
	}); err != nil {
		return err
	}
	client, err := m.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(b.ctx, callWithin)
	defer cancel()
	if _, err := client.Get(ctx, "absent", clientv3.WithSerializable()); err != nil {
		return fmt.Errorf("%v, cut off, answers a serializable read with %w", m, err)
	}
	var write error
	var writing sync.WaitGroup
	writing.Go(func() { write = b.write(m) })
	_, read := etcdserverpb.NewKVClient(client.ActiveConnection()).Range(ctx, &etcdserverpb.RangeRequest{Key: []byte("absent")})
	writing.Wait()
	for what, err := range map[string]error{"linearizable read": read, "write": write} {
		if err == nil {
			return broken.Errorf("%v, cut off with a minority, answers a %s", m, what)
		}
		code := status.Code(err)
		if code == codes.DeadlineExceeded && m.Program.Name != "engram" {
			continue // etcd leaves a write unanswered for which there is no leader
		}
		if code != codes.Unavailable {
			return fmt.Errorf("%v, cut off, answers a %s with %v, want that it is unavailable", m, what, err)
		}
	}
	return nil
}

// TestProcesses kills and stops members.
func TestProcesses(t *testing.T) {
	b := begin(t, 3, history.Options{Compact: true}, nil)
	for range turns() {
		leader := b.leader()
		b.during("kill -9 of the leader", badTimes, leader.Kill, leader.Spawn)
		follower := b.followers()[0]
		b.during("kill -9 of a follower", badTimes, follower.Kill, follower.Spawn)
		leader = b.leader()
		b.during("the leader stands still", badTimes, leader.Pause, leader.Continue)
		follower = b.followers()[1]
		b.during("a follower stands still", badTimes, follower.Pause, follower.Continue)
		all := b.c.Members()
		b.during("kill -9 of all", 0, func() error {
			var errs []error
			for _, m := range all {
				errs = append(errs, m.Kill())
			}
			return errors.Join(errs...)
		}, func() error {
			var errs []error
			for _, m := range all {
				errs = append(errs, m.Spawn())
			}
			return errors.Join(errs...)
		})
		if !long() {
			continue // etcd takes its time to stop while clients watch
		}
		leader = b.leader()
		b.during("the leader stops", badTimes, leader.Stop, leader.Spawn)
	}
	b.judge()
}

// TestWiped loses a member's disk: the member is removed, and one without data takes its place.
func TestWiped(t *testing.T) {
	b := begin(t, 3, history.Options{}, func(c *cluster.Cluster) {
		c.Flags = []string{"--snapshot-count=100", "--snapshot-catchup-entries=50"}
	})
	for range turns() {
		for _, of := range []string{"leader", "follower"} {
			lost := b.leader()
			if of == "follower" {
				lost = b.followers()[0]
			}
			b.during("the disk of a "+of, badTimes, func() error {
				return errors.Join(lost.Kill(), os.RemoveAll(lost.DataDir))
			}, func() error {
				if err := b.c.Remove(b.ctx, lost); err != nil {
					return err
				}
				m, err := b.c.Add(b.ctx, lost.Program, true)
				if err != nil {
					return err
				}
				if err := b.c.Promote(b.ctx, m); err != nil {
					return err
				}
				b.load.Refresh()
				return nil
			})
		}
	}
	b.judge()
}

// TestFullDisk takes all space from one member, once a follower and once the leader. The others go on. With space back the
// member does too; one that ended, as etcd does, is started again. Engram must not have ended: it refuses what would take space, and does not lead.
func TestFullDisk(t *testing.T) {
	small := smallDisk(t, 700)
	b := begin(t, 3, history.Options{Refusals: true}, func(c *cluster.Cluster) {
		c.Hosts = func(i int) cluster.Host {
			if i == 0 {
				return cluster.Host{Dir: small}
			}
			return cluster.Host{}
		}
	})
	full := b.c.Members()[0]
	for range turns() {
		for _, role := range []string{"a follower", "the leader"} {
			b.must(b.load.Disturb(func() error {
				if role == "the leader" {
					return b.c.MoveLeader(b.ctx, full)
				}
				return b.c.MoveLeader(b.ctx, b.c.Members()[1])
			}))
			b.during("the disk of "+role+" is full", 2*badTimes, func() error {
				if err := fill(small); err != nil || full.Program.Name != "engram" {
					return err
				}
				return errors.Join(b.eventually("refusal", func() error {
					if err := b.write(full); status.Code(err) != codes.ResourceExhausted {
						return fmt.Errorf("%v has no space left, and answers a write with %v", full, err)
					}
					return nil
				}), b.eventually("hand-over", func() error {
					if leader, err := b.c.Leader(b.ctx); err != nil || leader == full {
						return fmt.Errorf("%v has no space left, and %v leads: %v", full, leader, err)
					}
					return nil
				}))
			}, func() error {
				if err := os.Remove(filepath.Join(small, filler)); err != nil {
					return err
				}
				select {
				case <-full.Exited():
					if full.Program.Name == "engram" {
						return fmt.Errorf("%v ended when its disk was full:\n%s", full, full.LogTail())
					}
					if err := full.Spawn(); err != nil {
						return err
					}
				default:
				}
				return b.eventually("write with space again", func() error { return b.write(full) })
			})
		}
	}
	b.judge()
}

// TestWeather delays, loses, stalls and breaks what members send each other.
func TestWeather(t *testing.T) {
	var proxies []*proxy
	b := begin(t, 3, history.Options{}, func(c *cluster.Cluster) {
		c.Front = func(listen string) (string, error) {
			p, err := newProxy(listen)
			if err != nil {
				return "", err
			}
			t.Cleanup(p.close)
			proxies = append(proxies, p)
			return p.address(), nil
		}
	})
	set := func(w weather) func() error {
		return func() error {
			for _, p := range proxies {
				p.set(w)
			}
			return nil
		}
	}
	fine := set(weather{})
	for range turns() {
		b.during("delay of 20 to 60 ms", badTimes, set(weather{delay: 20 * time.Millisecond, jitter: 40 * time.Millisecond}), fine)
		b.during("5 % lost", badTimes, set(weather{delay: time.Millisecond, lossPercent: 5}), fine)
		b.during("connections break", badTimes, set(weather{resetPerMille: 5}), fine)
		b.during("all stalls", 0, func() error {
			if err := set(weather{stalled: true})(); err != nil {
				return err
			}
			return b.load.Silence(b.ctx, 2*time.Second)
		}, fine)
		one := proxies[rand.IntN(len(proxies))]
		b.during("one member's connections stall, and break", badTimes, func() error {
			one.set(weather{stalled: true})
			return b.load.Answers(b.ctx, badTimes)
		}, func() error {
			one.reset()
			return fine()
		})
	}
	b.judge()
}

// smallDisk mounts a file system of its own. Only root can.
func smallDisk(t *testing.T, megabytes int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", megabytes)); err != nil {
		missing(t, "a small disk cannot be mounted: %v: run as root with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

const filler = "filler"

// fill takes all the space there is on a disk.
func fill(dir string) error {
	f, err := os.Create(filepath.Join(dir, filler))
	if err != nil {
		return err
	}
	defer f.Close()
	page := make([]byte, 4096)
	for block := make([]byte, 1<<20); ; {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) && len(block) > len(page) {
			block = page
		} else if errors.Is(err, syscall.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
