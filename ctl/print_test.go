package ctl

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// answers are printed in every format. What etcdctl prints for the same is compared in test/compat.
func printAnswer(name string, p printer, errors io.Writer) error {
	header := &etcdserverpb.ResponseHeader{ClusterId: 255, MemberId: 16, Revision: 7, RaftTerm: 2}
	inTxn := &etcdserverpb.ResponseHeader{Revision: 7}
	kv := &mvccpb.KeyValue{Key: []byte("a"), Value: []byte("x\n<\xff"), CreateRevision: 2, ModRevision: 7, Version: 3, Lease: 31}
	old := &mvccpb.KeyValue{Key: []byte("a"), Value: []byte("w"), CreateRevision: 2, ModRevision: 4, Version: 2}
	members := []*etcdserverpb.Member{
		{ID: 16, Name: "one", PeerURLs: []string{"http://h:1", "http://h:2"}, ClientURLs: []string{"http://h:3"}},
		{ID: 17, PeerURLs: []string{"http://i:1"}, IsLearner: true},
	}
	switch name {
	case "put":
		return p.put(&clientv3.PutResponse{Header: header, PrevKv: old})
	case "get":
		return p.get((*clientv3.GetResponse)(&etcdserverpb.RangeResponse{Header: header, Kvs: []*mvccpb.KeyValue{kv}, More: true, Count: 9}))
	case "del":
		return p.del((*clientv3.DeleteResponse)(&etcdserverpb.DeleteRangeResponse{Header: header, Deleted: 1, PrevKvs: []*mvccpb.KeyValue{old}}))
	case "txn":
		return p.txn((*clientv3.TxnResponse)(&etcdserverpb.TxnResponse{Header: header, Succeeded: true, Responses: []*etcdserverpb.ResponseOp{
			{Response: &etcdserverpb.ResponseOp_ResponsePut{ResponsePut: &etcdserverpb.PutResponse{Header: inTxn}}},
			{Response: &etcdserverpb.ResponseOp_ResponseRange{ResponseRange: &etcdserverpb.RangeResponse{Header: inTxn, Count: 1, Kvs: []*mvccpb.KeyValue{kv}}}},
			{Response: &etcdserverpb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: &etcdserverpb.DeleteRangeResponse{Header: inTxn}}},
			{Response: &etcdserverpb.ResponseOp_ResponseTxn{ResponseTxn: &etcdserverpb.TxnResponse{Header: inTxn}}},
		}}))
	case "watch":
		return p.watch(&clientv3.WatchResponse{Header: header, Events: []*clientv3.Event{
			{Type: mvccpb.Event_PUT, Kv: kv, PrevKv: old},
			{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte("b"), ModRevision: 7}},
		}})
	case "grant":
		return p.grant(&clientv3.LeaseGrantResponse{ResponseHeader: header, ID: 31, TTL: 60})
	case "revoke":
		return p.revoke(31, &clientv3.LeaseRevokeResponse{Header: header})
	case "keep-alive":
		return p.keepAlive(&clientv3.LeaseKeepAliveResponse{ResponseHeader: header, ID: 31, TTL: 60})
	case "timetolive":
		return p.timeToLive(&clientv3.LeaseTimeToLiveResponse{ResponseHeader: header, ID: 31, TTL: 58, GrantedTTL: 60, Keys: [][]byte{[]byte("a"), []byte("b c")}}, true)
	case "expired":
		return p.timeToLive(&clientv3.LeaseTimeToLiveResponse{ResponseHeader: header, ID: 31, TTL: -1}, false)
	case "leases":
		return p.leases(&clientv3.LeaseLeasesResponse{ResponseHeader: header, Leases: []clientv3.LeaseStatus{{ID: 31}, {ID: -1}}})
	case "members":
		return p.members((*clientv3.MemberListResponse)(&etcdserverpb.MemberListResponse{Header: header, Members: members}))
	case "member-added":
		return p.memberAdded((*clientv3.MemberAddResponse)(&etcdserverpb.MemberAddResponse{
			Header: header, Member: &etcdserverpb.Member{ID: 17, PeerURLs: []string{"http://i:1"}, IsLearner: true}, Members: members,
		}))
	case "voter-added":
		return p.memberAdded((*clientv3.MemberAddResponse)(&etcdserverpb.MemberAddResponse{Header: header, Member: members[0], Members: members}))
	case "member-removed":
		return p.memberRemoved(17, (*clientv3.MemberRemoveResponse)(&etcdserverpb.MemberRemoveResponse{Header: header, Members: members}))
	case "member-updated":
		return p.memberUpdated(17, (*clientv3.MemberUpdateResponse)(&etcdserverpb.MemberUpdateResponse{Header: header, Members: members}))
	case "member-promoted":
		return p.memberPromoted(17, (*clientv3.MemberPromoteResponse)(&etcdserverpb.MemberPromoteResponse{Header: header, Members: members}))
	case "leader-moved":
		return p.leaderMoved(16, 17, &clientv3.MoveLeaderResponse{})
	case "downgraded":
		return p.downgraded("validate", (*clientv3.DowngradeResponse)(&etcdserverpb.DowngradeResponse{Header: header, Version: "3.7"}))
	case "alarms":
		return p.alarms((*clientv3.AlarmResponse)(&etcdserverpb.AlarmResponse{Alarms: []*etcdserverpb.AlarmMember{
			{MemberID: 16, Alarm: etcdserverpb.AlarmType_NOSPACE}, {MemberID: 17, Alarm: etcdserverpb.AlarmType_CORRUPT},
		}}))
	case "health":
		return p.health([]endpointHealth{
			{Endpoint: "h:1", Health: true, Took: "2ms"}, {Endpoint: "h:2", Took: "5s", Error: "context deadline exceeded"},
		}, errors)
	case "statuses":
		return p.statuses([]endpointStatus{{Endpoint: "h:1", Status: (*clientv3.StatusResponse)(&etcdserverpb.StatusResponse{
			Header: header, Version: "3.7.3", StorageVersion: "3.7.0", DbSize: 24576, DbSizeInUse: 20480, DbSizeQuota: 2 << 30, Leader: 16,
			RaftIndex: 30, RaftAppliedIndex: 29, RaftTerm: 2, Errors: []string{"memberID:16 alarm:NOSPACE", "more"},
			DowngradeInfo: &etcdserverpb.DowngradeInfo{Enabled: true, TargetVersion: "3.6.0"},
		})}})
	case "hashes":
		return p.hashes([]endpointHashKV{{Endpoint: "h:1", HashKV: (*clientv3.HashKVResponse)(&etcdserverpb.HashKVResponse{
			Header: header, Hash: 4035840541, HashRevision: 7, CompactRevision: -1,
		})}})
	case "nothing":
		return p.hashes(nil)
	}
	return fmt.Errorf("there is no answer %q", name)
}

