package ctl

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// simplePrinter writes for people: one thing a line.
type simplePrinter struct {
	out       *bufio.Writer
	hex       bool
	valueOnly bool // leave out keys of a get
	decode    bool // print Kubernetes' objects for people
	documents int  // values that a get with both printed
}

func (p *simplePrinter) line(b []byte) {
	if p.hex {
		for _, c := range b {
			fmt.Fprintf(p.out, `\x%02x`, c)
		}
	} else {
		_, _ = p.out.Write(b) // kept by the writer until the flush at the end
	}
	_ = p.out.WriteByte('\n')
}

func (p *simplePrinter) kv(kv *mvccpb.KeyValue) {
	p.line(kv.GetKey())
	p.value(kv)
}

func (p *simplePrinter) put(r *clientv3.PutResponse) error {
	fmt.Fprintln(p.out, "OK")
	if kv := (*etcdserverpb.PutResponse)(r).GetPrevKv(); kv != nil {
		p.kv(kv)
	}
	return nil
}

func (p *simplePrinter) get(r *clientv3.GetResponse) error {
	for _, kv := range r.Kvs {
		if !p.valueOnly {
			p.line(kv.GetKey())
		} else if p.decode { // so that it is YAML of many documents
			if p.documents++; p.documents > 1 {
				fmt.Fprintln(p.out, "---")
			}
		}
		p.value(kv)
	}
	return nil
}

func (p *simplePrinter) del(r *clientv3.DeleteResponse) error {
	fmt.Fprintln(p.out, r.Deleted)
	for _, kv := range r.PrevKvs {
		p.kv(kv)
	}
	return nil
}

func (p *simplePrinter) txn(r *clientv3.TxnResponse) error {
	if r.Succeeded {
		fmt.Fprintln(p.out, "SUCCESS")
	} else {
		fmt.Fprintln(p.out, "FAILURE")
	}
	for _, op := range r.Responses {
		fmt.Fprintln(p.out)
		if err := printOp(p, op); err != nil {
			return err
		}
	}
	return nil
}

// printOp prints the answer to one request of a transaction.
func printOp(p printer, op *etcdserverpb.ResponseOp) error {
	switch r := op.GetResponse().(type) {
	case *etcdserverpb.ResponseOp_ResponsePut:
		return p.put((*clientv3.PutResponse)(r.ResponsePut))
	case *etcdserverpb.ResponseOp_ResponseRange:
		return p.get((*clientv3.GetResponse)(r.ResponseRange))
	case *etcdserverpb.ResponseOp_ResponseDeleteRange:
		return p.del((*clientv3.DeleteResponse)(r.ResponseDeleteRange))
	case *etcdserverpb.ResponseOp_ResponseTxn:
		return p.txn((*clientv3.TxnResponse)(r.ResponseTxn))
	}
	return fmt.Errorf("the server answered a request of the transaction with %T, which this version does not know", op.GetResponse())
}

func (p *simplePrinter) watch(r *clientv3.WatchResponse) error {
	for _, e := range r.Events {
		fmt.Fprintln(p.out, e.Type)
		if e.PrevKv != nil {
			p.kv(e.PrevKv)
		}
		p.kv(e.Kv)
	}
	return nil
}

func (p *simplePrinter) grant(r *clientv3.LeaseGrantResponse) error {
	fmt.Fprintf(p.out, "lease %016x granted with TTL(%ds)\n", int64(r.ID), r.TTL)
	return nil
}

func (p *simplePrinter) revoke(id clientv3.LeaseID, _ *clientv3.LeaseRevokeResponse) error {
	fmt.Fprintf(p.out, "lease %016x revoked\n", int64(id))
	return nil
}

func (p *simplePrinter) keepAlive(r *clientv3.LeaseKeepAliveResponse) error {
	fmt.Fprintf(p.out, "lease %016x keepalived with TTL(%d)\n", int64(r.ID), r.TTL)
	return nil
}

