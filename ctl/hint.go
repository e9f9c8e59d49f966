package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// hintWithin bounds each step of the look at an endpoint after a command failed.
const hintWithin = time.Second

// diagnosis is what is behind an error. The zero value says that nothing is known.
type diagnosis struct {
	what string // in place of an error that says nothing by itself
	hint string // the cause, and what to do
}

// diagnose finds out what is behind an error: by its text if a server sent it, else by a look at the endpoints.
func (t *tool) diagnose(err error, endpoints ...string) diagnosis {
	for _, h := range errorHints {
		if strings.Contains(err.Error(), h.text) {
			return diagnosis{hint: strings.ReplaceAll(h.hint, "$tool", t.name)}
		}
	}
	if !nobodyAnswered(err) {
		return diagnosis{}
	}
	if len(endpoints) == 0 {
		endpoints = t.dialed
	}
	return t.lookBehind(context.WithoutCancel(t.ctx), endpoints)
}

// errorHints explain what servers refuse. $tool is how the tool was called.
var errorHints = []struct{ text, hint string }{
	{"not enough started members", "after this change fewer voters than a quorum would have started. Start those that `$tool member list` shows as unstarted, " +
		"or remove them, first; a learner can be added at any time"},
	{"etcdserver: unhealthy cluster", "too few voters have been connected for the last 5 s to risk this change; `$tool endpoint health --cluster` shows who is missing. " +
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
	{"database space exceeded", "the store is at its quota. Deletes and compaction still work: delete what is not needed, then `$tool compaction` with the revision of `$tool endpoint status -w json`; " +
		"`$tool du` shows what is large; `$tool alarm disarm` ends the alarm if it does not end by itself"},
	{"corrupt cluster", "the members found that their data differs, and refuse to go on: `$tool doctor` shows whose, and the command that rebuilds that member from the others, which clears the alarm, too"},
	{"user name is empty", "authentication is on: give --user name:password"},
	{"invalid auth token", "the token has expired or is of another cluster; give --user name:password instead of --auth-jwt-token"},
	{"authentication failed, invalid user ID or password", "check --user and --password; `$tool user list` (as root) shows who there is"},
	{"etcdserver: permission denied", "the user's roles do not allow it: `$tool user get NAME --detail` (as root) shows what they do"},
	{"required revision has been compacted", "history below the compact revision is gone: leave out --rev, or give a revision that is not older than the one of the last compaction"},
	{"request is too large", "the server takes requests of --max-request-bytes (1.5 MiB unless set): write less at once"},
	{"too many requests", "the members cannot keep up: see `$tool top`, and fsync times in `$tool doctor`"},
	{"etcdserver: no leader", "the member knows no leader, so a quorum may be lost: `$tool doctor` tells more"},
	{"etcdserver: request timed out", "the cluster could not agree in time: a quorum may be lost, or a disk slow: `$tool doctor` tells more"},
}

// nobodyAnswered says that an error tells no more than that there was no answer.
func nobodyAnswered(err error) bool {
	code := codeOf(err)
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errUnhealthy) || errors.Is(err, errSessionExpired) ||
		code == codes.DeadlineExceeded || code == codes.Unavailable ||
		strings.Contains(err.Error(), "unexpected HTTP status code") // who answers is no gRPC server
}

// codeOf is the code of an error, be it gRPC's or one that etcd's client made of it.
func codeOf(err error) codes.Code {
	if e, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return e.Code()
	}
	return status.Code(err)
}

// maxLooks bounds how many endpoints are looked at after an error.
const maxLooks = 16

// lookBehind looks at endpoints that did not answer, all at once, and tells of the first with which something is wrong.
func (t *tool) lookBehind(ctx context.Context, endpoints []string) diagnosis {
	p, err := t.newProber()
	if err != nil {
		return diagnosis{}
	}
	p.timeout = min(p.timeout, hintWithin)
	for _, r := range p.lookAll(ctx, endpoints[:min(len(endpoints), maxLooks)]) {
		if f, ok := r.worst(); ok {
			return diagnosis{what: f.What, hint: join(f.Cause, f.Cure)}
		}
		if r.status != nil && r.status.Leader == 0 {
			return diagnosis{
				what: fmt.Sprintf("the member at %s knows no leader", r.address),
				hint: fmt.Sprintf("a quorum of the voters is not running or not connected: `%s doctor` shows who is missing", t.name),
			}
		}
	}
	return diagnosis{}
}

// lookAll looks at endpoints side by side.
func (p *prober) lookAll(ctx context.Context, endpoints []string) []*reach {
	looks := make([]*reach, len(endpoints))
	slots := make(chan struct{}, healthProbes)
	var looking sync.WaitGroup
	for i, endpoint := range endpoints {
		looking.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			looks[i] = p.look(ctx, endpoint)
		})
	}
	looking.Wait()
	return looks
}

// worst is the first finding that keeps clients away.
func (r *reach) worst() (finding, bool) {
	for _, f := range r.findings {
		if f.Severity >= failure {
			return f, true
		}
	}
	return finding{}, false
}

// join puts cause and cure into a line.
func join(cause, cure string) string {
	if cause == "" || cure == "" {
		return cause + cure
	}
	return cause + ". " + strings.ToUpper(cure[:1]) + cure[1:]
}

// tellError writes the line about a failed run, and what a person at the terminal would look at next. Called by etcdctl's name
// the line stays etcdctl's.
func (t *tool) tellError(err error) {
	d := t.diagnose(err)
	switch {
	case d.what == "":
		fmt.Fprintln(t.err, "Error:", err)
	case t.asEtcdctl():
		fmt.Fprintln(t.err, "Error:", err)
		d.hint = d.what + ": " + d.hint
	default:
		text, _, _ := strings.Cut(err.Error(), "\n")
		fmt.Fprintf(t.err, "Error: %s (%s)\n", d.what, text)
	}
	t.tellHint(d)
}

// tellHint writes what there is beyond an error that was told already.
func (t *tool) tellHint(d diagnosis) {
	if d.hint != "" {
		fmt.Fprintln(t.err, "Hint:", d.hint)
	}
}

// tellEndpoint writes what is behind an error of one endpoint, which was told already.
func (t *tool) tellEndpoint(err error, endpoint string) {
	d := t.diagnose(err, endpoint)
	if d.what != "" {
		d.hint = d.what + ": " + d.hint
	}
	t.tellHint(d)
}

// later are the groups of etcdctl that this version has not.
var later = map[string]string{
	"make-mirror": "mirroring", "check": "load checks",
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