// TestPrinters prints answers: `answer format [hex]`.
func TestPrinters(t *testing.T) {
	datadriven.RunTest(t, "testdata/print.txt", func(t *testing.T, d *datadriven.TestData) string {
		var out, errors bytes.Buffer
		w := bufio.NewWriter(&out)
		p, err := newPrinter(d.CmdArgs[0].Key, w, d.HasArg("hex"))
		if err == nil {
			err = printAnswer(d.Cmd, p, &errors)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		text := out.String()
		if d.CmdArgs[0].Key == "protobuf" {
			text = fmt.Sprintf("%x\n", out.Bytes())
		}
		for line := range strings.Lines(errors.String()) {
			text += "stderr: " + line
		}
		if err != nil {
			text += fmt.Sprintf("error: %s\n", addresses.ReplaceAllString(err.Error(), "0x~"))
		}
		return strings.ToValidUTF8(text, "(not UTF-8)")
	})
}

var addresses = regexp.MustCompile(`0x[0-9a-f]{6,}`)

func TestBytesText(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 5: "5 B", 999: "999 B", 1000: "1.0 kB", 9949: "9.9 kB", 9950: "10 kB", 9999: "10 kB", 10499: "10 kB", 10500: "11 kB", 123456: "123 kB", 123500: "124 kB", 1050: "1.1 kB", 24576: "25 kB", 999_999: "1000 kB",
		2147483648: "2.1 GB", 8 << 40: "8.8 TB", -1: "-1 B",
	} {
		if got := bytesText(n); got != want {
			t.Errorf("bytesText(%d) = %q, want %q", n, got, want)
		}
	}
}
