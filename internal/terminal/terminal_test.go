package terminal

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 999: "999 B", 1000: "1.0 kB", 9949: "9.9 kB", 9950: "10 kB", 20480: "20 kB", 999_499: "999 kB", 2_147_483_648: "2.1 GB", 1 << 62: "4.6 EB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	Table(&b, []string{"name", "a"}, [][]string{{"x", "long one"}, {"größer", "y"}})
	want := `
┌────────┬──────────┐
│  NAME  │    A     │
├────────┼──────────┤
│      x │ long one │
│ größer │        y │
└────────┴──────────┘
`
	if got := b.String(); got != strings.TrimPrefix(want, "\n") {
		t.Errorf("\n%s", got)
	}
}

// TestMeter goes through a work of ten seconds.
func TestMeter(t *testing.T) {
	var b bytes.Buffer
	now := time.Unix(1000, 0)
	m := newMeter(&b, "saving", func() time.Time { return now })
	m.At(0, 100e6)
	for range 9 {
		now = now.Add(time.Second)
		m.At(int64(now.Unix()-1000)*10e6, 100e6)
		m.At(int64(now.Unix()-1000)*10e6+1, 100e6) // too soon to be shown
	}
	lines := strings.Split(b.String(), "\r\x1b[K")
	if len(lines) != 11 || lines[1] != "saving:   0%  0 B of 100 MB" || lines[10] != "saving:  90%  90 MB of 100 MB  10 MB/s  1s left" {
		t.Errorf("%q", lines)
	}
	b.Reset()
	m.End()
	m.End()
	if b.String() != "\r\x1b[K" {
		t.Errorf("the end: %q", b.String())
	}
	(*Meter)(nil).End() // of no terminal
	if NewMeter(&b, "x") != nil {
		t.Error("a meter without a terminal")
	}
	if got := Progress(5e6, 0, time.Second); got != "5.0 MB  5.0 MB/s" {
		t.Errorf("of an unknown size: %q", got)
	}
}
