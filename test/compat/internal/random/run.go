package random

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/script"
	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/broken"
)

const (
	callWithin  = 20 * time.Second
	readsAtOnce = 6 // most reads between two writes
	maxWatches  = 6 // watch streams open at a time
)

// Options say what to run.
type Options struct {
	Seed       uint64
	Operations int
	Restarts   int // spread over the run; every other one with SIGKILL
	Methods    map[string]wire.Method
	Log        func(format string, args ...any)
}

// Run makes operations from the seed, sends them to both servers and compares all answers. The pair must be fresh. The
// error is a *Difference if the servers differ.
func Run(pair *process.Pair, o Options) (*Coverage, error) {
	d := &driver{
		Options: o, pair: pair, generator: NewGenerator(o.Seed), coverage: NewCoverage(),
		rand: rand.New(rand.NewPCG(o.Seed, 1)),
	}
	defer d.closeWatches()
	err := d.run()
	o.Log("%d operations, %d writes; %d events on %d watch streams; %d hashes of nothing left uncompared",
		d.number, d.writes, d.events, d.streams, d.hashesOfNothing)
	return d.coverage, err
}

// Difference is two servers answering one request differently.
type Difference struct {
	Seed                        uint64
	Operation                   Operation
	Reference, Subject, History string

	writes []Operation // all that succeeded before it
}

func (d *Difference) Error() string {
	what := broken.Mark + " the answers differ"
	if passing(d.Reference) || passing(d.Subject) {
		what = "a server gives no answer"
	}
	return fmt.Sprintf("seed %d, operation %d: %s\n  request:   %s %s\n  reference: %s\n  subject:   %s\n%s",
		d.Seed, d.Operation.Number, what, d.Operation.Method, requestText(d.Operation.Request), d.Reference, d.Subject, d.History)
}

type driver struct {
	Options
	pair      *process.Pair
	generator *Generator
	coverage  *Coverage
	rand      *rand.Rand // decides what is not an operation: when to compact, to watch, to restart

	number, writes, events, streams, hashesOfNothing int

	watches []*watchPair
	history []Operation // every write that succeeded, for the report of a difference
}

func (d *driver) run() error {
	restartEvery := d.Operations / (d.Restarts + 1)
	nextRestart, restarts := restartEvery, 0
	progress := time.Now()
	for d.number < d.Operations {
		var err error
		switch n := d.rand.IntN(1000); {
		case d.number >= nextRestart && restarts < d.Restarts:
			restarts++
			nextRestart += restartEvery
			err = d.restart(restarts%2 == 0)
		case n < 4:
			err = d.compact()
		case n < 6:
			err = d.checkpoint()
		case n < 11:
			err = d.changeWatches()
		default:
			err = d.round()
		}
		if err != nil {
			return err
		}
		if time.Since(progress) > 20*time.Second {
			progress = time.Now()
			d.Log("operation %d, revision %d, compacted at %d", d.number, d.generator.State.Revision, d.generator.State.Compact)
		}
	}
	return d.checkpoint()
}

// round sends some reads at once, then one write.
func (d *driver) round() error {
	var reads []Operation
	for range d.rand.IntN(readsAtOnce + 1) {
		reads = append(reads, d.operation(d.generator.Read()))
	}
	if err := d.reads(reads); err != nil {
		return err
	}
	return d.write(d.operation(d.generator.Write()))
}

func (d *driver) operation(method string, request proto.Message) Operation {
	d.number++
	return Operation{Number: d.number, Method: method, Request: request}
}

func (d *driver) reads(ops []Operation) error {
	errs := make([]error, len(ops))
	var wg sync.WaitGroup
	results := make([][2]result, len(ops))
	for i, op := range ops {
		for side := range d.pair {
			wg.Go(func() { results[i][side] = d.send(side, op) })
		}
	}
	wg.Wait()
	for i, op := range ops {
		errs[i] = d.compare(op, results[i])
	}
	return errors.Join(errs...)
}

func (d *driver) write(op Operation) error {
	var results [2]result
	d.pair.Each(func(i int, _ *process.Side) error {
		results[i] = d.send(i, op)
		return nil
	})
	d.writes++
	if err := d.compare(op, results); err != nil {
		return err
	}
	d.learn(op, results[0])
	return nil
}

// learn takes from the reference's answer what later operations need to know.
func (d *driver) learn(op Operation, r result) {
	if r.failure == "" {
		d.generator.State.learn(op, r.answer)
		d.history = append(d.history, op)
	}
}

func (s *State) learn(op Operation, answer proto.Message) {
	if h, ok := answer.(interface {
		GetHeader() *etcdserverpb.ResponseHeader
	}); ok {
		s.Revision = max(s.Revision, h.GetHeader().GetRevision())
	}
	switch q := op.Request.(type) {
	case *etcdserverpb.CompactionRequest:
		s.Compact, s.HashOpen = q.Revision, false
	case *etcdserverpb.LeaseGrantRequest:
		s.Leases[q.ID] = true
	case *etcdserverpb.LeaseRevokeRequest:
		delete(s.Leases, q.ID)
	}
}

type result struct {
	answer  proto.Message
	failure string // code and text
	fault   string // what is wrong with the answer by itself
}

func (r result) equal(o result) bool {
	return r.failure == o.failure && r.fault == "" && o.fault == "" &&
		(r.failure != "" || proto.Equal(r.answer, o.answer))
}

func (r result) text(names *wire.Names) string {
	switch {
	case r.failure != "":
		return r.failure
	case r.fault != "":
		return r.fault + " in " + names.Text(r.answer)
	}
	return names.Text(r.answer)
}

