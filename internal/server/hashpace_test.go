package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/rpc"
)

// TestPaceHash: who hashes waits until the clock allows for what it has read, and makes up for time in which it read nothing.
func TestPaceHash(t *testing.T) {
	fake := clock.NewFake(time.Unix(1e9, 0))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pace := (&Member{clock: fake}).paceHash(ctx)
	done := make(chan error, 1)
	call := func(bytes int) { go func() { done <- pace(bytes) }() }
	free := func(what string, bytes int) {
		t.Helper()
		call(bytes)
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(what, err)
			}
		case <-waiting(t, fake):
			t.Fatal(what, "waits")
		}
	}
	held := func(what string, bytes int, d time.Duration) {
		t.Helper()
		call(bytes)
		select {
		case err := <-done:
			t.Fatal(what, "does not wait", err)
		case <-waiting(t, fake):
		}
		fake.Advance(d - 1)
		if fake.Alarms() != 1 {
			t.Fatalf("%s waits less than %v", what, d)
		}
		fake.Advance(1)
		if fake.Alarms() != 0 {
			t.Fatalf("%s waits more than %v", what, d)
		}
		if err := <-done; err != nil {
			t.Fatal(what, err)
		}
	}
	fake.Advance(time.Hour) // before the first call, which does not count
	free("nothing read", 0)
	held("a second's worth", hashBytesPerSecond, time.Second)
	fake.Advance(time.Second / 4)
	held("half a second's worth, a quarter late", hashBytesPerSecond/2, time.Second/4)
	fake.Advance(2 * time.Second)
	free("a second's worth after two seconds", hashBytesPerSecond)
	held("two seconds' worth, one of them made up for", 2*hashBytesPerSecond, time.Second)

	call(hashBytesPerSecond)
	<-waiting(t, fake)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("given up while it waited: %v", err)
	}
}

// waiting is closed once somebody waits for the clock.
func waiting(t *testing.T, fake *clock.Fake) <-chan struct{} {
	c := make(chan struct{})
	t.Cleanup(func() { // or the test is over
		fake.NewTimer(time.Hour)
		<-c
	})
	go func() {
		fake.WaitAlarms(1)
		close(c)
	}()
	return c
}

// TestHashesArePaced: what is hashed to be compared beside calls, for this member and for others, takes its time; what a client asks
// for does not.
func TestHashesArePaced(t *testing.T) {
	const values, valueBytes = 48, 64 << 10 // 3 MiB: paced three times
	m := start(t, t.TempDir())
	defer stop(t, m)
	c := client(t, m)
	for i := range values {
		if _, err := c.Put(t.Context(), fmt.Sprint(i), string(bytes.Repeat([]byte{byte(i)}, valueBytes))); err != nil {
			t.Fatal(err)
		}
	}
	least := time.Second * values * valueBytes / hashBytesPerSecond
	want, err := m.HashKV(t.Context(), 0) // by the real clock, so that it ends however it is paced
	if err != nil {
		t.Fatal(err)
	}
	for name, hash := range map[string]func(*Member) (rpc.HashKV, error){
		"for others": func(m *Member) (rpc.HashKV, error) { return m.pacedHashKV(t.Context(), 0) },
		"for itself": func(m *Member) (rpc.HashKV, error) {
			h, ok, err := m.settledHash(t.Context(), 0)
			if !ok && err == nil {
				err = errors.New("there is nothing to compare")
			}
			return rpc.HashKV(h), err
		},
	} {
		t.Run(name, func(t *testing.T) {
			fake := clock.NewFake(time.Unix(1e9, 0))
			slow := &Member{clock: fake, hashingForPeers: make(hashSlots, hashesAtOnce)} // the same store by another clock
			slow.gen.Store(m.gen.Load())
			began, done := fake.Now(), make(chan struct{})
			var got rpc.HashKV
			var err error
			go func() {
				got, err = hash(slow)
				close(done)
			}()
			for running := true; running; {
				select {
				case <-waiting(t, fake):
					for fake.Alarms() > 0 {
						fake.Advance(time.Millisecond)
					}
				case <-done:
					running = false
				}
			}
			if err != nil || got != want {
				t.Fatalf("%+v, %v; not paced it is %+v", got, err, want)
			}
			if took := fake.Now().Sub(began); took < least || took > least+3*time.Millisecond {
				t.Errorf("hashing %d bytes took %v, want %v", values*valueBytes, took, least)
			}
		})
	}
	fake := clock.NewFake(time.Unix(1e9, 0))
	quick := &Member{clock: fake, hashing: make(hashSlots, hashesAtOnce), timed: newStoreMetrics()}
	quick.gen.Store(m.gen.Load())
	done := make(chan error, 1)
	go func() { _, err := quick.HashKV(t.Context(), 0); done <- err }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-waiting(t, fake):
		t.Error("a client's hash waits")
	}
}
