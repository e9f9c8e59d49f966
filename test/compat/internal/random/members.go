package random

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/broken"
)

// Seat is one member of a cluster.
type Seat struct {
	Name  string
	Conn  *grpc.ClientConn
	Names *wire.Names
}

// MembersOptions say what to run on the members of one cluster.
type MembersOptions struct {
	Seed       uint64
	Operations int
	Methods    map[string]wire.Method
	Seats      func() ([]Seat, error)
	Every      int          // operations between two calls of Between
	Between    func() error // may change the cluster, and leaves it serving
	// Older says that some members are of etcd 3.6, which has no RangeStream and tells leases where only keys are asked for,
	// and which does not agree with itself on transactions that write and read at a revision that is not there.
	Older bool
}

// RunMembers makes operations from a seed and sends each write to one member of a fresh cluster and each read to all, which
// must give equal answers.
func RunMembers(o MembersOptions) error {
	g := NewGenerator(o.Seed)
	choice := rand.New(rand.NewPCG(o.Seed, 2))
	seats, err := o.Seats()
	if err != nil {
		return err
	}
	next := o.Every
	for n := 0; n < o.Operations; {
		if n >= next {
			next += o.Every
			if err := o.Between(); err != nil {
				return err
			}
			if seats, err = o.Seats(); err != nil {
				return err
			}
			if err := askSettled(o, seats, n, g.State); err != nil {
				return err
			}
		}
		for range choice.IntN(3) {
			n++
			method, request := g.Read()
			if !alike(method, request) || method == "RangeStream" && o.Older {
				continue
			}
			for _, r := range ranges(request) {
				r.Serializable, r.KeysOnly = false, r.KeysOnly && !o.Older
			}
			if err := ask(o, seats, Operation{n, method, request}); err != nil {
				return err
			}
		}
		n++
		method, request := g.Write()
		if choice.IntN(100) == 0 {
			method, request = "Compact", g.Compaction()
		}
		op := Operation{n, method, request}
		if o.Older {
			for _, r := range ranges(request) {
				r.Revision = 0
			}
		}
		seat := seats[choice.IntN(len(seats))]
		r := send(o.Methods, seat.Conn, seat.Names, op)
		switch {
		case r.fault != "" || passing(r.failure):
			return fmt.Errorf("seed %d, operation %d at %s: %s %s: %s%s", o.Seed, n, seat.Name, method, requestText(request), r.failure, r.fault)
		case r.failure == "":
			g.State.learn(op, r.answer)
		}
	}
	return o.Between()
}

// askSettled asks all members, once they have applied all there is, for what each answers from its own tables.
func askSettled(o MembersOptions, seats []Seat, n int, s State) error {
	all := []byte{0}
	ops := []Operation{
		{n, "Range", &etcdserverpb.RangeRequest{Key: all, RangeEnd: all, Serializable: true}},
		{n, "LeaseLeases", &etcdserverpb.LeaseLeasesRequest{}},
	}
	for id := range s.Leases {
		ops = append(ops,
			Operation{n, "LeaseTimeToLive", &etcdserverpb.LeaseTimeToLiveRequest{ID: id, Keys: true}},
			Operation{n, "LeaseKeepAlive", &etcdserverpb.LeaseKeepAliveRequest{ID: id}})
	}
	for _, op := range ops {
		if err := ask(o, seats, op); err != nil {
			return err
		}
	}
	return nil
}

// ask sends one read to all members at once.
func ask(o MembersOptions, seats []Seat, op Operation) error {
	results := make([]result, len(seats))
	var wg sync.WaitGroup
	for i, s := range seats {
		wg.Go(func() {
			results[i] = send(o.Methods, s.Conn, s.Names, op)
			if r, ok := results[i].answer.(*etcdserverpb.LeaseTimeToLiveResponse); ok && r.TTL > r.GrantedTTL && r.TTL <= r.GrantedTTL+2 {
				r.TTL = r.GrantedTTL // a new leader gives the time of an election on top
			}
		})
	}
	wg.Wait()
	for i, r := range results {
		if r.equal(results[0]) && r.fault == "" && !passing(r.failure) {
			continue
		}
		err := broken.Errorf("the answers of two members differ")
		if passing(r.failure) || passing(results[0].failure) {
			err = errors.New("a member gives no answer")
		}
		return fmt.Errorf("seed %d, operation %d: %w\n  request: %s %s\n  %s: %s\n  %s: %s", o.Seed, op.Number, err,
			op.Method, requestText(op.Request), seats[0].Name, results[0].text(seats[0].Names), seats[i].Name, r.text(seats[i].Names))
	}
	return nil
}

// passing tells a failure of the way to a member from one that is the answer.
func passing(failure string) bool {
	return strings.HasPrefix(failure, "Unavailable") || strings.HasPrefix(failure, "DeadlineExceeded") || strings.HasPrefix(failure, "Canceled")
}

// ranges are those that a request consists of or contains.
func ranges(request proto.Message) (all []*etcdserverpb.RangeRequest) {
	switch r := request.(type) {
	case *etcdserverpb.RangeRequest:
		return []*etcdserverpb.RangeRequest{r}
	case *etcdserverpb.TxnRequest:
		for _, ops := range [][]*etcdserverpb.RequestOp{r.Success, r.Failure} {
			for _, op := range ops {
				if q := op.GetRequestRange(); q != nil {
					all = append(all, q)
				} else if q := op.GetRequestTxn(); q != nil {
					all = append(all, ranges(q)...)
				}
			}
		}
	}
	return all
}

// alike tells if all members must answer a read alike, once it is linearizable. Others are answered from what the member
// has applied, or name the member.
func alike(method string, request proto.Message) bool {
	switch method {
	case "Range", "RangeStream", "Alarm":
		return true
	case "Txn":
		return len(ranges(request)) > 0 // one that reads nothing need not wait for anything
	}
	return false
}
