package state

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
)

var (
	seeds    = flag.Int("seeds", 12, "random command lists to run")
	onlySeed = flag.Uint64("seed", 0, "run this list alone")
)

// TestSameInputTwoWays guards the layer's one promise: the same entries give the
// same state and answers, however they are cut into batches, and through
// restarts, snapshots, crashes that lose what was not flushed, and compaction at
// any time.
func TestSameInputTwoWays(t *testing.T) {
	first, last := uint64(1), uint64(*seeds)
	if *onlySeed != 0 {
		first, last = *onlySeed, *onlySeed
	}
	levels := map[uint64]int{} // that were seen
	var passed, refused int    // of the entries that met a full store with a reserve
	var allowed, denied int    // of the requests for keys while auth was on
	met := newSeen()
	for seed := first; seed <= last; seed++ {
		rng := rand.New(rand.NewPCG(seed, 0))
		a := newRig(t, Options{})
		b := newRig(t, Options{})
		generate(a, rng, 800)
		b.entries = a.entries
		n := len(a.entries)

		var one []string
		levelAt := make([]uint64, n+1) // after each entry
		for i := 1; i <= n; i++ {
			guarded := a.m.now.Load().auth.Enabled()
			_, full := a.m.now.Load().alarms.FullAt()
			usage := a.m.Root().UsageBytes()
			one = append(one, a.apply(i, 1)...)
			done := !strings.HasPrefix(one[i-1], "error ")
			what := met.add(t, a.entries[i-1], done)
			if guarded && done && slices.Contains([]string{"put", "range", "delete_range", "txn"}, what) {
				allowed++
			} else if guarded && strings.Contains(one[i-1], auth.ErrPermissionDenied.Error()) {
				denied++
			}
			if full && a.m.Root().UsageBytes() > usage {
				passed++
			} else if full && strings.Contains(one[i-1], ErrNoSpace.Error()) {
				refused++
			}
			levelAt[i] = a.level()
			levels[a.level()]++
		}
		two := make([]string, n)
		for {
			applied, _ := b.m.Applied()
			if b.level() != levelAt[applied] {
				t.Fatalf("seed %d, entry %d: feature level %d, one by one %d\nreplay: go test ./internal/state -run TwoWays -seed %d", seed, applied, b.level(), levelAt[applied], seed)
			}
			if int(applied) == n {
				break
			}
			to := min(n, int(applied)+1+rng.IntN(60))
			for i, line := range b.apply(to, 1+rng.IntN(40)) {
				two[int(applied)+i] = line
			}
			switch rng.IntN(7) {
			case 0:
				b.reopen()
			case 6: // what one was told, another goes on with
				b.move()
			case 1: // a crash: only what was flushed is there
				clone := b.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng})
				_ = b.m.Close()
				_ = b.store.Abandon()
				b.fs = clone
				b.open()
			case 2:
				if err := b.store.Flush(); err != nil {
					t.Fatal(err)
				}
			case 3:
				if _, _, err := b.m.CompactStep(); err != nil {
					t.Fatal(err)
				}
			}
		}
		for i := range one {
			// A range in an answer may be past what was compacted meanwhile only if
			// it is read late; here it is read at once, so answers are equal.
			if one[i] != two[i] {
				t.Fatalf("seed %d, entry %d:\n one by one: %s\n in batches: %s\nreplay: go test ./internal/state -run TwoWays -seed %d", seed, i+1, one[i], two[i], seed)
			}
		}
		a.settle()
		b.settle()
		// Hashes of compactions are remembered till a restart, as in etcd.
		a.reopen()
		b.reopen()
		if x, y := a.dump(), b.dump(); x != y {
			t.Fatalf("seed %d: states differ\n%s\nreplay: go test ./internal/state -run TwoWays -seed %d", seed, firstDifference(x, y), seed)
		}
		a.close()
		b.close()
	}
	if *onlySeed == 0 {
		met.check(t)
	}
	if *onlySeed == 0 && (levels[0] < 20**seeds || levels[1] < 20**seeds) {
		t.Errorf("feature levels were seen so often: %v", levels)
	}
	if *onlySeed == 0 && (passed < *seeds || refused < *seeds) {
		t.Errorf("of what met a full store with a reserve %d entries passed and %d were refused", passed, refused)
	}
	if *onlySeed == 0 && (allowed < *seeds || denied < *seeds) {
		t.Errorf("of the requests for keys while auth was on %d were allowed and %d denied", allowed, denied)
	}
}

