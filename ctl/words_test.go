package ctl

import (
	"slices"
	"strings"
	"testing"
)

func TestSplitWords(t *testing.T) {
	for _, c := range []struct {
		line string
		want []string
	}{
		{``, nil},
		{"  \t ", nil},
		{`put a b`, []string{"put", "a", "b"}},
		{"put\ta  b ", []string{"put", "a", "b"}},
		{`put a "x y"`, []string{"put", "a", "x y"}},
		{`put a 'x y'`, []string{"put", "a", "x y"}},
		{`put a "c\nd\x41é"`, []string{"put", "a", "c\ndAé"}},
		{`put a "say \"x\""`, []string{"put", "a", `say "x"`}},
		{`put a 'x\'y'`, []string{"put", "a", `x\`, `y'`}},
		{`put a ""`, []string{"put", "a", ""}},
		{`put a ''`, []string{"put", "a", ""}},
		{`put a "x"y`, []string{"put", "a", "x", "y"}},
		{`put a y"x"`, []string{"put", "a", `y"x"`}},
		{`put a it's`, []string{"put", "a", "it's"}},
		{`put a "x`, []string{"put", "a", "x"}},
		{`put a 'x`, []string{"put", "a", "x"}},
		{`put a x\ y`, []string{"put", "a", `x\`, "y"}},
	} {
		got, err := splitWords(c.line)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("splitWords(%q) = %q, %v; want %q", c.line, got, err, c.want)
		}
	}
	if got, err := splitWords(`put a "\q"`); err == nil {
		t.Errorf("an escape that does not exist was taken as %q", got)
	}
}

// FuzzSplitWords checks that words without quotes and spaces come back whatever their number, and that nothing panics.
func FuzzSplitWords(f *testing.F) {
	for _, s := range []string{`put a "x y"`, `'a'b'c'`, `"\`, `"\"`, "a\x00b", `put "a\\" b`, "\u2003x\u00a0y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, line string) {
		words, err := splitWords(line)
		if err != nil || strings.ContainsAny(line, `"'`) {
			return
		}
		if want := strings.Fields(line); !slices.Equal(words, want) {
			t.Errorf("splitWords(%q) = %q, want %q", line, words, want)
		}
	})
}
