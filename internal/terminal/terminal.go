// Package terminal is what the command-line tools have in common: sizes and
// tables as etcd's tools print them, and whether a file is a terminal.
//
// It knows no command and no server.
package terminal

import (
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Is says whether a file is a terminal.
func Is(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Bytes writes a size with two digits or more, in units of 1000.
func Bytes(n int64) string {
	if n < 1000 {
		return strconv.FormatInt(n, 10) + " B"
	}
	size := float64(n)
	unit := 0
	for ; size >= 1000; size /= 1000 {
		unit++
	}
	if tenths := math.Floor(size*10 + 0.5); tenths < 100 {
		return fmt.Sprintf("%.1f %cB", tenths/10, " kMGTPE"[unit])
	}
	return fmt.Sprintf("%.0f %cB", math.Floor(size+0.5), " kMGTPE"[unit])
}

// Table draws a header in capitals, centred, and rows that are flush right. An
// error of w is left to whoever flushes it.
func Table(w io.Writer, header []string, rows [][]string) {
	widths := make([]int, len(header))
	for i, h := range header {
		widths[i] = utf8.RuneCountInString(h)
		for _, row := range rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	t := table{w: w, widths: widths}
	t.rule("┌", "┬", "┐")
	t.row(header, func(cell string, space int) string {
		left := space / 2
		return strings.Repeat(" ", left) + strings.ToUpper(cell) + strings.Repeat(" ", space-left)
	})
	if len(rows) > 0 {
		t.rule("├", "┼", "┤")
	}
	for _, row := range rows {
		t.row(row, func(cell string, space int) string { return strings.Repeat(" ", space) + cell })
	}
	t.rule("└", "┴", "┘")
}

type table struct {
	w      io.Writer
	widths []int
}

func (t table) rule(left, middle, right string) {
	lines := make([]string, len(t.widths))
	for i, w := range t.widths {
		lines[i] = strings.Repeat("─", w+2)
	}
	_, _ = io.WriteString(t.w, left+strings.Join(lines, middle)+right+"\n")
}

func (t table) row(cells []string, pad func(cell string, space int) string) {
	padded := make([]string, len(cells))
	for i, c := range cells {
		padded[i] = pad(c, t.widths[i]-utf8.RuneCountInString(c))
	}
	_, _ = io.WriteString(t.w, "│ "+strings.Join(padded, " │ ")+" │\n")
}