func (p *simplePrinter) timeToLive(r *clientv3.LeaseTimeToLiveResponse, keys bool) error {
	if r.TTL == -1 {
		fmt.Fprintf(p.out, "lease %016x already expired\n", int64(r.ID))
		return nil
	}
	fmt.Fprintf(p.out, "lease %016x granted with TTL(%ds), remaining(%ds)", int64(r.ID), r.GrantedTTL, r.TTL)
	if keys {
		texts := make([]string, len(r.Keys))
		for i, k := range r.Keys {
			texts[i] = string(k)
		}
		fmt.Fprintf(p.out, ", attached keys([%s])", strings.Join(texts, " "))
	}
	fmt.Fprintln(p.out)
	return nil
}

func (p *simplePrinter) leases(r *clientv3.LeaseLeasesResponse) error {
	fmt.Fprintf(p.out, "found %d leases\n", len(r.Leases))
	for _, l := range r.Leases {
		fmt.Fprintf(p.out, "%016x\n", int64(l.ID))
	}
	return nil
}

func (p *simplePrinter) members(r *clientv3.MemberListResponse) error {
	for _, m := range r.Members {
		fmt.Fprintln(p.out, strings.Join(memberRow(m), ", "))
	}
	return nil
}

func (p *simplePrinter) memberAdded(r *clientv3.MemberAddResponse) error {
	as := ""
	if r.Member.GetIsLearner() {
		as = "as learner "
	}
	fmt.Fprintf(p.out, "Member %16x added %sto cluster %s\n", r.Member.GetID(), as, clusterOf(r.Header))
	return nil
}

func (p *simplePrinter) memberRemoved(id uint64, r *clientv3.MemberRemoveResponse) error {
	fmt.Fprintf(p.out, "Member %16x removed from cluster %s\n", id, clusterOf(r.Header))
	return nil
}

func (p *simplePrinter) memberUpdated(id uint64, r *clientv3.MemberUpdateResponse) error {
	fmt.Fprintf(p.out, "Member %16x updated in cluster %s\n", id, clusterOf(r.Header))
	return nil
}

func (p *simplePrinter) memberPromoted(id uint64, r *clientv3.MemberPromoteResponse) error {
	fmt.Fprintf(p.out, "Member %16x promoted in cluster %s\n", id, clusterOf(r.Header))
	return nil
}

func (p *simplePrinter) leaderMoved(from, to uint64, _ *clientv3.MoveLeaderResponse) error {
	fmt.Fprintf(p.out, "Leadership transferred from %s to %s\n", hexID(from), hexID(to))
	return nil
}

func (p *simplePrinter) downgraded(command string, r *clientv3.DowngradeResponse) error {
	fmt.Fprintf(p.out, "Downgrade %s success, cluster version %s\n", command, (*etcdserverpb.DowngradeResponse)(r).GetVersion())
	return nil
}

func (p *simplePrinter) alarms(r *clientv3.AlarmResponse) error {
	for _, a := range r.Alarms {
		fmt.Fprintf(p.out, "memberID:%d alarm:%v\n", a.GetMemberID(), a.GetAlarm())
	}
	return nil
}

func (p *simplePrinter) health(all []endpointHealth, errors io.Writer) error {
	for _, h := range all {
		if h.Health {
			fmt.Fprintf(p.out, "%s is healthy: successfully committed proposal: took = %s\n", h.Endpoint, h.Took)
		} else {
			fmt.Fprintf(errors, "%s is unhealthy: failed to commit proposal: %s\n", h.Endpoint, h.Error)
		}
	}
	return nil
}

func (p *simplePrinter) statuses(all []endpointStatus) error {
	for _, s := range all {
		fmt.Fprintln(p.out, strings.Join(statusRow(s), ", "))
	}
	return nil
}

func (p *simplePrinter) hashes(all []endpointHashKV) error {
	for _, h := range all {
		fmt.Fprintln(p.out, strings.Join(hashRow(h), ", "))
	}
	return nil
}
