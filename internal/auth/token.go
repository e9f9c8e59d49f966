package auth

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultTokenTTL is how long an unused simple token lives unless the operator
// says otherwise.
const DefaultTokenTTL = 5 * time.Minute

// maxTokens bounds the simple tokens that a member knows.
const maxTokens = 1 << 16

// touchEvery is how coarsely the use of a token is noted, so that a busy token
// is not written to by every call.
const touchEvery = time.Second

// Tokens are the simple tokens that this member knows. Entries of the log make
// and void them, so every member knows the same ones; but each member ends those
// that were not used there for a while, and a restart or a snapshot forgets all.
// There are at most maxTokens: one too many ends the eighth that was unused for
// longest, whose holders authenticate again. Safe for concurrent use; a look-up
// takes no lock.
type Tokens struct {
	ttl   time.Duration
	now   func() time.Time
	began time.Time
	known sync.Map // token -> *token

	mu     sync.Mutex // held while tokens come and go
	count  int
	most   int
	byUser map[string]map[string]*token
	sweep  time.Duration // since began; when to look for ended ones next
}

type token struct {
	user string
	used atomic.Int64 // last, as a time.Duration since Tokens began
}

// NewTokens returns no tokens. They live for ttl after their last use; 0 means
// DefaultTokenTTL.
func NewTokens(ttl time.Duration, now func() time.Time) *Tokens {
	if ttl <= 0 {
		ttl = DefaultTokenTTL
	}
	return &Tokens{ttl: ttl, now: now, began: now(), most: maxTokens, byUser: map[string]map[string]*token{}}
}

func (t *Tokens) since() time.Duration { return t.now().Sub(t.began) }

// User returns whose token it is, and keeps it alive.
func (t *Tokens) User(name string) (user string, ok bool) {
	v, ok := t.known.Load(name)
	if !ok {
		return "", false
	}
	known, now := v.(*token), t.since()
	switch idle := now - time.Duration(known.used.Load()); {
	case idle >= t.ttl:
		return "", false
	case idle >= min(touchEvery, t.ttl/4):
		known.used.Store(int64(now))
	}
	return known.user, true
}

// Issue makes a token a user's.
func (t *Tokens) Issue(name, user string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.since()
	if now >= t.sweep {
		t.drop(func(known *token) bool { return now-time.Duration(known.used.Load()) >= t.ttl })
		t.sweep = now + t.ttl/4
	}
	if t.count >= t.most {
		t.makeRoom()
	}
	known := &token{user: user}
	known.used.Store(int64(now))
	of := t.byUser[user]
	if of == nil {
		of = map[string]*token{}
		t.byUser[user] = of
	}
	if of[name] == nil {
		t.count++
	}
	of[name] = known
	t.known.Store(name, known)
}

// makeRoom drops the eighth of the tokens that was unused for longest.
func (t *Tokens) makeRoom() {
	used := make([]int64, 0, t.count)
	for _, of := range t.byUser {
		for _, known := range of {
			used = append(used, known.used.Load())
		}
	}
	slices.SortFunc(used, cmp.Compare[int64])
	left := len(used)/8 + 1
	last := used[left-1]
	t.drop(func(known *token) bool {
		if left == 0 || known.used.Load() > last {
			return false
		}
		left--
		return true
	})
}

func (t *Tokens) drop(which func(*token) bool) {
	for user, of := range t.byUser {
		for name, known := range of {
			if which(known) {
				t.known.Delete(name)
				delete(of, name)
				t.count--
			}
		}
		if len(of) == 0 {
			delete(t.byUser, user)
		}
	}
}

// VoidUser ends the tokens of a user.
func (t *Tokens) VoidUser(user string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name := range t.byUser[user] {
		t.known.Delete(name)
		t.count--
	}
	delete(t.byUser, user)
}

// VoidAll ends all tokens.
func (t *Tokens) VoidAll() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known.Clear()
	clear(t.byUser)
	t.count = 0
}

// SimpleToken is the token that the Authenticate entry at index makes of the
// prefix it carries: etcd numbers it by the index applied before.
func SimpleToken(prefix string, index uint64) string {
	return prefix + "." + strconv.FormatUint(index-1, 10)
}

// IssuedAt returns the index of the entry that makes a simple token, false if
// what is given is none.
func IssuedAt(token string) (index uint64, ok bool) {
	_, number, ok := strings.Cut(token, ".")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil || n+1 == 0 {
		return 0, false
	}
	return n + 1, true
}
