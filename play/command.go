package play

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// player carries out commands.
type player struct {
	cluster *cluster
	load    *load
	say     func(format string, args ...any)
}

// command is a word that can be typed.
type command struct {
	name, args, help string
	arguments        int // how many; the last one may have blanks. -1: the command looks itself
	run              func(p *player, ctx context.Context, args []string) error
}

// commands are in the order of the help text.
var commands []command

func init() { // help lists what it is itself a part of
	onMember := func(f func(*player, context.Context, *member) error) func(*player, context.Context, []string) error {
		return func(p *player, ctx context.Context, args []string) error {
			m, err := p.cluster.find(args[0])
			if err != nil {
				return err
			}
			return f(p, ctx, m)
		}
	}
	commands = []command{
		{"put", "K V", "write a key through a member that is up; --at N: through this one", -1, (*player).put},
		{"get", "K", "read a key, linearizable; --serializable: as one member has it; --at N", -1, (*player).get},
		{"kill", "N", "kill -9: the process is gone, its data stays", 1, onMember((*player).kill)},
		{"stop", "N", "stop as an operator does: a leader hands over first", 1, onMember((*player).stop)},
		{"start", "N", "start one that was stopped or killed", 1, onMember((*player).start)},
		{"pause", "N", "freeze the process (SIGSTOP), as a machine that hangs", 1, onMember((*player).pause)},
		{"resume", "N", "let it go on", 1, onMember((*player).resume)},
		{"cut", "N", "cut off from all others; clients still reach it", 1, onMember((*player).cutOff)},
		{"heal", "N", "join it with the others again", 1, onMember((*player).heal)},
		{"add", "", "add a member: a learner that votes when it has caught up", 0, (*player).add},
		{"promote", "N", "make a learner vote, if add could not", 1, onMember((*player).promote)},
		{"remove", "N", "remove a member for good, with its data", 1, onMember((*player).remove)},
		{"move-leader", "N", "have another member lead", 1, onMember((*player).moveLeader)},
		{"load", "on|off", "steady small writes, 20 a second; load on 100: so many", -1, (*player).setLoad},
		{"status", "", "the table, and what it means", 0, (*player).status},
		{"help", "", "this list", 0, (*player).help},
		{"quit", "", "stop all and leave; so do Ctrl-C and the end of the input", 0, nil},
	}
}

var errQuit = errors.New("quit")

// do carries out a line, and says if it was quit.
func (p *player) do(ctx context.Context, line string) (quit bool) {
	if line == "" || strings.HasPrefix(line, "#") {
		return false
	}
	err := p.carryOut(ctx, line)
	if errors.Is(err, errQuit) {
		return true
	}
	if err != nil && ctx.Err() == nil {
		p.say("%s.", strings.TrimSuffix(err.Error(), "."))
	}
	return false
}

func (p *player) carryOut(ctx context.Context, line string) error {
	name, rest, _ := strings.Cut(line, " ")
	rest = strings.TrimSpace(rest)
	if name == "exit" {
		name = "quit"
	}
	for _, c := range commands {
		if c.name != name {
			continue
		}
		if c.run == nil {
			return errQuit
		}
		args := strings.Fields(rest)
		if c.arguments < 0 {
			args = []string{rest}
		} else if len(args) != c.arguments {
			return fmt.Errorf("%s is to be typed as: %s", c.name, strings.TrimSpace(c.name+" "+c.args))
		}
		return c.run(p, ctx, args)
	}
	return fmt.Errorf("there is no command %q: help lists them", name)
}

// welcome says what can be done.
func (p *player) welcome() {
	c := p.cluster
	p.say("%s", c.quorum().words())
	p.say("Data and logs are in %s", c.home)
	p.say("Elsewhere: %s", p.elsewhere())
	p.say(`Type "help" for the commands; N is a member's number, as 2 or m2, or "leader".`)
}

// elsewhere is how a client in another terminal is called.
func (p *player) elsewhere() string {
	endpoints := strings.Join(p.cluster.endpoints(func(m *member) bool { return m.clientPort != 0 }), ",")
	return fmt.Sprintf("%s ctl --endpoints=%s get --prefix ''", shellWord(p.cluster.executable), strings.ReplaceAll(endpoints, "http://", ""))
}

