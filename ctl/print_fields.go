package ctl

import (
	"bufio"
	"fmt"
	"io"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// fieldsPrinter writes every field of an answer as `"Name" : value`.
type fieldsPrinter struct {
	refuser
	out *bufio.Writer
	hex bool
}

func (p *fieldsPrinter) field(name string, value any) {
	fmt.Fprintf(p.out, "\"%s\" : %v\n", name, value)
}

func (p *fieldsPrinter) text(name, value string) { fmt.Fprintf(p.out, "\"%s\" : %q\n", name, value) }

// id writes the ID of a cluster or a member.
func (p *fieldsPrinter) id(name string, id uint64) {
	if p.hex {
		p.field(name, hexID(id))
	} else {
		p.field(name, id)
	}
}

func (p *fieldsPrinter) lease(name string, id int64) {
	if p.hex {
		p.field(name, fmt.Sprintf("%016x", id))
	} else {
		p.field(name, id)
	}
}

func (p *fieldsPrinter) header(h *etcdserverpb.ResponseHeader) {
	p.id("ClusterID", h.GetClusterId())
	p.id("MemberID", h.GetMemberId())
	if h.GetRevision() > 0 {
		p.field("Revision", h.GetRevision())
	}
	p.field("RaftTerm", h.GetRaftTerm())
}

func (p *fieldsPrinter) kv(prefix string, kv *mvccpb.KeyValue) {
	p.text(prefix+"Key", string(kv.GetKey()))
	p.field(prefix+"CreateRevision", kv.GetCreateRevision())
	p.field(prefix+"ModRevision", kv.GetModRevision())
	p.field(prefix+"Version", kv.GetVersion())
	p.text(prefix+"Value", string(kv.GetValue()))
	p.lease(prefix+"Lease", kv.GetLease())
}

func (p *fieldsPrinter) put(r *clientv3.PutResponse) error {
	p.header(r.Header)
	if r.PrevKv != nil {
		p.kv("Prev", r.PrevKv)
	}
	return nil
}

func (p *fieldsPrinter) get(r *clientv3.GetResponse) error {
	p.header(r.Header)
	for _, kv := range r.Kvs {
		p.kv("", kv)
	}
	p.field("More", r.More)
	p.field("Count", r.Count)
	return nil
}

func (p *fieldsPrinter) del(r *clientv3.DeleteResponse) error {
	p.header(r.Header)
	p.field("Deleted", r.Deleted)
	for _, kv := range r.PrevKvs {
		p.kv("Prev", kv)
	}
	return nil
}

func (p *fieldsPrinter) txn(r *clientv3.TxnResponse) error {
	p.header(r.Header)
	p.field("Succeeded", r.Succeeded)
	for _, op := range r.Responses {
		if err := printOp(p, op); err != nil {
			return err
		}
	}
	return nil
}

func (p *fieldsPrinter) watch(r *clientv3.WatchResponse) error {
	p.header(r.Header)
	for _, e := range r.Events {
		p.field("Type", e.Type)
		if e.PrevKv != nil {
			p.kv("Prev", e.PrevKv)
		}
		p.kv("", e.Kv)
	}
	return nil
}

func (p *fieldsPrinter) grant(r *clientv3.LeaseGrantResponse) error {
	p.header(r.ResponseHeader)
	p.lease("ID", int64(r.ID))
	p.field("TTL", r.TTL)
	return nil
}

func (p *fieldsPrinter) revoke(_ clientv3.LeaseID, r *clientv3.LeaseRevokeResponse) error {
	p.header(r.Header)
	return nil
}

func (p *fieldsPrinter) keepAlive(r *clientv3.LeaseKeepAliveResponse) error {
	p.header(r.ResponseHeader)
	p.lease("ID", int64(r.ID))
	p.field("TTL", r.TTL)
	return nil
}

func (p *fieldsPrinter) timeToLive(r *clientv3.LeaseTimeToLiveResponse, _ bool) error {
	p.header(r.ResponseHeader)
	p.lease("ID", int64(r.ID))
	p.field("TTL", r.TTL)
	p.field("GrantedTTL", r.GrantedTTL)
	for _, k := range r.Keys {
		p.text("Key", string(k))
	}
	return nil
}

func (p *fieldsPrinter) leases(r *clientv3.LeaseLeasesResponse) error {
	p.header(r.ResponseHeader)
	for _, l := range r.Leases {
		p.lease("ID", int64(l.ID))
	}
	return nil
}

func (p *fieldsPrinter) members(r *clientv3.MemberListResponse) error {
	p.header(r.Header)
	for _, m := range r.Members {
		p.id("ID", m.GetID())
		p.text("Name", m.GetName())
		for _, u := range m.GetPeerURLs() {
			p.text("PeerURL", u)
		}
		for _, u := range m.GetClientURLs() {
			p.text("ClientURL", u)
		}
		p.field("IsLearner", m.GetIsLearner())
		fmt.Fprintln(p.out)
	}
	return nil
}

func (p *fieldsPrinter) alarms(r *clientv3.AlarmResponse) error {
	p.header(r.Header)
	for _, a := range r.Alarms {
		p.id("MemberID", a.GetMemberID())
		p.field("AlarmType", a.GetAlarm())
		fmt.Fprintln(p.out)
	}
	return nil
}

func (p *fieldsPrinter) health(all []endpointHealth, _ io.Writer) error {
	for _, h := range all {
		p.text("Endpoint", h.Endpoint)
		p.field("Health", h.Health)
		p.field("Took", h.Took)
		p.field("Error", h.Error)
		fmt.Fprintln(p.out)
	}
	return nil
}

func (p *fieldsPrinter) statuses(all []endpointStatus) error {
	for _, s := range all {
		r := (*etcdserverpb.StatusResponse)(s.Status)
		p.header(r.GetHeader())
		p.text("Version", r.GetVersion())
		p.text("StorageVersion", r.GetStorageVersion())
		p.field("DBSize", r.GetDbSize())
		p.field("DBSizeInUse", r.GetDbSizeInUse())
		p.field("DBSizeQuota", r.GetDbSizeQuota())
		p.field("Leader", r.GetLeader()) // decimal even with --hex, as in etcdctl
		p.field("IsLearner", r.GetIsLearner())
		p.field("RaftIndex", r.GetRaftIndex())
		p.field("RaftAppliedIndex", r.GetRaftAppliedIndex())
		p.field("Errors", r.GetErrors())
		p.text("Endpoint", s.Endpoint)
		p.text("DowngradeTargetVersion", r.GetDowngradeInfo().GetTargetVersion())
		p.field("DowngradeEnabled", r.GetDowngradeInfo().GetEnabled())
		fmt.Fprintln(p.out)
	}
	return nil
}

func (p *fieldsPrinter) hashes(all []endpointHashKV) error {
	for _, h := range all {
		r := (*etcdserverpb.HashKVResponse)(h.HashKV)
		p.header(r.GetHeader())
		p.text("Endpoint", h.Endpoint)
		p.field("Hash", r.GetHash())
		p.field("HashRevision", r.GetHashRevision())
		fmt.Fprintln(p.out)
	}
	return nil
}
