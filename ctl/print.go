package ctl

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/terminal"
)

// printer writes answers in one output format. A format that has no form for an answer returns an error with exit code exitFormat.
type printer interface {
	put(*clientv3.PutResponse) error
	get(*clientv3.GetResponse) error
	del(*clientv3.DeleteResponse) error
	txn(*clientv3.TxnResponse) error
	watch(*clientv3.WatchResponse) error

	grant(*clientv3.LeaseGrantResponse) error
	revoke(clientv3.LeaseID, *clientv3.LeaseRevokeResponse) error
	keepAlive(*clientv3.LeaseKeepAliveResponse) error
	// timeToLive is told if the attached keys were asked for.
	timeToLive(r *clientv3.LeaseTimeToLiveResponse, keys bool) error
	leases(*clientv3.LeaseLeasesResponse) error

	members(*clientv3.MemberListResponse) error
	memberAdded(*clientv3.MemberAddResponse) error
	memberRemoved(uint64, *clientv3.MemberRemoveResponse) error
	memberUpdated(uint64, *clientv3.MemberUpdateResponse) error
	memberPromoted(uint64, *clientv3.MemberPromoteResponse) error
	leaderMoved(from, to uint64, r *clientv3.MoveLeaderResponse) error
	// downgraded is told which command was answered.
	downgraded(command string, r *clientv3.DowngradeResponse) error
	alarms(*clientv3.AlarmResponse) error
	// health may tell of endpoints that are not healthy on errors instead.
	health(all []endpointHealth, errors io.Writer) error
	statuses([]endpointStatus) error
	hashes([]endpointHashKV) error

	authPrinter
}

func newPrinter(format string, out *bufio.Writer, hex bool) (printer, error) {
	switch format {
	case "simple":
		return &simplePrinter{out: out, hex: hex}, nil
	case "fields":
		return &fieldsPrinter{refuser: refuser{format}, out: out, hex: hex}, nil
	case "json":
		return &jsonPrinter{out: out, hex: hex}, nil
	case "protobuf":
		return &protobufPrinter{refuser: refuser{format}, out: out}, nil
	case "table":
		return &tablePrinter{refuser: refuser{format}, out: out}, nil
	}
	return nil, exit(exitFormat, errUnsupportedFormat)
}

// refuser refuses every answer. A format that has a form for some answers embeds it.
type refuser struct{ format string }

func (r refuser) refuse() error {
	return exit(exitFormat, fmt.Errorf("%s not supported as output format", r.format))
}

func (r refuser) put(*clientv3.PutResponse) error                               { return r.refuse() }
func (r refuser) get(*clientv3.GetResponse) error                               { return r.refuse() }
func (r refuser) del(*clientv3.DeleteResponse) error                            { return r.refuse() }
func (r refuser) txn(*clientv3.TxnResponse) error                               { return r.refuse() }
func (r refuser) watch(*clientv3.WatchResponse) error                           { return r.refuse() }
func (r refuser) grant(*clientv3.LeaseGrantResponse) error                      { return r.refuse() }
func (r refuser) revoke(clientv3.LeaseID, *clientv3.LeaseRevokeResponse) error  { return r.refuse() }
func (r refuser) timeToLive(*clientv3.LeaseTimeToLiveResponse, bool) error      { return r.refuse() }
func (r refuser) leases(*clientv3.LeaseLeasesResponse) error                    { return r.refuse() }
func (r refuser) members(*clientv3.MemberListResponse) error                    { return r.refuse() }
func (r refuser) memberAdded(*clientv3.MemberAddResponse) error                 { return r.refuse() }
func (r refuser) memberRemoved(uint64, *clientv3.MemberRemoveResponse) error    { return r.refuse() }
func (r refuser) memberUpdated(uint64, *clientv3.MemberUpdateResponse) error    { return r.refuse() }
func (r refuser) memberPromoted(uint64, *clientv3.MemberPromoteResponse) error  { return r.refuse() }
func (r refuser) leaderMoved(_, _ uint64, _ *clientv3.MoveLeaderResponse) error { return r.refuse() }
func (r refuser) downgraded(string, *clientv3.DowngradeResponse) error          { return r.refuse() }
func (r refuser) alarms(*clientv3.AlarmResponse) error                          { return r.refuse() }
func (r refuser) health([]endpointHealth, io.Writer) error                      { return r.refuse() }
func (r refuser) statuses([]endpointStatus) error                               { return r.refuse() }
func (r refuser) hashes([]endpointHashKV) error                                 { return r.refuse() }

// keepAlive refuses nil as well as an answer.
func (r refuser) keepAlive(*clientv3.LeaseKeepAliveResponse) error { return r.refuse() }

func hexID(id uint64) string { return strconv.FormatUint(id, 16) }

func yesNo(b bool) string { return strconv.FormatBool(b) }

// statusHeader and statusRow are the columns of a member's status, for the formats simple and table.
var statusHeader = []string{
	"Endpoint", "ID", "Version", "Storage Version", "DB Size", "In Use", "Percentage Not In Use", "Quota", "Is Leader",
	"Is Learner", "Raft Term", "Raft Index", "Raft Applied Index", "Errors", "Downgrade Target Version", "Downgrade Enabled",
}

func statusRow(s endpointStatus) []string {
	r := (*etcdserverpb.StatusResponse)(s.Status)
	unused := int64(0)
	if r.GetDbSize() > 0 {
		unused = 100 - r.GetDbSizeInUse()*100/r.GetDbSize()
	}
	return []string{
		s.Endpoint, hexID(r.GetHeader().GetMemberId()), r.GetVersion(), r.GetStorageVersion(),
		bytesText(r.GetDbSize()), bytesText(r.GetDbSizeInUse()), strconv.FormatInt(unused, 10) + "%", bytesText(r.GetDbSizeQuota()),
		yesNo(r.GetLeader() == r.GetHeader().GetMemberId()), yesNo(r.GetIsLearner()),
		strconv.FormatUint(r.GetRaftTerm(), 10), strconv.FormatUint(r.GetRaftIndex(), 10), strconv.FormatUint(r.GetRaftAppliedIndex(), 10),
		strings.Join(r.GetErrors(), ", "), r.GetDowngradeInfo().GetTargetVersion(), yesNo(r.GetDowngradeInfo().GetEnabled()),
	}
}

// bytesText writes a size with two digits or more, in units of 1000.
func bytesText(n int64) string { return terminal.Bytes(n) }

// hashHeader and hashRow are the columns of a hash, for the formats simple and table.
var hashHeader = []string{"Endpoint", "Hash", "Hash Revision"}

func hashRow(h endpointHashKV) []string {
	r := (*etcdserverpb.HashKVResponse)(h.HashKV)
	return []string{h.Endpoint, strconv.FormatUint(uint64(r.GetHash()), 10), strconv.FormatInt(r.GetHashRevision(), 10)}
}