func (p *player) help(context.Context, []string) error {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, c := range commands {
		fmt.Fprintf(w, "  %s\t%s\n", strings.TrimSpace(c.name+" "+c.args), c.help)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	p.say("%s", strings.TrimRight(b.String(), "\n"))
	p.say("N is a member's number, as 2 or m2, or \"leader\". Elsewhere: %s", p.elsewhere())
	return nil
}

func (p *player) status(ctx context.Context, _ []string) error {
	p.cluster.look(ctx)
	for _, l := range statusLines(p.cluster, p.load) {
		p.say("%s", l.text)
	}
	return nil
}

// settle waits until the members have found together after a change, and says how things stand.
func (p *player) settle(ctx context.Context) {
	before, began := p.cluster.leader(), time.Now()
	if !p.cluster.settle(ctx) && ctx.Err() == nil && p.cluster.quorum().majority() {
		p.say("The members have not agreed on a leader within %v: see status, and the logs in %s.", settleLimit, p.cluster.home)
	}
	if after := p.cluster.leader(); after != before && after != nil {
		p.say("%s leads now: elected after %.1f s, in term %d.", after.name, time.Since(began).Seconds(), p.cluster.termOf(after))
	}
	p.say("%s", p.cluster.quorum().words())
}

func (p *player) kill(ctx context.Context, m *member) error {
	if !p.runs(m) {
		return fmt.Errorf("%s does not run (%s)", m.name, p.state(m))
	}
	if err := p.cluster.end(ctx, m, killed, syscall.SIGKILL); err != nil {
		return err
	}
	p.say("%s was killed with kill -9. What it had acknowledged is on its disk.", m.name)
	p.settle(ctx)
	return nil
}

func (p *player) stop(ctx context.Context, m *member) error {
	if !p.runs(m) {
		return fmt.Errorf("%s does not run (%s)", m.name, p.state(m))
	}
	began := time.Now()
	if err := p.cluster.end(ctx, m, stopped, syscall.SIGTERM); err != nil {
		return err
	}
	p.say("%s has stopped, after %.1f s.", m.name, time.Since(began).Seconds())
	p.settle(ctx)
	return nil
}

func (p *player) start(ctx context.Context, m *member) error {
	if p.runs(m) {
		if s := p.state(m); s != string(running) {
			return fmt.Errorf("%s runs already, %s: type %s", m.name, s, p.cure(m))
		}
		return fmt.Errorf("%s runs already", m.name)
	}
	began, before := time.Now(), p.clientURL(m)
	if err := p.cluster.launch(m); err != nil {
		return err
	}
	p.say("%s was started.", m.name)
	if now := p.clientURL(m); now != before {
		p.say("Its port for clients was taken by another program; it now serves at %s", now)
	}
	p.settle(ctx)
	if s := p.cluster.sightOf(m); s.answered {
		p.say("%s answers after %.1f s, and is at revision %d.", m.name, time.Since(began).Seconds(), s.revision)
	}
	return nil
}

func (p *player) pause(ctx context.Context, m *member) error {
	if s := p.state(m); !p.runs(m) || strings.HasPrefix(s, string(paused)) {
		return fmt.Errorf("%s does not run (%s)", m.name, s)
	}
	if err := m.process.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	p.cluster.locked(func() { m.condition = paused })
	p.say("%s is frozen in the middle of whatever it did. Its connections are open, and silent.", m.name)
	p.settle(ctx)
	return nil
}

func (p *player) resume(ctx context.Context, m *member) error {
	if s := p.state(m); !strings.HasPrefix(s, string(paused)) {
		return fmt.Errorf("%s is not paused (%s)", m.name, s)
	}
	if err := m.process.signal(syscall.SIGCONT); err != nil {
		return err
	}
	p.cluster.locked(func() { m.condition, m.seen = running, sight{} })
	p.say("%s goes on, and learns what it has missed.", m.name)
	p.settle(ctx)
	return nil
}

func (p *player) cutOff(ctx context.Context, m *member) error {
	if p.cluster.isCut(m) {
		return fmt.Errorf("%s is cut off already", m.name)
	}
	p.cluster.locked(func() { m.cut = true })
	p.cluster.net.setCut(m.name, true)
	p.say("%s is cut off: no connection to or from another member. Clients reach it still; --at %s asks it.", m.name, m.name)
	p.settle(ctx)
	return nil
}

func (p *player) heal(ctx context.Context, m *member) error {
	if !p.cluster.isCut(m) {
		return fmt.Errorf("%s is not cut off (%s)", m.name, p.state(m))
	}
	p.cluster.net.setCut(m.name, false)
	p.cluster.locked(func() { m.cut, m.seen = false, sight{} })
	p.say("%s can talk with the others again.", m.name)
	p.settle(ctx)
	return nil
}

func (p *player) runs(m *member) bool { return m.process.running() }

func (p *player) state(m *member) (s string) {
	p.cluster.locked(func() { s = m.state() })
	return s
}

func (p *player) cure(m *member) (s string) {
	p.cluster.locked(func() { s = m.cure() })
	return s
}

func (p *player) clientURL(m *member) (s string) {
	p.cluster.locked(func() { s = m.clientURL() })
	return s
}

// locked changes members, or reads of them what may change.
func (c *cluster) locked(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

func (c *cluster) isCut(m *member) (cut bool) {
	c.locked(func() { cut = m.cut })
	return cut
}

func (c *cluster) sightOf(m *member) (s sight) {
	c.locked(func() { s = m.seen })
	return s
}

func (c *cluster) termOf(m *member) uint64 { return c.sightOf(m).term }

// shellWord quotes a word for a shell if it needs that.
func shellWord(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=:,@%") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