// seen counts entries by what they do, and those of them that were not refused.
type seen struct{ all, done map[string]int }

// newSeen knows of every kind of entry that there is.
func newSeen() seen {
	s := seen{map[string]int{}, map[string]int{}}
	for k := command.KindNone + 1; k.Field() != 0; k++ {
		s.all[k.String()] = 0
	}
	for _, change := range raftpb.ConfChangeType_name {
		s.all[change] = 0
	}
	return s
}

// add counts an entry, and returns what it does.
func (s seen) add(t *testing.T, e *raftpb.Entry, done bool) (what string) {
	t.Helper()
	if e.GetType() == raftpb.EntryConfChange {
		cc := new(raftpb.ConfChange)
		if err := proto.Unmarshal(e.GetData(), cc); err != nil {
			t.Fatal(err)
		}
		what = cc.GetType().String()
	} else {
		var c command.Command
		if err := command.Decode(e.GetData(), &c); err != nil {
			t.Fatal(err)
		}
		what = c.Kind.String()
	}
	s.all[what]++
	if done {
		s.done[what]++
	}
	return what
}

// check fails the test if it says nothing of some kind of entry.
func (s seen) check(t *testing.T) {
	t.Helper()
	for what, n := range s.all {
		if s.done[what] == 0 {
			t.Errorf("%s: %d entries, all of them refused: generate makes none that says anything", what, n)
		}
	}
}

func firstDifference(x, y string) string {
	xs, ys := strings.Split(x, "\n"), strings.Split(y, "\n")
	for i := range xs {
		if i >= len(ys) || xs[i] != ys[i] {
			return fmt.Sprintf("line %d\n  %s\n  %s", i, xs[i], strings.Join(ys[min(i, len(ys)-1):min(i+1, len(ys))], ""))
		}
	}
	return "one is longer"
}

// generate fills the rig's log with random commands of every kind.
func generate(r *rig, rng *rand.Rand, n int) {
	members := newRig(r.t, Options{}) // to know who is there when a level is asked for
	defer members.close()
	conf := func(cc *raftpb.ConfChange) {
		r.proposeConf(cc)
		members.proposeConf(cc)
		members.apply(len(members.entries), 1)
	}
	g := &generator{rng: rng}
	self := member.Member{ID: 7, PeerURLs: []string{"http://127.0.0.1:2380"}, Name: "m"}
	conf(member.AddChange(0, self))
	noted := members.m.now.Load().members.Fingerprint()
	const notOld = 1 << 20 // auth revision
	root := command.Header{Username: "root", AuthRevision: notOld}
	for len(r.entries) < n {
		switch rng.IntN(60) {
		case 0:
			conf(g.confChange(uint64(len(r.entries))))
			continue
		case 1:
			r.proposeLevel(uint64(rng.IntN(2)), noted) // that may be late
			continue
		case 2:
			noted = members.m.now.Load().members.Fingerprint()
			r.proposeLevel(1, noted)
			continue
		case 3: // for a while users need rights
			r.propose(root, command.KindAuthUserAdd, &pb.AuthUserAddRequest{Name: "root", HashedPassword: "aGFzaA==", Options: &authpb.UserAddOptions{}})
			r.propose(root, command.KindAuthUserGrantRole, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
			r.propose(root, command.KindAuthEnable, &pb.AuthEnableRequest{})
			continue
		case 4, 5, 6, 7:
			r.propose(root, command.KindAuthDisable, &pb.AuthDisableRequest{})
			continue
		}
		kind, msg := g.command()
		var h command.Header
		if rng.IntN(3) > 0 { // matters while auth is on
			h.Username, h.AuthRevision = g.user(), uint64(1+rng.IntN(40))
			if rng.IntN(2) == 0 {
				h.AuthRevision = notOld
			}
		}
		r.propose(h, kind, msg)
	}
}

type generator struct {
	rng      *rand.Rand
	revision int64
}

func (g *generator) pick(s ...string) string { return s[g.rng.IntN(len(s))] }
func (g *generator) key() []byte             { return []byte(g.pick("a", "aa", "ab", "b", "c", "c\x00", "\xff")) }
func (g *generator) user() string            { return g.pick("root", "u1", "u2") }
func (g *generator) role() string            { return g.pick("root", "r1", "r2") }
func (g *generator) lease() int64            { return int64(g.rng.IntN(5)) - 1 }

func (g *generator) end() []byte {
	switch g.rng.IntN(3) {
	case 0:
		return nil
	case 1:
		return []byte{0}
	}
	return g.key()
}

func (g *generator) put() *pb.PutRequest {
	p := &pb.PutRequest{Key: g.key(), Value: []byte(g.pick("", "x", "yy", strings.Repeat("z", 3000))), PrevKv: g.rng.IntN(2) == 0}
	switch g.rng.IntN(6) {
	case 0:
		p.IgnoreValue, p.Value = true, nil
	case 1:
		p.IgnoreLease = true
	case 2:
		p.Lease = g.lease()
	}
	return p
}

func (g *generator) rangeRequest() *pb.RangeRequest {
	return &pb.RangeRequest{Key: g.key(), RangeEnd: g.end(), Limit: int64(g.rng.IntN(3)), Revision: int64(g.rng.IntN(4)) * int64(g.rng.IntN(30))}
}

func (g *generator) deleteRange() *pb.DeleteRangeRequest {
	return &pb.DeleteRangeRequest{Key: g.key(), RangeEnd: g.end(), PrevKv: g.rng.IntN(2) == 0}
}

func (g *generator) compare() *pb.Compare {
	c := &pb.Compare{Result: pb.Compare_CompareResult(g.rng.IntN(4)), Target: pb.Compare_CompareTarget(g.rng.IntN(5)), Key: g.key(), RangeEnd: g.end()}
	n := int64(g.rng.IntN(4))
	switch c.Target {
	case pb.Compare_VERSION:
		c.TargetUnion = &pb.Compare_Version{Version: n}
	case pb.Compare_CREATE:
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: n}
	case pb.Compare_MOD:
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: n}
	case pb.Compare_VALUE:
		c.TargetUnion = &pb.Compare_Value{Value: []byte(g.pick("", "x", "yy"))}
	case pb.Compare_LEASE:
		c.TargetUnion = &pb.Compare_Lease{Lease: n}
	}
	return c
}

