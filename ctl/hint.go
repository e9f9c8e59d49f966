package ctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// hintWithin bounds the look at an endpoint after a command failed.
const hintWithin = time.Second

// hint says in a line what is behind an error and what to do, "" if there is nothing to say.
func (t *tool) hint(err error) string {
	if hint := t.clusterHint(err); hint != "" {
		return hint
	}
	return t.connectionHint(err)
}

// clusterHints explain refusals of changes of the cluster. $tool is how the tool was called.
var clusterHints = []struct{ text, hint string }{
	{"not enough started members", "after this change fewer voters than a quorum would have started. Start those that `$tool member list` shows as unstarted, " +
		"or remove them, first; a learner can be added at any time"},
	{"unhealthy cluster", "too few voters have been connected for the last 5 s to risk this change; `$tool endpoint health --cluster` shows who is missing. " +
		"Bring it back, or remove a member that is lost before adding another"},
	{"in sync with leader", "the learner has not started or lags behind: `$tool endpoint status --cluster` shows its raft applied index beside the leader's. Try again when it has caught up"},
	{"too many learner members", "promote or remove the learner that `$tool member list` shows, or start all members with a higher --max-learners"},
	{"can only promote a learner", "the member votes already, see `$tool member list`"},
	{"member not found", "IDs are hexadecimal, as in `$tool member list`; a member that was removed comes back only under a new ID, by `$tool member add`"},
	{"Peer URLs already exists", "another member has that URL, see `$tool member list`; a member that is gone must be removed before its address is used again"},
	{"given member URLs are invalid", "a peer URL is scheme, host and port alone, as http://10.0.0.1:2380"},
	{"URL scheme must be", "a peer URL is scheme, host and port alone, as http://10.0.0.1:2380"},
	{"no leader endpoint given", "only the leader can hand over: name all members by --endpoints; `$tool endpoint status --cluster` shows who leads"},
	{"etcdserver: not leader", "leadership has just moved; try again"},
	{"bad leader transferee", "the ID must be that of a voter, see `$tool member list`"},
	{"leader transfer took too long", "the member may be down or far behind: see `$tool endpoint status --cluster`. The old leader leads on"},
	{"wrong downgrade target version format", "a version is major.minor, as 3.6"},
	{"invalid downgrade target version", "a cluster goes down by one minor version at a time; the version it has: `$tool downgrade cancel` tells it, and changes nothing if no downgrade is under way"},
	{"downgrade job in progress", "`$tool downgrade cancel` ends it"},
	{"rpc not supported for learner", "a learner serves status and serializable reads only: name a voter by --endpoints"},
}

func (t *tool) clusterHint(err error) string {
	if t.asEtcdctl() {
		return ""
	}
	for _, h := range clusterHints {
		if strings.Contains(err.Error(), h.text) {
			return strings.ReplaceAll(h.hint, "$tool", t.name)
		}
	}
	return ""
}

// connectionHint says in a line why nobody answered, "" if that is not what failed or
// nothing can be said. It knocks at the first endpoint.
func (t *tool) connectionHint(err error) string {
	code := status.Code(err)
	if !errors.Is(err, context.DeadlineExceeded) && code != codes.DeadlineExceeded && code != codes.Unavailable || len(t.global.endpoints) == 0 {
		return ""
	}
	endpoint := t.global.endpoints[0]
	address := endpoint
	if _, rest, ok := strings.Cut(endpoint, "://"); ok {
		address = rest
	}
	if strings.HasPrefix(endpoint, "unix") {
		return ""
	}
	conn, dialErr := net.DialTimeout("tcp", address, hintWithin)
	if conn != nil {
		_ = conn.Close()
	}
	switch {
	case errors.Is(dialErr, syscall.ECONNREFUSED):
		return fmt.Sprintf("nothing listens at %s: is a member running there? `engram` starts one; --endpoints names another", address)
	case dialErr != nil:
		return fmt.Sprintf("%s cannot be reached: %v", address, dialErr)
	case strings.HasPrefix(endpoint, "https://"):
		return fmt.Sprintf("somebody listens at %s: if that is a member without TLS, use http://", address)
	}
	return ""
}

// later are the groups of etcdctl that this version has not.
var later = map[string]string{
	"snapshot": "snapshots", "make-mirror": "mirroring", "check": "load checks",
}

// laterHint says that a command is etcdctl's and not here yet, "" if it is
// neither.
func laterHint(args []string) string {
	for _, a := range args {
		if strings.HasPrefix(a, "-") {
			continue
		}
		if what := later[a]; what != "" {
			return fmt.Sprintf("%s: this version has no %s yet, see docs/compatibility.md", a, what)
		}
		return ""
	}
	return ""
}
