package edge

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// verdict keeps what a judge says instead of failing the test.
type verdict struct {
	testing.TB
	said []string
}

func (v *verdict) Errorf(format string, args ...any) {
	v.said = append(v.said, fmt.Sprintf(format, args...))
}

// TestJudge shows that a judge sees what a good client is not to bear, whenever it comes.
func TestJudge(t *testing.T) {
	b := begin(t)
	patience := b.worst
	attacked := func(during func(), want ...string) {
		t.Helper()
		var v verdict
		v.TB = t
		w := b.watch(t)
		during()
		w.judge(&v, 0, "", func(time.Duration) {})
		if len(v.said) != len(want) {
			t.Errorf("it says %q, want %q", v.said, want)
			return
		}
		for i, part := range want {
			if !strings.Contains(v.said[i], part) {
				t.Errorf("it says %q, want %q", v.said, want)
			}
		}
	}
	const a = time.Second // the measures are times
	stop := func() {
		check(t, b.Pause())
		<-time.After(a)
		check(t, b.Continue())
	}
	attacked(func() { <-time.After(a) })

	b.worst = a / 2
	attacked(stop, "waited too long") // it ends with the attack, and calls are under way
	b.worst = patience

	attacked(func() { // no call is made, so none fails or is late
		b.good.mu.Lock()
		b.good.silent = true
		b.good.mu.Unlock()
		<-time.After(a)
		b.good.mu.Lock()
		b.good.silent = false
		b.good.mu.Unlock()
	}, "are its due")

	// Between two attacks.
	b.worst = a / 2
	stop()
	var v verdict
	v.TB = t
	b.watch(&v)
	b.worst = patience
	if len(v.said) != 1 || !strings.Contains(v.said[0], "before this attack the good client waited too long") {
		t.Errorf("it says %q of what was before the attack", v.said)
	}
}
