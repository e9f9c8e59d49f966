package ctl

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestParseWatch(t *testing.T) {
	const key, end = "ETCDCTL_WATCH_KEY=k", "ETCDCTL_WATCH_RANGE_END=e"
	for _, c := range []struct {
		args []string
		dash int
		env  []string
		want string
	}{
		{[]string{"a"}, -1, nil, `"a"`},
		{[]string{"a", "b"}, -1, nil, `"a" to "b"`},
		{[]string{"a", "b", "c"}, -1, nil, `"a"`},
		{[]string{"a", "echo", "x"}, 1, nil, `"a" ["echo" "x"]`},
		{[]string{"a", "b", "echo"}, 2, nil, `"a" to "b" ["echo"]`},
		{nil, -1, []string{key}, `"k"`},
		{nil, -1, []string{key, end}, `"k" to "e"`},
		{[]string{"echo"}, 0, []string{key}, `"k" ["echo"]`},
		{nil, -1, nil, "bad number of arguments"},
		{[]string{"echo"}, 0, nil, "bad number of arguments"},
		{[]string{"a"}, 1, nil, "bad number of arguments (found separator --, but no commands)"},
		{[]string{"a"}, -1, []string{key}, "bad number of arguments (found conflicting environment key)"},
		{[]string{"a"}, -1, []string{end}, `ETCDCTL_WATCH_KEY is empty but got ETCDCTL_WATCH_RANGE_END="e"`},
	} {
		r, err := (&tool{env: c.env}).parseWatch(c.args, c.dash, watchFlags{})
		got := fmt.Sprintf("%q", r.key)
		if r.ranged {
			got += fmt.Sprintf(" to %q", r.end)
		}
		if len(r.command) > 0 {
			got += fmt.Sprintf(" %q", r.command)
		}
		if err != nil {
			got = err.Error()
			if e, ok := errors.AsType[*exitError](err); !ok || e.code != exitArguments {
				t.Errorf("%q: %v has not exit code %d", c.args, err, exitArguments)
			}
		}
		if got != c.want {
			t.Errorf("watch %q, -- after %d, with %q:\n got %s\nwant %s", c.args, c.dash, c.env, got, c.want)
		}
	}
}

func TestParseWatchLine(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{`watch a`, ""},
		{`watch "a b" c --rev=4 --prev-kv -- echo "x y"`, ""},
		{``, "Invalid command:  (watch and progress supported)"},
		{`watch`, "Invalid command watch (command type or key is not provided)"},
		{`WATCH a`, "Invalid command WATCH a (only support watch)"},
		{`watch a b --prefix`, "Invalid command watch a b --prefix (`range_end` and `--prefix` are mutually exclusive)"},
		{`watch "\q"`, `Invalid command watch "\q" (invalid syntax)`},
	} {
		var said bytes.Buffer
		w := &watchPrinter{tool: &tool{err: &said, ctx: t.Context()}}
		r, _, err := w.parseLine(t.Context(), nil, c.line)
		if err != nil {
			t.Errorf("%q: %v", c.line, err)
		}
		if got := strings.TrimSpace(said.String()); got != c.want || (r == nil) != (c.want != "") {
			t.Errorf("%q: request %v, said %q; want %q", c.line, r, got, c.want)
		}
		if r != nil && strings.Contains(c.line, "echo") {
			if r.key != "a b" || r.end != "c" || r.flags.rev != 4 || !r.flags.prevKV || !slices.Equal(r.command, []string{"echo", "x y"}) {
				t.Errorf("%q was taken as %+v", c.line, r)
			}
		}
	}
	for _, line := range []string{"watch a --nonsense", "watch a --rev=x"} {
		w := &watchPrinter{tool: &tool{err: &bytes.Buffer{}, ctx: t.Context()}}
		_, _, err := w.parseLine(t.Context(), nil, line)
		if e, ok := errors.AsType[*exitError](err); !ok || e.code != exitArguments {
			t.Errorf("%q: error %v, want one with exit code %d", line, err, exitArguments)
		}
	}
}
