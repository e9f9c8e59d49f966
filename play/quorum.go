package play

import (
	"fmt"
	"strings"
)

// quorum is what the members that vote can do together.
type quorum struct {
	voters  int
	up      []string // voters that run and are reachable
	down    []voter
	running bool   // some member runs, so serializable reads are answered
	leader  string // "" if none is known
}

// voter is one that does not take part.
type voter struct{ name, state, cure string }

func (c *cluster) quorum() quorum {
	c.mu.Lock()
	defer c.mu.Unlock()
	var q quorum
	for _, m := range c.members {
		q.running = q.running || m.condition == running
		switch {
		case m.learner:
		case m.reachable():
			q.voters++
			q.up = append(q.up, m.name)
		default:
			q.voters++
			q.down = append(q.down, voter{m.name, m.state(), m.cure()})
		}
	}
	if m := c.leaderNow(); m != nil {
		q.leader = m.name
	}
	return q
}

// needed is the smallest majority.
func (q quorum) needed() int { return q.voters/2 + 1 }

func (q quorum) majority() bool { return len(q.up) >= q.needed() }

// words say what the quorum means now.
func (q quorum) words() string {
	head := fmt.Sprintf("%d of %s up", len(q.up), count(q.voters, "voter"))
	switch {
	case !q.majority() && !q.running:
		return fmt.Sprintf("%s: nobody answers. %s.", head, upper(q.cures()))
	case !q.majority():
		return fmt.Sprintf("%s: no majority (%d needed): writes and linearizable reads wait; serializable reads answer. %s.", head, q.needed(), upper(q.cures()))
	case q.leader == "":
		return fmt.Sprintf("%s: a majority, which has no leader yet: writes wait for the election.", head)
	}
	return fmt.Sprintf("%s: a majority (%d) answers, %s leads; %s.", head, q.needed(), q.leader, q.spare())
}

// spare says how many more may be lost.
func (q quorum) spare() string {
	switch spare := len(q.up) - q.needed(); spare {
	case 0:
		return "none more may be lost"
	case 1:
		return "one more may be lost"
	default:
		return fmt.Sprintf("%d more may be lost", spare)
	}
}

// missing names the voters that do not take part.
func (q quorum) missing() string {
	parts := make([]string, len(q.down))
	for i, v := range q.down {
		parts[i] = v.name + " " + strings.ReplaceAll(v.state, ", ", " and ")
	}
	return strings.Join(parts, ", ")
}

// cures are the commands that bring a majority back: any of them if one voter is enough.
func (q quorum) cures() string {
	need := q.needed() - len(q.up)
	parts := make([]string, len(q.down))
	for i, v := range q.down {
		parts[i] = v.cure
	}
	list := strings.Join(parts, ", ")
	if i := strings.LastIndex(list, ", "); i >= 0 {
		join := " or "
		if need == len(parts) {
			join = " and "
		}
		list = list[:i] + join + list[i+2:]
	}
	if need > 1 && need < len(parts) {
		return fmt.Sprintf("%d of these bring it back: %s", need, list)
	}
	return "to bring it back: " + list
}

func upper(s string) string { return strings.ToUpper(s[:1]) + s[1:] }