// ops makes operations that the edge would let pass: no key is put twice, none
// is put and deleted.
func (g *generator) ops(depth int, prefix string) []*pb.RequestOp {
	var out []*pb.RequestOp
	for i := range g.rng.IntN(4) {
		switch k := g.rng.IntN(4); {
		case k == 0:
			out = append(out, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: g.rangeRequest()}})
		case k == 1:
			p := g.put()
			p.Key = fmt.Appendf(nil, "%s-put%d", prefix, i)
			out = append(out, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: p}})
		case k == 2:
			out = append(out, &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{
				Key: []byte("a"), RangeEnd: []byte("b"), PrevKv: g.rng.IntN(2) == 0,
			}}})
		case depth > 0:
			out = append(out, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: g.txn(depth-1, fmt.Sprintf("%s-%d", prefix, i))}})
		}
	}
	return out
}

func (g *generator) txn(depth int, prefix string) *pb.TxnRequest {
	t := &pb.TxnRequest{Success: g.ops(depth, prefix+"s"), Failure: g.ops(depth, prefix+"f")}
	for range g.rng.IntN(3) {
		t.Compare = append(t.Compare, g.compare())
	}
	return t
}

func (g *generator) command() (command.Kind, proto.Message) {
	switch g.rng.IntN(48) {
	case 0, 1, 2, 3, 4, 5, 6, 41, 42, 43, 44, 45, 46:
		return command.KindPut, g.put()
	case 7, 8, 9:
		return command.KindDeleteRange, g.deleteRange()
	case 10, 11, 12, 13:
		return command.KindTxn, g.txn(2, "t")
	case 14:
		return command.KindRange, g.rangeRequest()
	case 15:
		g.revision += int64(g.rng.IntN(8))
		return command.KindCompaction, &pb.CompactionRequest{Revision: g.revision}
	case 16, 17:
		return command.KindLeaseGrant, &pb.LeaseGrantRequest{ID: g.lease(), TTL: int64(g.rng.IntN(100))}
	case 18:
		return command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: g.lease()}
	case 19:
		return command.KindLeaseCheckpoint, &pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: g.lease(), Remaining_TTL: int64(g.rng.IntN(50))}}}
	case 20:
		return command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_AlarmAction(g.rng.IntN(3)), MemberID: uint64(g.rng.IntN(2)), Alarm: pb.AlarmType(g.rng.IntN(3))}
	case 21:
		return command.KindAlarm, &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: uint64(g.rng.IntN(2)), Alarm: pb.AlarmType(1 + g.rng.IntN(2))}
	case 22:
		return command.KindAuthUserAdd, &pb.AuthUserAddRequest{Name: g.user(), HashedPassword: "aGFzaA==", Options: &authpb.UserAddOptions{}}
	case 23:
		return command.KindAuthUserDelete, &pb.AuthUserDeleteRequest{Name: g.user()}
	case 24:
		return command.KindAuthRoleAdd, &pb.AuthRoleAddRequest{Name: g.role()}
	case 25:
		return command.KindAuthRoleDelete, &pb.AuthRoleDeleteRequest{Role: g.role()}
	case 26:
		return command.KindAuthUserGrantRole, &pb.AuthUserGrantRoleRequest{User: g.user(), Role: g.role()}
	case 27:
		return command.KindAuthUserRevokeRole, &pb.AuthUserRevokeRoleRequest{Name: g.user(), Role: g.role()}
	case 28:
		return command.KindAuthRoleGrantPermission, &pb.AuthRoleGrantPermissionRequest{Name: g.role(), Perm: &authpb.Permission{
			PermType: authpb.Permission_Type(g.rng.IntN(3)), Key: []byte(g.pick("a", "b")), RangeEnd: []byte(g.pick("", "c", "\x00")),
		}}
	case 29:
		return command.KindAuthRoleRevokePermission, &pb.AuthRoleRevokePermissionRequest{Role: g.role(), Key: []byte(g.pick("a", "b")), RangeEnd: []byte(g.pick("", "c", "\x00"))}
	case 30:
		return command.KindAuthEnable, &pb.AuthEnableRequest{}
	case 31:
		return command.KindAuthDisable, &pb.AuthDisableRequest{}
	case 32:
		return command.KindClusterMemberAttrSet, &membershippb.ClusterMemberAttrSetRequest{
			Member_ID: uint64(7 + g.rng.IntN(3)), MemberAttributes: &membershippb.Attributes{Name: g.pick("m", "n"), ClientUrls: []string{"http://127.0.0.1:2379"}},
		}
	case 33:
		return command.KindAuthUserChangePassword, &pb.AuthUserChangePasswordRequest{Name: g.user(), HashedPassword: g.pick("aGFzaA==", "b3RoZXI=", "no base64")}
	case 34:
		return command.KindAuthenticate, &pb.InternalAuthenticateRequest{Name: g.user(), SimpleToken: g.pick("", "abcdefghijklmnop")}
	case 35:
		return command.KindAuthStatus, &pb.AuthStatusRequest{}
	case 36:
		return command.KindAuthUserGet, &pb.AuthUserGetRequest{Name: g.user()}
	case 37:
		return command.KindAuthUserList, &pb.AuthUserListRequest{}
	case 38:
		return command.KindAuthRoleGet, &pb.AuthRoleGetRequest{Role: g.role()}
	case 39:
		return command.KindAuthRoleList, &pb.AuthRoleListRequest{}
	case 40:
		return command.KindDowngradeVersionTest, &pb.DowngradeVersionTestRequest{Ver: "3.6.0"}
	}
	if g.rng.IntN(2) == 0 {
		return command.KindClusterVersionSet, &membershippb.ClusterVersionSetRequest{Ver: g.pick("3.6.0", "3.7.0")}
	}
	return command.KindDowngradeInfoSet, &membershippb.DowngradeInfoSetRequest{Enabled: g.rng.IntN(2) == 0, Ver: "3.6.0"}
}

// confChange makes a membership change, of which some are refused.
func (g *generator) confChange(id uint64) *raftpb.ConfChange {
	m := member.Member{ID: uint64(8 + g.rng.IntN(3)), PeerURLs: []string{fmt.Sprintf("http://127.0.0.1:%d", 2381+g.rng.IntN(3))}, IsLearner: g.rng.IntN(2) == 0}
	switch g.rng.IntN(4) {
	case 0:
		return member.RemoveChange(id, m.ID)
	case 1:
		return member.PromoteChange(id, m.ID)
	case 2:
		return member.UpdateChange(id, m.ID, m.PeerURLs)
	}
	return member.AddChange(id, m)
}
