package grpcserver

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// testOutboxes makes outboxes that share a budget and a clock that is turned by hand.
type testOutboxes struct {
	budget *outboxBudget
	now    time.Time
	cut    []*outbox
	wakes  map[*outbox]bool
	alarms []time.Duration
}

func newTestOutboxes(limit int) *testOutboxes {
	o := &testOutboxes{now: time.Unix(1000, 0), wakes: map[*outbox]bool{}}
	o.budget = newOutboxBudget(limit, 10*time.Second, func() time.Time { return o.now }, func(d time.Duration) { o.alarms = append(o.alarms, d) })
	return o
}

func (o *testOutboxes) open(messages, bytes int) *outbox {
	var box *outbox
	box = newOutbox(messages, bytes, o.budget, func() { o.wakes[box] = true }, func() { o.cut = append(o.cut, box) })
	return box
}

func sized(n int) []Message { return []Message{{Head: make([]byte, n)}} }

// woken says whether the connection was told of a stream since the last time.
func (o *testOutboxes) woken(box *outbox) bool {
	defer delete(o.wakes, box)
	return o.wakes[box]
}

func (o *outbox) writeOne(t *testing.T) {
	t.Helper()
	if _, ok := o.take(); !ok {
		t.Fatal("there is nothing to write")
	}
	o.wrote(o.shared.now())
}

func TestOutboxOwnBounds(t *testing.T) {
	all := newTestOutboxes(1000)
	box := all.open(4, 100)
	if !box.Send(sized(500)) {
		t.Fatal("an empty outbox refused a message")
	}
	if !all.woken(box) {
		t.Fatal("the writer was not woken")
	}
	if box.Send(sized(1)) {
		t.Fatal("took a message beyond its bytes")
	}
	if box.owesReady() {
		t.Fatal("announced room while it is full")
	}
	box.writeOne(t)
	if !box.owesReady() || box.owesReady() {
		t.Fatal("room must be announced once")
	}
	for i := range 4 {
		if !box.Send(sized(1)) {
			t.Fatalf("refused message %d", i)
		}
	}
	if box.Send(sized(1)) {
		t.Fatal("took a fifth message")
	}
	box.writeOne(t)
	if box.owesReady() {
		t.Fatal("announced room for one message")
	}
	if box.Send(append(sized(1), sized(1)...)) {
		t.Fatal("took two messages into one place")
	}
	box.writeOne(t)
	if !box.owesReady() {
		t.Fatal("did not announce room")
	}
	box.close()
	if box.Send(sized(1)) || box.wantsRequest() {
		t.Fatal("a closed outbox works")
	}
	if used := box.shared.used; used != 0 {
		t.Fatalf("%d bytes are still taken", used)
	}
}

// Room that is too little for what was refused is not announced: that would be
// refused again, at once and for as long as nothing is written.
func TestOutboxAnnouncesEnough(t *testing.T) {
	for _, refused := range [][]Message{sized(61), slices.Concat(sized(1), sized(1), sized(1))} {
		box := newTestOutboxes(1000).open(4, 100)
		if first, second := box.Send(sized(20)), box.Send(sized(20)); !first || !second || box.Send(refused) {
			t.Fatal("40 bytes in two messages should fit, and no more of them than the bounds")
		}
		if box.owesReady() {
			t.Fatal("announced room that is too little")
		}
		box.writeOne(t)
		if !box.owesReady() || !box.Send(refused) {
			t.Fatal("there is room, and nobody is told")
		}
	}
}

func TestOutboxShared(t *testing.T) {
	all := newTestOutboxes(1000)
	a, b, c := all.open(100, 1000), all.open(100, 1000), all.open(100, 1000)
	if !a.Send(sized(400)) || a.Send(sized(400)) {
		t.Fatal("a may not have more than what is left to others")
	}
	if a.owesReady() {
		t.Fatal("announced to a what it may not have")
	}
	if !b.Send(sized(700)) {
		t.Fatal("b has nothing and may have a message of any size")
	}
	if c.Send(sized(1)) {
		t.Fatal("took more than all")
	}
	// Both a and c wait; c's turn comes although it then wants nothing.
	all.woken(a)
	all.woken(b)
	b.writeOne(t)
	if !all.woken(c) || !c.owesReady() {
		t.Fatal("c was not told")
	}
	c.idle()
	a.writeOne(t)
	if !a.owesReady() {
		t.Fatal("a was not told")
	}
	if used := all.budget.used; used != 0 || len(all.budget.holders) != 0 {
		t.Fatalf("%d bytes of %d outboxes are still taken", used, len(all.budget.holders))
	}
}

