package ctl

import (
	"bufio"
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
)

// protobufPrinter writes answers as the bytes they came in. Of an answer about leases that is the header alone.
type protobufPrinter struct {
	refuser
	out *bufio.Writer
}

func (p *protobufPrinter) print(m proto.Message) error {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return err
	}
	_, err = p.out.Write(b)
	return err
}

func (p *protobufPrinter) put(r *clientv3.PutResponse) error {
	return p.print((*etcdserverpb.PutResponse)(r))
}

func (p *protobufPrinter) get(r *clientv3.GetResponse) error {
	return p.print((*etcdserverpb.RangeResponse)(r))
}

func (p *protobufPrinter) del(r *clientv3.DeleteResponse) error {
	return p.print((*etcdserverpb.DeleteRangeResponse)(r))
}

func (p *protobufPrinter) txn(r *clientv3.TxnResponse) error {
	return p.print((*etcdserverpb.TxnResponse)(r))
}

func (p *protobufPrinter) watch(r *clientv3.WatchResponse) error {
	m := &etcdserverpb.WatchResponse{Header: r.Header, Created: r.Created, Canceled: r.Canceled, CompactRevision: r.CompactRevision}
	for _, e := range r.Events {
		m.Events = append(m.Events, (*mvccpb.Event)(e))
	}
	return p.print(m)
}

func (p *protobufPrinter) grant(r *clientv3.LeaseGrantResponse) error {
	return p.print(r.ResponseHeader)
}

func (p *protobufPrinter) revoke(_ clientv3.LeaseID, r *clientv3.LeaseRevokeResponse) error {
	// How wide the text form of a message is spaced differs from program to program on purpose.
	text := strings.Join(strings.Fields(fmt.Sprintf("%T (%v)", r, r)), " ")
	return exit(exitFormat, fmt.Errorf("marshal unsupported for type %s", text))
}

func (p *protobufPrinter) keepAlive(r *clientv3.LeaseKeepAliveResponse) error {
	return p.print(r.ResponseHeader)
}

func (p *protobufPrinter) timeToLive(r *clientv3.LeaseTimeToLiveResponse, _ bool) error {
	return p.print(r.ResponseHeader)
}

func (p *protobufPrinter) leases(r *clientv3.LeaseLeasesResponse) error {
	return p.print(r.ResponseHeader)
}

func (p *protobufPrinter) members(r *clientv3.MemberListResponse) error {
	return p.print((*etcdserverpb.MemberListResponse)(r))
}

func (p *protobufPrinter) memberAdded(r *clientv3.MemberAddResponse) error {
	return p.print((*etcdserverpb.MemberAddResponse)(r))
}

func (p *protobufPrinter) memberRemoved(_ uint64, r *clientv3.MemberRemoveResponse) error {
	return p.print((*etcdserverpb.MemberRemoveResponse)(r))
}

func (p *protobufPrinter) memberUpdated(_ uint64, r *clientv3.MemberUpdateResponse) error {
	return p.print((*etcdserverpb.MemberUpdateResponse)(r))
}

func (p *protobufPrinter) memberPromoted(_ uint64, r *clientv3.MemberPromoteResponse) error {
	return p.print((*etcdserverpb.MemberPromoteResponse)(r))
}

func (p *protobufPrinter) leaderMoved(_, _ uint64, r *clientv3.MoveLeaderResponse) error {
	return p.print((*etcdserverpb.MoveLeaderResponse)(r))
}

func (p *protobufPrinter) downgraded(_ string, r *clientv3.DowngradeResponse) error {
	return p.print((*etcdserverpb.DowngradeResponse)(r))
}

func (p *protobufPrinter) alarms(r *clientv3.AlarmResponse) error {
	return p.print((*etcdserverpb.AlarmResponse)(r))
}
