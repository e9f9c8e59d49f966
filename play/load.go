package play

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	loadRate    = 20 // writes a second, if no other is given
	maxLoadRate = 1000
	loadKeys    = 100 // keys that are written in turn
	loadWithin  = time.Second
	loadSpan    = 5 // seconds that the shown rate is the mean of
)

// load is steady small writes, one after the other, so that what happens to the cluster shows in their rate.
type load struct {
	cluster *cluster

	cancel context.CancelFunc // nil: it is off; used by commands alone
	done   chan struct{}

	mu           sync.Mutex // covers all below
	on           bool
	rate         int
	began        time.Time
	good, failed int
	recent       [loadSpan + 1]struct{ second, good int } // by second since began
	lastErr      string
	longest      time.Duration
}

func (p *player) setLoad(ctx context.Context, args []string) error {
	words := strings.Fields(args[0])
	switch {
	case len(words) == 1 && words[0] == "off":
		if p.load.words() == "" {
			return errors.New("the load is off already")
		}
		p.load.stop()
		p.say("%s", p.load.summary())
		return nil
	case len(words) == 1 && words[0] == "on":
		words = append(words, strconv.Itoa(loadRate))
	case len(words) != 2 || words[0] != "on":
		return errors.New("load is to be typed as: load on [writes a second], or load off")
	}
	rate, err := strconv.Atoi(words[1])
	if err != nil || rate < 1 || rate > maxLoadRate {
		return fmt.Errorf("load on %s: give a number of writes a second from 1 to %d", words[1], maxLoadRate)
	}
	p.load.stop()
	p.load.start(ctx, rate)
	p.say("Writing %d small values a second, one after the other; status shows how it goes.", rate)
	return nil
}

func (l *load) start(ctx context.Context, rate int) {
	ctx, l.cancel = context.WithCancel(ctx)
	l.done = make(chan struct{})
	l.mu.Lock()
	l.on, l.rate, l.began, l.good, l.failed, l.lastErr, l.longest = true, rate, time.Now(), 0, 0, "", 0
	l.recent = [loadSpan + 1]struct{ second, good int }{}
	l.mu.Unlock()
	go func() {
		defer close(l.done)
		l.run(ctx, rate)
	}()
}

func (l *load) stop() {
	if l.cancel == nil {
		return
	}
	l.cancel()
	<-l.done
	l.cancel = nil
	l.mu.Lock()
	l.on = false
	l.mu.Unlock()
}

func (l *load) run(ctx context.Context, rate int) {
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	var client *clientv3.Client
	var endpoints []string
	closeClient := func() {
		if client != nil {
			_ = client.Close()
		}
	}
	defer func() { closeClient() }()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := l.cluster.clientEndpoints(); !slices.Equal(now, endpoints) {
			closeClient()
			client, endpoints = nil, now
		}
		if len(endpoints) == 0 {
			l.note(0, errors.New("no member runs"))
			continue
		}
		var err error
		if client == nil {
			if client, err = newClient(endpoints...); err != nil {
				l.note(0, err)
				continue
			}
		}
		began := time.Now()
		callCtx, cancel := context.WithTimeout(ctx, loadWithin)
		_, err = client.Put(callCtx, fmt.Sprintf("load/%02d", i%loadKeys), strconv.Itoa(i))
		cancel()
		if ctx.Err() == nil {
			l.note(time.Since(began), err)
		}
	}
}

// note counts a write.
func (l *load) note(took time.Duration, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.failed++
		l.lastErr = plainError(err)
		return
	}
	l.good++
	l.longest = max(l.longest, took)
	second := int(time.Since(l.began) / time.Second)
	slot := &l.recent[second%len(l.recent)]
	if slot.second != second {
		slot.second, slot.good = second, 0
	}
	slot.good++
}

// words say how the load goes, "" if it is off.
func (l *load) words() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.on {
		return ""
	}
	elapsed := time.Since(l.began)
	now, good := int(elapsed/time.Second), 0
	span := min(now, loadSpan) // whole seconds before this one
	for _, s := range l.recent {
		if s.second < now && s.second >= now-span {
			good += s.good
		}
	}
	rate := "just begun"
	if span > 0 {
		rate = fmt.Sprintf("%.1f/s done", float64(good)/float64(span))
	}
	return fmt.Sprintf("load: %d writes/s wanted, %s; %s", l.rate, rate, l.totals())
}

// totals are what came of all writes. l.mu is held.
func (l *load) totals() string {
	text := fmt.Sprintf("%d written", l.good)
	if l.good > 0 {
		text += fmt.Sprintf(", the slowest in %s", millis(l.longest))
	}
	text += fmt.Sprintf("; %d failed", l.failed)
	if l.lastErr != "" {
		text += fmt.Sprintf(", the last one with %q", l.lastErr)
	}
	return text
}

func (l *load) summary() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return "The load is off: " + l.totals() + "."
}