func TestOutboxTurnsArePassedOn(t *testing.T) {
	all := newTestOutboxes(100)
	hog := all.open(10, 100)
	hog.Send(sized(100))
	var boxes []*outbox
	for range 50 {
		box := all.open(10, 100)
		if box.Send(sized(1)) {
			t.Fatal("took more than all")
		}
		boxes = append(boxes, box)
	}
	boxes[3].close()
	hog.writeOne(t)
	// Each writer that is woken does what a connection does.
	told := 0
	for again := true; again; {
		again = false
		for _, box := range boxes {
			if all.woken(box) {
				again = true
				if box.owesReady() {
					told++
				}
				box.idle()
			}
		}
	}
	if told != len(boxes)-1 {
		t.Fatalf("%d of %d were told of room", told, len(boxes)-1)
	}
}

func TestOutboxCutsStalledOnes(t *testing.T) {
	all := newTestOutboxes(100)
	stalled, reading, waiting := all.open(10, 100), all.open(10, 100), all.open(10, 100)
	stalled.Send(sized(60))
	if stalled.Send(sized(60)) || stalled.owesReady() {
		t.Fatal("took more than what is left to others, or announced it")
	}
	reading.Send(sized(50))
	all.now = all.now.Add(6 * time.Second)
	reading.writeOne(t)
	reading.Send(sized(50))
	all.now = all.now.Add(6 * time.Second)
	if waiting.Send(sized(1)) {
		t.Fatal("took more than all")
	}
	if !slices.Equal(all.cut, []*outbox{stalled}) {
		t.Fatalf("cut %d outboxes, want the one that was not read", len(all.cut))
	}
	stalled.close()
	if !all.woken(waiting) || !waiting.owesReady() || !waiting.Send(sized(1)) {
		t.Fatal("its bytes did not come to the one that waits")
	}
}

// TestOutboxModel compares an outbox with a plain list, and the budget with a sum.
func TestOutboxModel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	all := newTestOutboxes(2000)
	boxes := make([]*outbox, 4)
	lists := make([][][]byte, 4)
	for i := range boxes {
		boxes[i] = all.open(8, 600)
	}
	refusals := 0
	for range 20000 {
		i := r.IntN(4)
		box := boxes[i]
		switch r.IntN(3) {
		case 0:
			var ms []Message
			for range 1 + r.IntN(2) {
				m := Message{Head: bytes.Repeat([]byte{byte(r.Int())}, 1+r.IntN(300)), Rest: [][]byte{{1}, {2, 3}}}
				ms = append(ms, m)
			}
			if box.Send(ms) {
				for _, m := range ms {
					lists[i] = append(lists[i], join(m))
				}
			} else {
				refusals++
			}
		default:
			box.owesReady()
			m, ok := box.take()
			if ok != (len(lists[i]) > 0) {
				t.Fatalf("a message is there: %v, expected %d", ok, len(lists[i]))
			}
			if !ok {
				box.idle()
				break
			}
			if !bytes.Equal(join(m), lists[i][0]) {
				t.Fatal("messages are out of order")
			}
			lists[i] = lists[i][1:]
			box.wrote(all.now)
		}
		sum := 0
		for i := range lists {
			own := 0
			for _, m := range lists[i] {
				own += len(m)
			}
			if own > 600 && len(lists[i]) > 2 || len(lists[i]) > 8 {
				t.Fatalf("an outbox holds %d messages of %d bytes", len(lists[i]), own)
			}
			sum += own
		}
		if all.budget.used != sum {
			t.Fatalf("%d bytes are taken, %d are held", all.budget.used, sum)
		}
	}
	if refusals < 100 {
		t.Fatalf("only %d messages were refused", refusals)
	}
}

