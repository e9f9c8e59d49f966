package play

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// openTerminal opens a terminal of a size. What is written to it can be read from the other end.
func openTerminal(t *testing.T, rows, cols uint16) (far, terminal *os.File) {
	t.Helper()
	far, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { _ = far.Close() })
	n, err := unix.IoctlGetInt(int(far.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(far.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	if terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = terminal.Close() })
	resize(t, terminal, rows, cols)
	return far, terminal
}

func resize(t *testing.T, terminal *os.File, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
}

// emulator does what a terminal does with the sequences that screen writes.
type emulator struct {
	lines           []string
	row, col        int
	top, bottom     int
	savedR, savedC  int
	unknownSequence string
}

func newEmulator(rows int) *emulator { return &emulator{lines: make([]string, rows), bottom: rows - 1} }

var sequence = regexp.MustCompile(`^\x1b(?:([78])|\[(\??[0-9;]*)([A-Za-z]))`)

func (e *emulator) feed(text string) {
	for text != "" {
		if m := sequence.FindStringSubmatch(text); m != nil {
			e.control(m[1]+m[3], m[2])
			text = text[len(m[0]):]
			continue
		}
		switch c := text[0]; c {
		case '\r':
			e.col = 0
		case '\n':
			if e.row == e.bottom {
				copy(e.lines[e.top:e.bottom], e.lines[e.top+1:e.bottom+1])
				e.lines[e.bottom] = ""
			} else {
				e.row++
			}
		default:
			line := e.lines[e.row]
			line += strings.Repeat(" ", max(0, e.col+1-len(line)))
			e.lines[e.row] = line[:e.col] + string(c) + line[e.col+1:]
			e.col++
		}
		text = text[1:]
	}
}

func (e *emulator) control(name, args string) {
	var n []int
	for a := range strings.SplitSeq(args, ";") {
		if i, err := strconv.Atoi(a); err == nil {
			n = append(n, i)
		}
	}
	switch name {
	case "7":
		e.savedR, e.savedC = e.row, e.col
	case "8":
		e.row, e.col = e.savedR, e.savedC
	case "H":
		e.row, e.col = n[0]-1, n[1]-1
	case "r":
		e.top, e.bottom, e.row, e.col = 0, len(e.lines)-1, 0, 0
		if len(n) == 2 {
			e.top, e.bottom = n[0]-1, n[1]-1
		}
	case "J":
		clear(e.lines)
	case "K":
		e.lines[e.row] = ""
	case "m", "h", "l": // colours; the cursor's visibility
	default:
		e.unknownSequence = name
	}
}

func TestScreen(t *testing.T) {
	far, terminal := openTerminal(t, 12, 30)
	s := newScreen(terminal, true)
	e := newEmulator(12)
	buf := make([]byte, 64<<10)
	// show reads what was written up to a mark, which is no part of it, and compares.
	show := func(want ...string) {
		t.Helper()
		var got string
		if _, err := terminal.WriteString("\x05"); err != nil {
			t.Fatal(err)
		}
		for !strings.HasSuffix(got, "\x05") {
			n, err := far.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got += string(buf[:n])
		}
		e.feed(strings.TrimSuffix(got, "\x05"))
		lines := strings.TrimRight(strings.Join(e.lines, "\n"), "\n")
		if lines != strings.Join(want, "\n") || e.unknownSequence != "" {
			t.Fatalf("the terminal shows\n%s\nnot\n%s\n(unknown sequence %q)", lines, strings.Join(want, "\n"), e.unknownSequence)
		}
	}
	rule := strings.Repeat("-", 30)
	s.write("begins\n")
	table := []statusLine{{"HEAD", bold}, {"m1 " + strings.Repeat("x", 40), bad}, {"words\x1b[2J", good}}
	s.draw(table)
	show("HEAD", "m1 "+strings.Repeat("x", 27), "words [2J", rule, "begins")
	s.write(prompt)
	s.draw([]statusLine{{"HEAD", bold}, {"m1 well", plain}, {"words", good}})
	show("HEAD", "m1 well", "words", rule, "begins", prompt)
	if e.row != 5 || e.col != len(prompt) {
		t.Errorf("the cursor is at %d, %d", e.row, e.col)
	}
	// What is written scrolls below the table, and stays there when the table grows.
	s.write("\n")
	for i := range 9 {
		s.write(fmt.Sprintf("line %d\n", i))
	}
	show("HEAD", "m1 well", "words", rule, "line 2", "line 3", "line 4", "line 5", "line 6", "line 7", "line 8")
	s.draw(append(table[:1:1], statusLine{"m1", plain}, statusLine{"m2", plain}, statusLine{"words", good}))
	show("HEAD", "m1", "m2", "words", rule, "line 3", "line 4", "line 5", "line 6", "line 7", "line 8")
	// A terminal that is too small has no table.
	resize(t, terminal, 10, 30)
	e = newEmulator(10)
	s.draw(table)
	show("HEAD", "m1 "+strings.Repeat("x", 27), "words [2J", rule, "line 4", "line 5", "line 6", "line 7", "line 8")
	resize(t, terminal, 9, 30)
	e = newEmulator(9)
	s.draw(table)
	show("line 1", "line 2", "line 3", "line 4", "line 5", "line 6", "line 7", "line 8")
	s.close()
	s.draw(table) // too late
	s.write("end")
	show("line 1", "line 2", "line 3", "line 4", "line 5", "line 6", "line 7", "line 8", "end")
}
