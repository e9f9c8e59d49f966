package ctl

import (
	"io"
	"strings"
	"unicode/utf8"
)

// columns is a list for people: all columns are flush right but the last, which is as long as it likes.
type columns struct{ rows [][]string }

func newColumns(header ...string) *columns { return &columns{rows: [][]string{header}} }

func (c *columns) add(cells ...string) { c.rows = append(c.rows, cells) }

// write writes all rows; an error stays in the writer until the flush at the end.
func (c *columns) write(w io.Writer) {
	widths := make([]int, len(c.rows[0])-1)
	for _, row := range c.rows {
		for i := range widths {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	for _, row := range c.rows {
		var b strings.Builder
		for i, width := range widths {
			b.WriteString(strings.Repeat(" ", width-utf8.RuneCountInString(row[i])) + row[i] + "  ")
		}
		_, _ = io.WriteString(w, b.String()+row[len(widths)]+"\n")
	}
}
