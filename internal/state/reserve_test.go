package state

import (
	"errors"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
)

// fullRig is a machine at feature level 1 whose store was found full, with one
// small and one larger key.
func fullRig(t *testing.T, o Options) *rig {
	r := newRig(t, o)
	r.proposeConf(member.AddChange(1, member.Member{ID: 7}))
	r.apply(1, 1)
	r.proposeLevel(1, r.m.now.Load().members.Fingerprint())
	r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte("small"), Value: []byte("1")})
	r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte("large"), Value: []byte("1")})
	r.propose(command.Header{}, command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 7, Alarm: pb.AlarmType_NOSPACE})
	r.apply(len(r.entries), 9)
	return r
}

// fill overwrites a key until it is refused, and says how much usage grew.
func (r *rig) fill(key string, size int) int64 {
	r.t.Helper()
	before := r.m.Root().UsageBytes()
	for {
		from := len(r.entries)
		for range 1000 {
			r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte(key), Value: make([]byte, size)})
		}
		for applied := from; applied < len(r.entries); {
			results, err := r.m.Apply(r.entries[applied:])
			if err != nil {
				r.t.Fatal(err)
			}
			applied += len(results)
			if last := &results[len(results)-1]; errors.Is(last.Err, ErrNoSpace) {
				return r.m.Root().UsageBytes() - before
			} else if last.Err != nil {
				r.t.Fatal(last.Err)
			}
		}
	}
}

// TestReserveIsBounded: what passes a full store is small, and ends; the smallest
// pass longest, and a compaction gives all back.
func TestReserveIsBounded(t *testing.T) {
	r := fullRig(t, Options{})
	defer r.close()
	if grown := r.fill("large", reserveCost); grown != 0 {
		t.Fatalf("a put of cost above %d passed: %d bytes", reserveCost, grown)
	}
	if grown := r.fill("large", 3000); grown < reserveBytes/2-reserveCost || grown > reserveBytes/2 {
		t.Fatalf("middling puts took %d bytes of the reserve, want half of %d", grown, reserveBytes)
	}
	if grown := r.fill("small", 200); grown < reserveBytes/2-reserveCost || grown > reserveBytes/2+reserveCost {
		t.Fatalf("small puts took %d bytes of the reserve, want the other half of %d", grown, reserveBytes)
	}
	r.run(command.Header{}, command.KindCompaction, &pb.CompactionRequest{Revision: r.m.Root().Revision()})
	if grown := r.fill("large", reserveCost); grown != 0 {
		t.Fatalf("after the compaction a put of cost above %d passed: %d bytes", reserveCost, grown)
	}
	if grown := r.fill("small", 200); grown < reserveBytes-reserveCost {
		t.Fatalf("after a compaction there were %d bytes of the reserve", grown)
	}
}

// TestOverwriteBeyondQuotaIsAnswered: before the alarm is in the log the reserve
// holds too: a compactor must not be told that its transaction failed.
func TestOverwriteBeyondQuotaIsAnswered(t *testing.T) {
	for _, level := range []uint64{0, 1} {
		r := newRig(t, Options{QuotaBytes: 1000})
		r.proposeConf(member.AddChange(1, member.Member{ID: 7}))
		r.apply(1, 1)
		r.proposeLevel(level, r.m.now.Load().members.Fingerprint())
		for _, p := range []*pb.PutRequest{{Key: []byte("a")}, {Key: []byte("b"), Value: make([]byte, 730)}, {Key: []byte("a")}, {Key: []byte("c")}} {
			r.propose(command.Header{}, command.KindPut, p)
		}
		r.apply(2, 1)
		results, err := r.m.Apply(r.entries[2:])
		if err != nil {
			t.Fatal(err)
		}
		for i, over := range []bool{false, false, level == 0, true} {
			if results[i].OverQuota != over || errors.Is(results[i].Err, ErrNoSpace) != over {
				t.Errorf("level %d, put %d: %+v", level, i, results[i])
			}
		}
		r.close()
	}
}
