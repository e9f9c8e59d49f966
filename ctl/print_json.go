package ctl

import (
	"bufio"
	"encoding/json"
	"io"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// jsonPrinter writes one JSON object a line. Its names are those of the Go structures of etcd's client, not those of the JSON
// form of protobuf: numbers stay numbers.
type jsonPrinter struct {
	out *bufio.Writer
	hex bool
}

func (p *jsonPrinter) print(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = p.out.Write(append(b, '\n'))
	return err
}

func (p *jsonPrinter) put(r *clientv3.PutResponse) error    { return p.print(r) }
func (p *jsonPrinter) get(r *clientv3.GetResponse) error    { return p.print(r) }
func (p *jsonPrinter) del(r *clientv3.DeleteResponse) error { return p.print(r) }
func (p *jsonPrinter) txn(r *clientv3.TxnResponse) error {
	return p.print(newJSONTxn((*etcdserverpb.TxnResponse)(r)))
}
func (p *jsonPrinter) watch(r *clientv3.WatchResponse) error              { return p.print(r) }
func (p *jsonPrinter) grant(r *clientv3.LeaseGrantResponse) error         { return p.print(r) }
func (p *jsonPrinter) leases(r *clientv3.LeaseLeasesResponse) error       { return p.print(r) }
func (p *jsonPrinter) alarms(r *clientv3.AlarmResponse) error             { return p.print(r) }
func (p *jsonPrinter) health(all []endpointHealth, _ io.Writer) error     { return p.print(all) }
func (p *jsonPrinter) statuses(all []endpointStatus) error                { return p.print(all) }
func (p *jsonPrinter) hashes(all []endpointHashKV) error                  { return p.print(all) }
func (p *jsonPrinter) keepAlive(r *clientv3.LeaseKeepAliveResponse) error { return p.print(r) }

func (p *jsonPrinter) leaderMoved(_, _ uint64, r *clientv3.MoveLeaderResponse) error {
	return p.print(r)
}
func (p *jsonPrinter) downgraded(_ string, r *clientv3.DowngradeResponse) error { return p.print(r) }

func (p *jsonPrinter) revoke(_ clientv3.LeaseID, r *clientv3.LeaseRevokeResponse) error {
	return p.print(r)
}

func (p *jsonPrinter) timeToLive(r *clientv3.LeaseTimeToLiveResponse, _ bool) error {
	return p.print(r)
}

// Of all answers, --hex changes the IDs in those that list the members.

func (p *jsonPrinter) members(r *clientv3.MemberListResponse) error {
	return p.memberList(r, r.Header, nil, r.Members)
}

func (p *jsonPrinter) memberAdded(r *clientv3.MemberAddResponse) error {
	return p.memberList(r, r.Header, r.Member, r.Members)
}

func (p *jsonPrinter) memberRemoved(_ uint64, r *clientv3.MemberRemoveResponse) error {
	return p.memberList(r, r.Header, nil, r.Members)
}

func (p *jsonPrinter) memberUpdated(_ uint64, r *clientv3.MemberUpdateResponse) error {
	return p.memberList(r, r.Header, nil, r.Members)
}

func (p *jsonPrinter) memberPromoted(_ uint64, r *clientv3.MemberPromoteResponse) error {
	return p.memberList(r, r.Header, nil, r.Members)
}

// memberList writes an answer as it is, or its parts with IDs in hexadecimal.
func (p *jsonPrinter) memberList(answer any, h *etcdserverpb.ResponseHeader, added *etcdserverpb.Member, members []*etcdserverpb.Member) error {
	if !p.hex {
		return p.print(answer)
	}
	out := jsonMembers{Header: jsonHeader{
		ClusterID: hexID(h.GetClusterId()), MemberID: hexID(h.GetMemberId()), Revision: h.GetRevision(), RaftTerm: h.GetRaftTerm(),
	}}
	if added != nil {
		out.Member = new(newJSONMember(added))
	}
	for _, m := range members {
		out.Members = append(out.Members, newJSONMember(m))
	}
	return p.print(out)
}

func newJSONMember(m *etcdserverpb.Member) jsonMember {
	return jsonMember{
		ID: hexID(m.GetID()), Name: m.GetName(), PeerURLs: m.GetPeerURLs(), ClientURLs: m.GetClientURLs(), IsLearner: m.GetIsLearner(),
	}
}

type jsonMembers struct {
	Header  jsonHeader   `json:"header"`
	Member  *jsonMember  `json:"member,omitempty"`
	Members []jsonMember `json:"members,omitempty"`
}

type jsonHeader struct {
	ClusterID string `json:"cluster_id"`
	MemberID  string `json:"member_id"`
	Revision  int64  `json:"revision,omitempty"`
	RaftTerm  uint64 `json:"raft_term,omitempty"`
}

type jsonMember struct {
	ID         string   `json:"ID"`
	Name       string   `json:"name,omitempty"`
	PeerURLs   []string `json:"peerURLs,omitempty"`
	ClientURLs []string `json:"clientURLs,omitempty"`
	IsLearner  bool     `json:"isLearner,omitempty"`
}

// jsonTxn is a TxnResponse with names for its alternatives, which the generated structures have none for.
type jsonTxn struct {
	Header    *etcdserverpb.ResponseHeader `json:"header,omitempty"`
	Succeeded bool                         `json:"succeeded,omitempty"`
	Responses []jsonResponse               `json:"responses,omitempty"`
}

type jsonResponse struct {
	Response jsonOp `json:"Response"`
}

type jsonOp struct {
	Range       *etcdserverpb.RangeResponse       `json:"response_range,omitempty"`
	Put         *etcdserverpb.PutResponse         `json:"response_put,omitempty"`
	DeleteRange *etcdserverpb.DeleteRangeResponse `json:"response_delete_range,omitempty"`
	Txn         *jsonTxn                          `json:"response_txn,omitempty"`
}

func newJSONTxn(r *etcdserverpb.TxnResponse) *jsonTxn {
	if r == nil {
		return nil
	}
	t := &jsonTxn{Header: r.GetHeader(), Succeeded: r.GetSucceeded()}
	for _, op := range r.GetResponses() {
		t.Responses = append(t.Responses, jsonResponse{jsonOp{
			Range: op.GetResponseRange(), Put: op.GetResponsePut(), DeleteRange: op.GetResponseDeleteRange(), Txn: newJSONTxn(op.GetResponseTxn()),
		}})
	}
	return t
}
