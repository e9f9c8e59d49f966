package ctl

import (
	"bufio"
	"io"
	"strings"
	"unicode/utf8"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// tablePrinter draws boxes, for the answers that are tables.
type tablePrinter struct {
	refuser
	out *bufio.Writer
}

func (p *tablePrinter) members(r *clientv3.MemberListResponse) error {
	var rows [][]string
	for _, m := range r.Members {
		rows = append(rows, memberRow(m))
	}
	p.table(memberHeader, rows)
	return nil
}

func (p *tablePrinter) health(all []endpointHealth, _ io.Writer) error {
	var rows [][]string
	for _, h := range all {
		rows = append(rows, []string{h.Endpoint, yesNo(h.Health), h.Took, h.Error})
	}
	p.table([]string{"Endpoint", "Health", "Took", "Error"}, rows)
	return nil
}

func (p *tablePrinter) statuses(all []endpointStatus) error {
	var rows [][]string
	for _, s := range all {
		rows = append(rows, statusRow(s))
	}
	p.table(statusHeader, rows)
	return nil
}

func (p *tablePrinter) hashes(all []endpointHashKV) error {
	var rows [][]string
	for _, h := range all {
		rows = append(rows, hashRow(h))
	}
	p.table(hashHeader, rows)
	return nil
}

// table draws a header in capitals, centred, and rows that are flush right.
func (p *tablePrinter) table(header []string, rows [][]string) {
	widths := make([]int, len(header))
	for i, h := range header {
		widths[i] = utf8.RuneCountInString(h)
		for _, row := range rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	p.rule("┌", "┬", "┐", widths)
	p.row(header, widths, func(cell string, space int) string {
		left := space / 2
		return strings.Repeat(" ", left) + strings.ToUpper(cell) + strings.Repeat(" ", space-left)
	})
	if len(rows) > 0 {
		p.rule("├", "┼", "┤", widths)
	}
	for _, row := range rows {
		p.row(row, widths, func(cell string, space int) string { return strings.Repeat(" ", space) + cell })
	}
	p.rule("└", "┴", "┘", widths)
}

func (p *tablePrinter) rule(left, middle, right string, widths []int) {
	lines := make([]string, len(widths))
	for i, w := range widths {
		lines[i] = strings.Repeat("─", w+2)
	}
	p.write(left + strings.Join(lines, middle) + right + "\n")
}

func (p *tablePrinter) row(cells []string, widths []int, pad func(cell string, space int) string) {
	padded := make([]string, len(cells))
	for i, c := range cells {
		padded[i] = pad(c, widths[i]-utf8.RuneCountInString(c))
	}
	p.write("│ " + strings.Join(padded, " │ ") + " │\n")
}

func (p *tablePrinter) write(s string) { _, _ = p.out.WriteString(s) } // an error stays in the writer until the flush at the end
