package play

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// cluster is the members and what lies between them. Commands come one at a time; the observer and the ends of processes
// come beside them.
type cluster struct {
	executable, home string
	net              *network
	starter          *starter
	happened         func(text string) // is told what nobody asked for, from any goroutine

	watchers sync.WaitGroup

	mu      sync.Mutex // covers all below, and the members' own fields
	members []*member  // in the order of their numbers
	last    int        // the highest number that was ever given
	ports   ports
}

func newCluster(executable, home, scratch string, happened func(string)) (*cluster, error) {
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, fmt.Errorf("--dir: %w", err)
	}
	return &cluster{
		executable: executable, home: home, net: newNetwork(filepath.Join(scratch, linkDir)), starter: newStarter(),
		happened: happened, ports: ports{map[int]bool{}},
	}, nil
}

// found starts the first members, or those that an earlier play left in the directory. The processes are started; they may
// not serve yet.
func (c *cluster) found(o *options) error {
	numbers, err := leftMembers(c.home)
	if err != nil {
		return fmt.Errorf("--dir: %w", err)
	}
	switch {
	case len(numbers) > maxMembers:
		return fmt.Errorf("--dir=%s holds %d members, and play runs %d at most", o.dir, len(numbers), maxMembers)
	case len(numbers) > 0 && o.membersSet && o.members != len(numbers):
		return fmt.Errorf("--dir=%s holds a cluster of %s: leave --members out, and use add and remove", o.dir, count(len(numbers), "member"))
	case len(numbers) == 0:
		for i := range o.members {
			numbers = append(numbers, i+1)
		}
	}
	var parts []string
	for _, n := range numbers {
		m, err := c.newMember(n)
		if err != nil {
			return err
		}
		parts = append(parts, m.name+"="+peerURL(m.name))
	}
	for _, m := range c.list() {
		m.birth = birth{strings.Join(parts, ","), "new"}
		if err := c.launch(m); err != nil {
			return err
		}
	}
	return nil
}

// leftMembers are the numbers of the members whose data lies in a directory.
func leftMembers(home string) ([]int, error) {
	entries, err := os.ReadDir(home)
	if err != nil {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		digits, ok := strings.CutPrefix(e.Name(), "m")
		n, err := strconv.Atoi(digits)
		if !ok || err != nil || n < 1 || e.Name() != memberName(n) {
			continue
		}
		if _, err := os.Stat(filepath.Join(home, e.Name(), "data")); err == nil {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

func memberName(n int) string { return "m" + strconv.Itoa(n) }

// newMember makes a member that does not run yet, and its links.
func (c *cluster) newMember(n int) (*member, error) {
	name := memberName(n)
	if err := c.net.join(name); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := &member{name: name, dir: filepath.Join(c.home, name), condition: stopped}
	c.members = append(c.members, m)
	c.last = max(c.last, n)
	return m, nil
}

// forget drops a member that does not run, with its links and its data.
func (c *cluster) forget(m *member) error {
	c.mu.Lock()
	c.members = slices.DeleteFunc(c.members, func(x *member) bool { return x == m })
	c.mu.Unlock()
	c.net.leave(m.name)
	if m.client != nil {
		_ = m.client.Close() // nothing is asked of it any more
	}
	return os.RemoveAll(m.dir)
}

func (c *cluster) list() []*member {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.members)
}

// which returns the members for which f holds. f must not lock.
func (c *cluster) which(f func(*member) bool) []*member {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []*member
	for _, m := range c.members {
		if f(m) {
			out = append(out, m)
		}
	}
	return out
}

// find returns a member by what a user calls it: 2, m2 or leader.
func (c *cluster) find(word string) (*member, error) {
	if word == "leader" {
		if m := c.leader(); m != nil {
			return m, nil
		}
		return nil, errors.New("no member leads now: see status")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var names []string
	for _, m := range c.members {
		if m.name == word || m.name == "m"+word {
			return m, nil
		}
		names = append(names, m.name)
	}
	return nil, fmt.Errorf("there is no member %q: name one of %s, or leader", word, strings.Join(names, ", "))
}

// endpoints are the client URLs of members for which f holds.
func (c *cluster) endpoints(f func(*member) bool) []string {
	var out []string
	for _, m := range c.which(f) {
		out = append(out, m.clientURL())
	}
	return out
}

// clientEndpoints are where a client has the best chance: voters that the others can reach; if there are none, any that run.
func (c *cluster) clientEndpoints() []string {
	if e := c.endpoints(func(m *member) bool { return m.reachable() && !m.learner }); len(e) > 0 {
		return e
	}
	return c.endpoints(func(m *member) bool { return m.condition == running })
}

// alive is how many processes run.
func (c *cluster) alive() int {
	return len(c.which(func(m *member) bool { return m.process.running() }))
}

// close ends all members and what lies between them. When ctx ends they are killed. The leader comes last: stopped beside the
// others it would try for long to hand over to one that stops as well.
func (c *cluster) close(ctx context.Context) {
	leader := c.leader()
	stop := func(m *member) {
		if err := c.end(ctx, m, stopped, syscall.SIGTERM); err != nil && ctx.Err() == nil {
			c.happened(err.Error())
		}
	}
	var ending sync.WaitGroup
	for _, m := range c.list() {
		if m != leader {
			ending.Go(func() { stop(m) })
		}
	}
	ending.Wait()
	if leader != nil {
		stop(leader)
	}
	c.watchers.Wait()
	c.net.close()
	for _, m := range c.list() {
		if m.client != nil {
			_ = m.client.Close()
		}
	}
	c.starter.close()
}
