package fault

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/engram-kv/engram/test/internal/cluster"
)

const hosts = 5 // most members of a cluster at a time

// Each network of this process has a name and addresses of its own.
var (
	firstNetwork = rand.IntN(250)
	networks     atomic.Int32
)

// network is a bridge with a namespace at each port. Clients are at the bridge, so that no partition cuts them off.
type network struct {
	bridge  string
	address string // of the bridge
	spaces  []cluster.Host
}

// newNetwork makes a network that is removed with the test.
func newNetwork(t *testing.T) *network {
	t.Helper()
	for _, tool := range []string{"ip", "iptables"} {
		if _, err := exec.LookPath(tool); err != nil {
			missing(t, "%s is not installed: apt-get install iproute2 iptables", tool)
		}
	}
	if os.Geteuid() != 0 {
		missing(t, "network namespaces need root")
	}
	serial := int(networks.Add(1))
	net := (firstNetwork + serial) % 250
	n := &network{bridge: fmt.Sprintf("eg%d-%d", os.Getpid()%1_000_000, serial), address: fmt.Sprintf("10.213.%d.254", net)}
	t.Cleanup(func() {
		if err := n.remove(); err != nil {
			t.Error(err)
		}
	})
	steps := []string{
		"link add " + n.bridge + " type bridge",
		fmt.Sprintf("address add %s/24 dev %s", n.address, n.bridge),
		"link set " + n.bridge + " up",
	}
	for i := range hosts {
		h := cluster.Host{Namespace: fmt.Sprintf("%s-%d", n.bridge, i), Address: fmt.Sprintf("10.213.%d.%d", net, i+1)}
		inside := "-n " + h.Namespace + " "
		steps = append(steps,
			"netns add "+h.Namespace,
			fmt.Sprintf("link add %sv%d type veth peer name eth0 netns %s", n.bridge, i, h.Namespace),
			fmt.Sprintf("link set %sv%d master %s up", n.bridge, i, n.bridge),
			inside+"link set lo up",
			fmt.Sprintf("%saddress add %s/24 dev eth0", inside, h.Address),
			inside+"link set eth0 up",
		)
		n.spaces = append(n.spaces, h)
	}
	for i, step := range steps {
		if err := run("ip", strings.Fields(step)...); err != nil {
			if i == 0 {
				missing(t, "%v", err)
			}
			t.Fatal(err)
		}
	}
	if err := run("ip", "netns", "exec", n.spaces[0].Namespace, "iptables", "-w", "-L"); err != nil {
		missing(t, "%v", err)
	}
	return n
}

// missing skips the test, or fails it where nothing may be missing.
func missing(t *testing.T, format string, args ...any) {
	t.Helper()
	if long() {
		t.Fatalf(format, args...)
	}
	t.Skipf("NOT TESTED: "+format, args...)
}

func (n *network) remove() error {
	var errs []error
	for _, h := range n.spaces {
		errs = append(errs, run("ip", "netns", "delete", h.Namespace)) // and its link
	}
	if len(n.spaces) > 0 {
		errs = append(errs, run("ip", "link", "delete", n.bridge))
	}
	return errors.Join(errs...)
}

// drop loses all packets from one member to another.
func (n *network) drop(from, to *cluster.Member) error {
	return run("ip", "netns", "exec", to.Host().Namespace, "iptables", "-w", "-A", "INPUT", "-s", from.Host().Address, "-j", "DROP")
}

// cut separates a member from others, both ways.
func (n *network) cut(m *cluster.Member, others ...*cluster.Member) error {
	for _, o := range others {
		if o == m {
			continue
		}
		if err := errors.Join(n.drop(m, o), n.drop(o, m)); err != nil {
			return err
		}
	}
	return nil
}

// heal lets all packets pass.
func (n *network) heal() error {
	var errs []error
	for _, h := range n.spaces {
		errs = append(errs, run("ip", "netns", "exec", h.Namespace, "iptables", "-w", "-F"))
	}
	return errors.Join(errs...)
}

func run(tool string, args ...string) error {
	if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", tool, strings.Join(args, " "), err, out)
	}
	return nil
}
