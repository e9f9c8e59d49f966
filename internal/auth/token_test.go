package auth

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

// ticking is a clock that a test turns.
type ticking struct{ now time.Time }

func (c *ticking) Now() time.Time          { return c.now }
func (c *ticking) pass(span time.Duration) { c.now = c.now.Add(span) }

func newTicking() *ticking { return &ticking{time.Unix(1e9, 0)} }

func wantUser(t *testing.T, tokens *Tokens, token, want string) {
	t.Helper()
	if user, ok := tokens.User(token); user != want || ok != (want != "") {
		t.Errorf("token %s is %q's (%v), want %q", token, user, ok, want)
	}
}

// TestTokenLife: a token lives for its time after the last use.
func TestTokenLife(t *testing.T) {
	clock := newTicking()
	tokens := NewTokens(0, clock.Now)
	wantUser(t, tokens, "a.1", "")
	tokens.Issue("a.1", "ann")
	tokens.Issue("b.2", "ann")
	for range 5 {
		clock.pass(DefaultTokenTTL - time.Second)
		wantUser(t, tokens, "a.1", "ann")
	}
	wantUser(t, tokens, "b.2", "")
	clock.pass(DefaultTokenTTL)
	wantUser(t, tokens, "a.1", "")
	if tokens.count != 2 {
		t.Errorf("%d tokens", tokens.count)
	}
	tokens.Issue("c.3", "bob") // sweeps
	if tokens.count != 1 || len(tokens.byUser) != 1 {
		t.Errorf("%d tokens of %d users", tokens.count, len(tokens.byUser))
	}

	tokens = NewTokens(2*time.Second, clock.Now)
	tokens.Issue("a.1", "ann")
	for range 5 {
		clock.pass(1500 * time.Millisecond)
		wantUser(t, tokens, "a.1", "ann")
	}
	clock.pass(2 * time.Second)
	wantUser(t, tokens, "a.1", "")
}

func TestTokenVoid(t *testing.T) {
	tokens := NewTokens(0, newTicking().Now)
	for i, user := range []string{"ann", "bob", "ann"} {
		tokens.Issue(fmt.Sprintf("t.%d", i), user)
	}
	tokens.VoidUser("ann")
	tokens.VoidUser("nobody")
	wantUser(t, tokens, "t.0", "")
	wantUser(t, tokens, "t.1", "bob")
	wantUser(t, tokens, "t.2", "")
	tokens.VoidAll()
	wantUser(t, tokens, "t.1", "")
	if tokens.count != 0 || len(tokens.byUser) != 0 {
		t.Errorf("%d tokens of %d users", tokens.count, len(tokens.byUser))
	}
}

// TestTokenBound: those unused for longest make room.
func TestTokenBound(t *testing.T) {
	clock := newTicking()
	tokens := NewTokens(time.Hour, clock.Now)
	tokens.most = 16
	name := func(i int) string { return fmt.Sprintf("t.%d", i) }
	for i := range 16 {
		tokens.Issue(name(i), fmt.Sprint("user", i%3))
		clock.pass(time.Minute)
	}
	wantUser(t, tokens, name(0), "user0")
	tokens.Issue(name(16), "user1")
	for i := range 17 {
		want := fmt.Sprint("user", i%3)
		switch {
		case i == 1, i == 2, i == 3:
			want = ""
		case i == 16:
			want = "user1"
		}
		wantUser(t, tokens, name(i), want)
	}
	for i := range 100 { // all at one time
		tokens.Issue(fmt.Sprintf("more.%d", i), "ann")
		if tokens.count > 16 {
			t.Fatalf("%d tokens", tokens.count)
		}
	}
	wantUser(t, tokens, "more.99", "ann")
	if n := 0; tokens.count != func() int { tokens.known.Range(func(any, any) bool { n++; return true }); return n }() {
		t.Errorf("%d tokens, %d known", tokens.count, n)
	}
}

func TestTokensConcurrently(t *testing.T) {
	tokens := NewTokens(0, time.Now)
	var group sync.WaitGroup
	for g := range 4 {
		group.Go(func() {
			for i := range 1000 {
				if name := fmt.Sprintf("t.%d", i); g == 0 {
					tokens.Issue(name, "ann")
					if i%100 == 99 {
						tokens.VoidUser("ann")
					}
				} else if user, ok := tokens.User(name); ok && user != "ann" {
					t.Errorf("token of %q", user)
				}
			}
		})
	}
	group.Wait()
}

func TestIssuedAt(t *testing.T) {
	if index, ok := IssuedAt(SimpleToken("abc", 7)); index != 7 || !ok {
		t.Errorf("index %d, %v", index, ok)
	}
	for _, token := range []string{"", "abc", "abc.", "abc.x", "abc.1.2", "abc.-1", "abc.18446744073709551615", "abc.99999999999999999999"} {
		if index, ok := IssuedAt(token); ok {
			t.Errorf("%q is of entry %d", token, index)
		}
	}
}

func BenchmarkTokenUser(b *testing.B) {
	tokens := NewTokens(0, time.Now)
	tokens.Issue("abcdefghijklmnop.1", "ann")
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, ok := tokens.User("abcdefghijklmnop.1"); !ok {
				b.Error("unknown")
			}
		}
	})
}
