package play

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
)

// row is a member in the table.
type row struct {
	cells []string
	well  bool
}

var tableHeader = []string{"NAME", "STATE", "ROLE", "TERM", "APPLIED", "REVISION", "KEYS", "DB SIZE", "ERRORS"}

// firstNumber is the first column that is flush right; the last one is text again.
const firstNumber = 3

func (c *cluster) rows() []row {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []row
	for _, m := range c.members {
		out = append(out, m.row())
	}
	return out
}

// row is how a member is. What it said before it ceased to answer is not shown: it may be otherwise by now.
func (m *member) row() row {
	s := &m.seen
	r := row{cells: []string{m.name, m.state(), "-", "-", "-", "-", "-", "-", ""}, well: m.reachable() && s.answered && len(s.errors) == 0}
	switch {
	case m.condition == failed:
		r.cells[8] = m.why
	case m.condition != running:
	case !s.answered && s.err == nil:
		r.cells[8] = "starting"
	case !s.answered:
		r.cells[8] = "does not answer"
	default:
		r.cells[2] = s.role()
		r.cells[3], r.cells[4], r.cells[5] = strconv.FormatUint(s.term, 10), strconv.FormatUint(s.applied, 10), strconv.FormatInt(s.revision, 10)
		if s.keys >= 0 {
			r.cells[6] = strconv.FormatInt(s.keys, 10)
		}
		r.cells[7] = humanize.IBytes(uint64(max(0, s.dbBytes)))
		r.cells[8] = strings.Join(s.errors, "; ")
	}
	return r
}

func (s *sight) role() string {
	switch {
	case s.leads():
		return "leader"
	case s.learner:
		return "learner"
	}
	return "follower"
}

// tableLines are the header and the rows in columns.
func tableLines(rows []row) []string {
	widths := make([]int, len(tableHeader))
	for i, h := range tableHeader {
		widths[i] = len(h)
		for _, r := range rows {
			widths[i] = max(widths[i], len(r.cells[i]))
		}
	}
	line := func(cells []string) string {
		var b strings.Builder
		for i, cell := range cells {
			switch {
			case i == len(cells)-1:
				b.WriteString(cell)
			case i < firstNumber:
				fmt.Fprintf(&b, "%-*s  ", widths[i], cell)
			default:
				fmt.Fprintf(&b, "%*s  ", widths[i], cell)
			}
		}
		return strings.TrimRight(b.String(), " ")
	}
	out := []string{line(tableHeader)}
	for _, r := range rows {
		out = append(out, line(r.cells))
	}
	return out
}
