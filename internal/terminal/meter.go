package terminal

import (
	"fmt"
	"io"
	"os"
	"time"
)

// Meter shows on one line of a terminal how far a long work is: share, rate and
// time left. One goroutine uses it.
type Meter struct {
	w     io.Writer
	now   func() time.Time
	what  string
	began time.Time
	next  time.Time
	shown bool
}

// meterEvery is the time between two changes of the line.
const meterEvery = 200 * time.Millisecond

// NewMeter returns a meter, or nil if w is no terminal.
func NewMeter(w io.Writer, what string) *Meter {
	if f, ok := w.(*os.File); !ok || !Is(f) {
		return nil
	}
	return newMeter(w, what, time.Now)
}

func newMeter(w io.Writer, what string, now func() time.Time) *Meter {
	return &Meter{w: w, now: now, what: what, began: now()}
}

// Begin starts anew with another work.
func (m *Meter) Begin(what string) { m.what, m.began, m.next = what, m.now(), time.Time{} }

// At says how many bytes are done. of is how many there are, 0 while nobody
// knows.
func (m *Meter) At(done, of int64) {
	now := m.now()
	if now.Before(m.next) {
		return
	}
	m.next, m.shown = now.Add(meterEvery), true
	_, _ = fmt.Fprintf(m.w, "\r\x1b[K%s: %s", m.what, Progress(done, of, now.Sub(m.began)))
}

// End clears the line. It may be called more than once.
func (m *Meter) End() {
	if m != nil && m.shown {
		m.shown = false
		_, _ = io.WriteString(m.w, "\r\x1b[K")
	}
}

// Progress is a meter's text.
func Progress(done, of int64, took time.Duration) string {
	text := Bytes(done)
	if of > 0 {
		text = fmt.Sprintf("%3d%%  %s of %s", min(done, of)*100/of, text, Bytes(of))
	}
	if took < meterEvery || done == 0 {
		return text
	}
	rate := float64(done) / took.Seconds()
	text += fmt.Sprintf("  %s/s", Bytes(int64(rate)))
	if of > done {
		left := time.Duration(float64(of-done) / rate * float64(time.Second))
		text += fmt.Sprintf("  %v left", left.Round(time.Second))
	}
	return text
}
