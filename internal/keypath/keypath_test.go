package keypath

import "testing"

func TestCut(t *testing.T) {
	for _, c := range []struct {
		key       string
		prefix    int
		delimiter string
		depth     int
		want      string
		group     bool
	}{
		{"/a/b/c", 0, "/", 1, "/a/", true}, {"/a/b/c", 0, "/", 2, "/a/b/", true}, {"/a/b/c", 0, "/", 3, "/a/b/c", false},
		{"a/b", 0, "/", 1, "a/", true}, {"a", 0, "/", 1, "a", false}, {"", 0, "/", 1, "", false}, {"//", 0, "/", 1, "//", true}, {"/", 0, "/", 1, "/", false},
		{"/a/b/c", 2, "/", 1, "/a/b/", true}, {"/a/b/c", 3, "/", 1, "/a/b/", true}, {"/a/b/c", 6, "/", 1, "/a/b/c", false},
		{"a::b::c", 0, "::", 1, "a::", true}, {"a:b", 0, "::", 1, "a:b", false},
	} {
		if got, group := Cut([]byte(c.key), c.prefix, []byte(c.delimiter), c.depth); string(got) != c.want || group != c.group {
			t.Errorf("%q from %d at depth %d: %q %v, want %q %v", c.key, c.prefix, c.depth, got, group, c.want, c.group)
		}
	}
}

func TestRange(t *testing.T) {
	for _, c := range [][3]string{
		{"", "\x00", "\x00"}, {"a", "a", "b"}, {"a\xff", "a\xff", "b"}, {"\xff\xff", "\xff\xff", "\x00"}, {"a\x00", "a\x00", "a\x01"},
	} {
		if key, end := Range([]byte(c[0])); string(key) != c[1] || string(end) != c[2] {
			t.Errorf("%q: [%q, %q), want [%q, %q)", c[0], key, end, c[1], c[2])
		}
	}
}
