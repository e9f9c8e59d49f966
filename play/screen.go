package play

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"unicode"

	"golang.org/x/sys/unix"
)

// screen is a terminal whose upper lines hold the table while the rest scrolls below it. The terminal does the scrolling (a
// scroll region, DECSTBM) and the editing of the line that is typed, so there is nothing to read keys for.
type screen struct {
	f     *os.File
	color bool

	mu         sync.Mutex // covers all below
	rows, cols int
	top        int      // lines of the table; 0: there is none
	history    []string // what was written last, for when the layout changes; the last one is the line not yet ended
	closed     bool
}

const maxHistory = 200

// windowSize fails if f is no terminal.
func windowSize(f *os.File) (rows, cols int, err error) {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, err
	}
	return int(size.Row), int(size.Col), nil
}

func newScreen(f *os.File, color bool) *screen {
	return &screen{f: f, color: color, history: []string{""}}
}

// write shows text below the table.
func (s *screen) write(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remember(text)
	s.put(text)
}

// typed notes what the terminal showed as it was typed.
func (s *screen) typed(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remember(text + "\n")
}

func (s *screen) remember(text string) {
	parts := strings.Split(text, "\n")
	s.history[len(s.history)-1] += parts[0]
	s.history = append(s.history, parts[1:]...)
	s.history = s.history[max(0, len(s.history)-maxHistory):]
}

func (s *screen) put(text string) { _, _ = s.f.WriteString(text) } // a terminal that is gone sends SIGHUP

// draw draws the table. The cursor stays where it is.
func (s *screen) draw(lines []statusLine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	rows, cols, err := windowSize(s.f)
	top := len(lines) + 1 // and a rule
	if err != nil || rows < top+minLines {
		top = 0
	}
	if rows != s.rows || cols != s.cols || top != s.top {
		s.rows, s.cols, s.top = rows, cols, top
		s.layOut()
	}
	if top == 0 {
		return
	}
	var b strings.Builder
	b.WriteString("\x1b7\x1b[?25l")
	for i, l := range append(lines, statusLine{strings.Repeat("-", cols), plain}) {
		fmt.Fprintf(&b, "\x1b[%d;1H\x1b[2K%s", i+1, s.styled(l))
	}
	b.WriteString("\x1b8\x1b[?25h")
	s.put(b.String())
}

// layOut clears the terminal, divides it anew, and shows again what was there last.
func (s *screen) layOut() {
	var b strings.Builder
	b.WriteString("\x1b[r\x1b[2J")
	if s.top > 0 {
		fmt.Fprintf(&b, "\x1b[%d;%dr", s.top+1, s.rows)
	}
	fmt.Fprintf(&b, "\x1b[%d;1H", s.top+1)
	fit := max(1, s.rows-s.top)
	b.WriteString(strings.Join(s.history[max(0, len(s.history)-fit):], "\n"))
	s.put(b.String())
}

// styled cuts a line to the width and colours it.
func (s *screen) styled(l statusLine) string {
	text := []rune(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, l.text))
	if len(text) > s.cols {
		text = text[:s.cols]
	}
	codes := map[style]string{bold: "1", good: "32", bad: "31"}
	if code := codes[l.look]; code != "" && s.color {
		return "\x1b[" + code + "m" + string(text) + "\x1b[0m"
	}
	return string(text)
}

// over says that there will be no table any more.
func (s *screen) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// close ends the division of the terminal. What comes after is written where the cursor is.
func (s *screen) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.top > 0 {
		s.put("\x1b7\x1b[r\x1b8")
	}
}