// TestOutboxNobodyWaitsForEver has receivers send what they have, each till it is
// refused and again when it is told of room, over connections that are slow. All is
// written in the end, and who is told of room has it.
func TestOutboxNobodyWaitsForEver(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 2))
		all := newTestOutboxes(1000)
		var boxes []*outbox
		rest := map[*outbox][][]Message{} // what the receivers have to send
		writing := map[*outbox]int{}
		send := func(box *outbox) {
			for len(rest[box]) > 0 && box.Send(rest[box][0]) {
				rest[box] = rest[box][1:]
			}
		}
		for range 2 + r.IntN(6) {
			box := all.open(1+r.IntN(8), 600)
			boxes = append(boxes, box)
			for range r.IntN(40) {
				var ms []Message
				for range 1 + r.IntN(4) {
					ms = append(ms, sized(1+r.IntN(400))...)
				}
				rest[box] = append(rest[box], ms)
			}
			send(box)
		}
		for len(all.wakes) > 0 || len(writing) > 0 {
			for _, i := range r.Perm(len(boxes)) {
				box := boxes[i]
				if all.woken(box) {
					if box.owesReady() {
						had := len(rest[box])
						if send(box); len(rest[box]) == had && had > 0 {
							t.Fatalf("seed %d: was told of room for what is refused again", seed)
						}
						box.told()
					}
					for _, more := box.take(); more; _, more = box.take() {
						writing[box]++
					}
					box.idle()
				}
				if writing[box] > 0 && r.IntN(3) == 0 {
					if writing[box]--; writing[box] == 0 {
						delete(writing, box)
					}
					if box.wrote(all.now) {
						all.wakes[box] = true
					}
				}
			}
		}
		for _, box := range boxes {
			if len(rest[box]) > 0 {
				t.Fatalf("seed %d: a receiver with %d to send is not told of room", seed, len(rest[box]))
			}
		}
		if all.budget.used != 0 || len(all.cut) != 0 {
			t.Fatalf("seed %d: %d bytes are taken, %d outboxes were cut", seed, all.budget.used, len(all.cut))
		}
	}
}

// A client that sends requests faster than it reads the answers is made to
// wait. It is not given the time between the sign of room and the moment at which
// the receiver has sent what had waited: its stream would end for congestion.
func TestOutboxHoldsRequestsTillTheReceiverIsReady(t *testing.T) {
	all := newTestOutboxes(1000)
	box := all.open(2, 100)
	sent := 0
	for box.Send(sized(1)) {
		sent++
	}
	if sent != 2 {
		t.Fatalf("%d messages fit, not 2", sent)
	}
	box.expect(t, false)
	box.writeOne(t)
	if !box.owesReady() {
		t.Fatal("there is room, and nobody is to be told")
	}
	box.expect(t, false)
	if !box.Send(sized(1)) || box.Send(sized(1)) {
		t.Fatal("one message, and not two, should fit")
	}
	box.told()
	box.expect(t, false) // what had waited did not all fit
	box.writeOne(t)
	if !box.owesReady() {
		t.Fatal("there is room, and nobody is to be told")
	}
	all.woken(box)
	box.told()
	box.expect(t, true)
	if !all.woken(box) {
		t.Fatal("nobody was told that requests may go on")
	}
}

// expect says whether the next request may be given to the receiver.
func (o *outbox) expect(t *testing.T, may bool) {
	t.Helper()
	if o.wantsRequest() != may {
		t.Fatalf("a request may be given to the receiver: %v", !may)
	}
}

// Who waits for the bytes of others looks again and again, lest they never move.
func TestOutboxLooksAgain(t *testing.T) {
	all := newTestOutboxes(100)
	stalled, waiting := all.open(10, 100), all.open(10, 100)
	stalled.Send(sized(100))
	if waiting.Send(sized(1)) {
		t.Fatal("took more than all")
	}
	for range 3 {
		if len(all.alarms) != 1 || all.alarms[0] != 5*time.Second {
			t.Fatalf("alarms %v", all.alarms)
		}
		if len(all.cut) > 0 {
			t.Fatal("cut too early")
		}
		all.alarms = nil
		all.now = all.now.Add(5 * time.Second)
		all.budget.again()
	}
	if len(all.cut) != 1 || all.cut[0] != stalled {
		t.Fatal("the stream that was not read was not cut")
	}
	stalled.close()
	all.alarms = nil
	all.budget.again()
	if len(all.alarms) != 0 {
		t.Fatal("looks again although nobody waits")
	}
}
