package watch

import (
	"bytes"
	"slices"
	"testing"
)

// FuzzMatcher reads its input as additions, removals and questions, with keys
// of arbitrary bytes, and compares the matcher with a plain list. A step is an
// operation byte, two lengths, and that many bytes of key and end.
func FuzzMatcher(f *testing.F) {
	f.Add([]byte("\x00\x01\x00a\x02\x01\x00a"))
	f.Add([]byte("\x00\x01\x01ac\x00\x01\x01a\x00\x01\x00\x00\x02\x01\x00b"))
	f.Add([]byte("\x00\x00\x01\x00\x00\x02\x02\xff\xff\xff\x00\x01\x00\x00\x02\x01\x00\xff"))
	f.Fuzz(func(t *testing.T, in []byte) {
		m := newMatcher(live)
		var all []*watcher
		take := func(n int) []byte {
			n = min(n, len(in))
			out := in[:n:n]
			in = in[n:]
			return out
		}
		for len(in) >= 3 {
			head := take(3)
			key, end := take(int(head[1])%8), take(int(head[2])%8)
			switch head[0] % 3 {
			case 0:
				if s, ok := newSpan(key, end); ok {
					w := &watcher{span: s, filter: filter{prevKV: head[0]&128 != 0}}
					m.add(w)
					all = append(all, w)
				}
			case 1:
				if len(all) > 0 {
					at := int(head[1]) % len(all)
					m.remove(all[at])
					all = slices.Delete(all, at, at+1)
				}
			case 2:
				var got, want []*watcher
				m.each(key, func(g *group) { got = append(got, g.members...) })
				for _, w := range all {
					if covers(w.span, key) {
						want = append(want, w)
					}
				}
				if len(got) != len(want) || slices.ContainsFunc(want, func(w *watcher) bool { return !slices.Contains(got, w) }) {
					t.Fatalf("%d watchers match %q, want %d", len(got), key, len(want))
				}
			}
			m.check()
		}
	})
}

// covers says whether a range holds a key, by its definition.
func covers(s span, key []byte) bool {
	if s.single {
		return bytes.Equal(s.key, key)
	}
	return bytes.Compare(s.key, key) <= 0 && (s.end == nil || bytes.Compare(key, s.end) < 0)
}
