package state

import (
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
)

// TestScripts runs testdata/*: each command is a field of InternalRaftRequest
// with its request as text, and prints what a client would learn.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var r *rig
		var noted uint64
		open := func(d *datadriven.TestData) {
			var o Options
			for _, a := range d.CmdArgs {
				n, err := strconv.ParseInt(a.Vals[0], 10, 64)
				if err != nil {
					d.Fatalf(t, "%v", err)
				}
				reflect.ValueOf(&o).Elem().FieldByName(a.Key).SetInt(n)
			}
			r = newRig(t, o)
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				open(d)
				return ""
			}
			switch d.Cmd {
			case "reopen":
				r.reopen()
				return ""
			case "settle":
				r.settle()
				return ""
			case "dump":
				return r.dump()
			case "move":
				r.move()
				return ""
			case "level":
				return fmt.Sprintln(r.level())
			case "fingerprint":
				noted = r.m.now.Load().members.Fingerprint()
				return ""
			case "feature_level": // of the membership that was noted
				var to uint64
				d.ScanArgs(t, "to", &to)
				r.proposeLevel(to, noted)
				return r.apply(len(r.entries), 1)[0] + "\n"
			case "member_add", "learner_add", "member_remove":
				var id uint64
				d.ScanArgs(t, "id", &id)
				cc := member.RemoveChange(id, id)
				if d.Cmd != "member_remove" {
					cc = member.AddChange(id, member.Member{ID: id, PeerURLs: []string{fmt.Sprintf("http://127.0.0.1:%d", id)}, IsLearner: d.Cmd == "learner_add"})
				}
				r.proposeConf(cc)
				return r.apply(len(r.entries), 1)[0] + "\n"
			}
			var h command.Header
			if d.HasArg("user") {
				d.ScanArgs(t, "user", &h.Username)
				a, _, _ := r.m.Tables()
				h.AuthRevision = a.Revision()
			}
			if d.HasArg("revision") {
				d.ScanArgs(t, "revision", &h.AuthRevision)
			}
			kind, msg := request(t, d)
			return r.run(h, kind, msg) + "\n"
		})
	})
}

// request reads a command of a script.
func request(t *testing.T, d *datadriven.TestData) (command.Kind, proto.Message) {
	fields := (&pb.InternalRaftRequest{}).ProtoReflect().Descriptor().Fields()
	f := fields.ByName(protoreflect.Name(d.Cmd))
	if f == nil || f.Kind() != protoreflect.MessageKind {
		d.Fatalf(t, "no request %q", d.Cmd)
	}
	whole := (&pb.InternalRaftRequest{}).ProtoReflect()
	msg := whole.NewField(f).Message().Interface()
	if err := prototext.Unmarshal([]byte(d.Input), msg); err != nil {
		d.Fatalf(t, "%s: %v", strings.TrimSpace(d.Input), err)
	}
	for k := command.KindRange; k.Field() != 0; k++ {
		if k.Field() == f.Number() {
			return k, msg
		}
	}
	d.Fatalf(t, "no kind for %s", d.Cmd)
	return 0, nil
}

// TestQuotaCrossingRequestIsMade: the request that crosses the quota is made,
// and its answer is the error.
func TestQuotaCrossingRequestIsMade(t *testing.T) {
	r := newRig(t, Options{QuotaBytes: 1000})
	defer r.close()
	r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte("a"), Value: make([]byte, 500)})
	r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte("b"), Value: make([]byte, 500)})
	results, err := r.m.Apply(r.entries)
	if err != nil {
		t.Fatal(err)
	}
	if results[0].Err != nil || results[0].OverQuota {
		t.Fatalf("first: %+v", results[0])
	}
	if results[1].Err == nil || !results[1].OverQuota || results[1].Reply == nil || results[1].Reply.Revision != 3 {
		t.Fatalf("second: %+v", results[1])
	}
	if got := fmt.Sprint(r.m.Root().Keys()); got != "2" {
		t.Fatalf("%s keys", got)
	}
}

// TestUnknownFeatureLevel: a level of a later version stops the member, unless it
// is of another membership and so of no account.
func TestUnknownFeatureLevel(t *testing.T) {
	r := newRig(t, Options{})
	defer r.close()
	r.proposeConf(member.AddChange(1, member.Member{ID: 7}))
	r.apply(1, 1)
	present := r.m.now.Load().members.Fingerprint()
	r.proposeLevel(member.FeatureLevel+1, present+1)
	r.apply(2, 1)
	r.proposeLevel(member.FeatureLevel+1, present)
	if _, err := r.m.Apply(r.entries[2:]); !errors.Is(err, member.ErrFeatureLevel) {
		t.Fatalf("error %v", err)
	}
}