func (d *driver) send(side int, op Operation) result {
	s := d.pair[side]
	return send(d.Methods, s.Conn(), s.Names, op)
}

func send(methods map[string]wire.Method, conn *grpc.ClientConn, names *wire.Names, op Operation) result {
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	answers, err := methods[op.Method].Call(ctx, conn, op.Request)
	if err != nil {
		st := status.Convert(err)
		return result{failure: st.Code().String() + ": " + st.Message()}
	}
	var r result
	if op.Method == "RangeStream" {
		r.fault = chunksFault(answers)
		r.answer = script.Merge(answers)
	} else {
		r.answer = answers[0]
	}
	if fault := normalize(names, op.Request, r.answer); fault != "" {
		r.fault = fault
	}
	return r
}

// chunksFault tells if anything but keys came before the last chunk.
func chunksFault(answers []proto.Message) string {
	if len(answers) == 0 {
		return "no chunk"
	}
	for _, a := range answers[:len(answers)-1] {
		if r := a.(*etcdserverpb.RangeStreamResponse).GetRangeResponse(); r.GetHeader() != nil || r.GetMore() || r.GetCount() != 0 {
			return "header, more or count before the last chunk"
		}
	}
	return ""
}

func (d *driver) compare(op Operation, r [2]result) error {
	d.coverage.Add(op.Method, op.Request, outcome(r[0]), d.generator.State)
	if r[0].equal(r[1]) {
		return nil
	}
	if hash, ok := op.Request.(*etcdserverpb.HashKVRequest); ok && d.nothingAt(hash.Revision) {
		d.hashesOfNothing++ // the hash of an empty keep set depends on how far the compaction has come
		return nil
	}
	return &Difference{
		Seed: d.Seed, Operation: op, Reference: r[0].text(d.pair[0].Names), Subject: r[1].text(d.pair[1].Names),
		History: d.relevant(op), writes: d.history,
	}
}

func (d *driver) nothingAt(revision int64) bool {
	r := d.send(0, Operation{Method: "Range", Request: &etcdserverpb.RangeRequest{
		Key: []byte{0}, RangeEnd: []byte{0}, Revision: revision, CountOnly: true}})
	answer, ok := r.answer.(*etcdserverpb.RangeResponse)
	return ok && answer.Count == 0
}

// compact brings the watchers up to date, compacts, and waits until the compaction has ended, so that what depends on
// how far it has come is the same on both servers.
func (d *driver) compact() error {
	if err := d.catchUp(); err != nil {
		return err
	}
	request := d.generator.Compaction()
	if d.generator.State.Compact < 0 {
		request.Revision = max(request.Revision, 1) // a compaction at 0 changes what HashKV(0) means, see the script
	}
	if err := d.write(d.operation("Compact", request)); err != nil {
		return err
	}
	return d.settle()
}

// settle waits for the last compaction: a physical one at the same revision is refused, but only when that has ended.
func (d *driver) settle() error {
	if d.generator.State.Compact < 0 {
		return nil
	}
	return d.write(d.operation("Compact", &etcdserverpb.CompactionRequest{Revision: d.generator.State.Compact, Physical: true}))
}

// checkpoint compares all that is there: events, keys, and hashes at several revisions.
func (d *driver) checkpoint() error {
	if err := d.catchUp(); err != nil {
		return err
	}
	s := d.generator.State
	all := []byte{0}
	ops := []Operation{
		d.operation("Range", &etcdserverpb.RangeRequest{Key: all, RangeEnd: all}),
		d.operation("RangeStream", &etcdserverpb.RangeRequest{Key: all, RangeEnd: all}),
		d.operation("HashKV", &etcdserverpb.HashKVRequest{}),
		d.operation("HashKV", &etcdserverpb.HashKVRequest{Revision: s.Revision}),
	}
	if s.Compact > 0 {
		middle := s.Compact + (s.Revision-s.Compact)/2
		ops = append(ops,
			d.operation("Range", &etcdserverpb.RangeRequest{Key: all, RangeEnd: all, Revision: s.Compact}),
			d.operation("Range", &etcdserverpb.RangeRequest{Key: all, RangeEnd: all, Revision: middle}),
			d.operation("HashKV", &etcdserverpb.HashKVRequest{Revision: max(middle, s.Compact+1)}))
		if !s.HashOpen {
			ops = append(ops, d.operation("HashKV", &etcdserverpb.HashKVRequest{Revision: s.Compact}))
		}
	}
	return d.reads(ops)
}

func (d *driver) restart(kill bool) error {
	if err := d.checkpoint(); err != nil {
		return err
	}
	d.closeWatches()
	if err := d.pair.Restart(kill); err != nil {
		return err
	}
	d.generator.State.HashOpen = kill
	d.Log("restarted at operation %d, killed: %t", d.number, kill)
	if err := d.settle(); err != nil {
		return err
	}
	return d.checkpoint()
}

// relevant prints the last writes that touch the keys of op, in the form of a script.
func (d *driver) relevant(op Operation) string {
	const most = 12
	var lines []string
	for i := len(d.history) - 1; i >= 0 && len(lines) < most; i-- {
		if h := d.history[i]; overlap(op.Request, h.Request) {
			lines = append(lines, h.Method+" "+requestText(h.Request))
		}
	}
	var b strings.Builder
	b.WriteString("the last writes to its keys, latest first:\n")
	for _, l := range lines {
		b.WriteString("  " + l + "\n")
	}
	return b.String()
}
