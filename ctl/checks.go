package ctl

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-semver/semver"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// What is told from which figure on.
const (
	quotaWarning, quotaFailure         = 0.80, 0.90 // of the quota
	syncWarning, syncFailure           = 0.010, 0.100
	commitWarning, commitFailure       = 0.025, 0.250 // seconds, of 99 in 100
	roundTripWarning                   = 0.064
	fewSamples                         = 100        // below, a quantile says little
	lagWarning, lagFailure             = 1000, 5000 // log entries; with so many not applied a member refuses writes
	changesPerHour                     = 1.0        // of leaders
	filesWarning                       = 0.8        // of the limit
	clockWarning, clockFailure         = time.Second, 5 * time.Second
	valueNote, valueWarning            = 256 << 10, 1 << 20 // bytes of a record
	crowdedKeys                        = 100_000
	manyKeys                           = 5_000_000
	manyLeases                         = 50_000
	historyBytes                       = 64 << 20
	historyShare                       = 2.0      // of the live bytes
	hotShare, hotRate                  = 0.5, 500 // of a member's requests, and a second
	fragmentedShare                    = 0.5
	fragmentedBytes                    = 256 << 20
	retainedRevisions            int64 = 1_000_000
)

// findings judges a survey: a function of what was learned, without a look at anything else.
func (s *survey) findings() []finding {
	c := &checker{survey: s}
	c.reachability()
	if c.nobody() {
		sortFindings(c.found)
		return c.found
	}
	for _, check := range []func(){
		c.quorum, c.leaders, c.identity, c.membership, c.versions, c.alarmsOn, c.quota, c.learners, c.lag, c.hashes, c.clocks, c.latency, c.leaderChanges,
		c.files, c.certificates, c.largeValues, c.crowds, c.history, c.hot, c.leaseCount, c.authentication,
	} {
		check()
	}
	sortFindings(c.found)
	return c.found
}

// checker collects findings.
type checker struct {
	*survey
	found []finding
}

func (c *checker) add(s severity, check string, where any, what, cause, cure string) {
	f := finding{Severity: s, Check: check, What: what, Cause: cause, Cure: strings.ReplaceAll(cure, "$tool", c.tool)}
	if where != nil {
		f.Where = fmt.Sprint(where)
	}
	c.found = append(c.found, f)
}

// graded is the severity of a figure, and if it is worth telling at all.
func graded(value, warn, fail float64) (severity, bool) {
	switch {
	case value >= fail:
		return failure, true
	case value >= warn:
		return warning, true
	}
	return note, false
}

// reachability passes on what the looks at endpoints and members have found.
func (c *checker) reachability() {
	var looks []*reach
	looks = append(looks, c.reached...)
	for _, m := range c.members {
		if m.reach != nil && !slices.Contains(looks, m.reach) {
			looks = append(looks, m.reach)
		}
	}
	for _, r := range looks {
		for _, f := range r.findings {
			if i := slices.IndexFunc(c.members, func(m *memberReport) bool { return m.reach == r && m.name != "" }); i >= 0 {
				f.Where = c.members[i].String()
			}
			c.found = append(c.found, f)
		}
	}
}

// nobody says that no member can be asked, so that there is nothing else to judge, and adds that.
func (c *checker) nobody() bool {
	if c.loginErr != nil && !slices.ContainsFunc(c.members, func(m *memberReport) bool { return m.status != nil }) {
		cure := "give --user name:password"
		if !errors.Is(c.loginErr, rpctypes.ErrUserEmpty) {
			cure = "check --user and --password (or --auth-jwt-token)"
		}
		c.add(unreachable, "login", nil, "the members answer only those who log in", c.loginErr.Error(), cure)
		return true
	}
	if !slices.ContainsFunc(c.reached, func(r *reach) bool { return r.usable }) {
		c.add(unreachable, "unreachable", nil, "no member was reached, for the reasons that follow", "", "")
		return true
	}
	return false
}

func (c *checker) voters() (voters, answering []*memberReport) {
	for _, m := range c.members {
		if m.member == nil || m.member.IsLearner {
			continue
		}
		voters = append(voters, m)
		if m.status != nil && m.status.Leader != 0 {
			answering = append(answering, m)
		}
	}
	return voters, answering
}

// bringBack says what to do about voters that do not answer, while the others are enough.
func (c *checker) bringBack(voters, answering []*memberReport) string {
	down := slices.DeleteFunc(slices.Clone(voters), func(m *memberReport) bool { return slices.Contains(answering, m) })
	return "bring it back, or, if its data is lost, rebuild it: " + c.rebuildCommands(down...)
}

// rebuildCommands are the command lines that rebuild members, one after the other, by their IDs: a name may need quotes. etcdctl has no such
// command, so that it is Engram's whatever the tool is called.
func (c *checker) rebuildCommands(bad ...*memberReport) string {
	var endpoints, commands []string
	for _, m := range c.members {
		if m.status != nil && m.endpoint != "" && !slices.Contains(bad, m) {
			endpoints = append(endpoints, m.endpoint)
		}
	}
	for _, m := range bad {
		commands = append(commands, fmt.Sprintf("`engram ctl --endpoints %s rebuild %x`", strings.Join(endpoints, ","), m.id))
	}
	return strings.Join(commands, ", then ")
}

// quorum checks that the cluster can agree, and that it still could if one more member failed.
func (c *checker) quorum() {
	for _, m := range c.members {
		switch {
		case m.stranger != 0:
			c.add(failure, "client-url", m, fmt.Sprintf("its client URL leads to member %x", m.stranger), "it advertises an address that means another machine from here, such as localhost", "start it with --advertise-client-urls that every client can use")
		case m.member != nil && m.member.Name == "":
			c.add(warning, "unstarted", fmt.Sprintf("member %x (%s)", m.id, strings.Join(m.member.PeerURLs, ",")), "it was added and has not started yet", "", "start it with --initial-cluster-state=existing, or remove it: it counts for the quorum")
		case m.member != nil && len(m.member.ClientURLs) == 0:
			c.add(note, "client-url", m, "it has no client URL, so that it cannot be asked", "", "")
		case m.member != nil && m.status == nil && m.reach != nil && m.reach.usable:
			c.add(failure, "status", m, "it does not tell its status", fmt.Sprint(m.statusErr), "see its log")
		}
	}
	voters, answering := c.voters()
	n, quorum := len(voters), len(voters)/2+1
	down := missing(voters, answering)
	switch {
	case c.quorumErr == nil:
	case c.authDenied():
		return
	case !nobodyAnswered(c.quorumErr) && !errors.Is(c.quorumErr, errNoVoter):
		c.add(failure, "read", nil, "a read fails", c.quorumErr.Error(), "")
		return
	default:
		what := "no quorum answers: nothing can be written, and only serializable reads are served"
		cause := c.quorumErr.Error()
		if n > 0 {
			cause = fmt.Sprintf("%d of %d voters answer and know a leader, and %d must (%v)", len(answering), n, quorum, c.quorumErr)
		}
		silent := "the members that are down"
		if names := missing(voters, slices.DeleteFunc(slices.Clone(voters), func(m *memberReport) bool { return m.status == nil })); names != "" {
			silent = names
		}
		cure := "start " + silent + ". If too many have lost their data for good: restore a snapshot, or start one member with --force-new-cluster and add the others anew"
		c.add(failure, "quorum", nil, what, cause, cure)
		return
	}
	switch {
	case n == 0:
	case len(answering) < n && len(answering) <= quorum:
		c.add(failure, "quorum", nil, fmt.Sprintf("%d of %d voters answer: one more failure and nothing can be written", len(answering), n), "not answering: "+down, c.bringBack(voters, answering))
	case len(answering) < n:
		c.add(warning, "quorum", nil, fmt.Sprintf("%d of %d voters answer", len(answering), n), "not answering: "+down, c.bringBack(voters, answering))
	case n == 1:
		c.add(note, "quorum", nil, "there is one voter: when it fails, nobody serves", "", "three members survive the failure of one")
	}
	if n%2 == 0 && n > 0 {
		c.add(warning, "even", nil, fmt.Sprintf("there are %d voters, an even number", n), fmt.Sprintf("%d of them survive as many failures as %d do, %d, and more of them can fail", n, n-1, (n-1)/2), "add a member, or remove one")
	}
}

func (c *checker) authDenied() bool {
	return errors.Is(c.quorumErr, rpctypes.ErrUserEmpty) || errors.Is(c.quorumErr, rpctypes.ErrPermissionDenied) || errors.Is(c.quorumErr, rpctypes.ErrInvalidAuthToken)
}

// missing names those who do not answer.
func missing(all, answering []*memberReport) string {
	var names []string
	for _, m := range all {
		if !slices.Contains(answering, m) {
			names = append(names, m.String())
		}
	}
	return strings.Join(names, ", ")
}

// leaders checks that all who answer follow one leader.
func (c *checker) leaders() {
	leaders := map[uint64][]string{}
	for _, m := range c.members {
		if m.status == nil {
			continue
		}
		if m.status.Leader == 0 {
			c.add(failure, "leader", m, "it knows no leader", "it is cut off from the others, or no quorum of them runs", "see its log, and that the members reach each other's peer URLs")
			continue
		}
		leaders[m.status.Leader] = append(leaders[m.status.Leader], m.String())
	}
	if len(leaders) > 1 {
		var parts []string
		for id, names := range leaders {
			parts = append(parts, fmt.Sprintf("%s follow %x", strings.Join(names, ", "), id))
		}
		slices.Sort(parts)
		c.add(failure, "leader", nil, "members follow different leaders", strings.Join(parts, "; "), "if it stays so: the members do not reach each other, or are of different clusters")
	}
}

// identity checks that all endpoints are of one cluster.
func (c *checker) identity() {
	clusters := map[uint64][]string{}
	for _, m := range c.members {
		if m.status != nil {
			clusters[m.status.Header.GetClusterId()] = append(clusters[m.status.Header.GetClusterId()], m.endpoint)
		}
	}
	if len(clusters) < 2 {
		return
	}
	var parts []string
	for id, endpoints := range clusters {
		parts = append(parts, fmt.Sprintf("%s: cluster %x", strings.Join(endpoints, ", "), id))
	}
	slices.Sort(parts)
	c.add(failure, "cluster-id", nil, "the endpoints are of different clusters", strings.Join(parts, "; "), "name members of one cluster; a member that was started with another --initial-cluster or token began a cluster of its own: remove its data, and add it")
}

// membership tells of what is under way.
func (c *checker) membership() {
	for _, m := range c.members {
		if d := m.status.GetDowngradeInfo(); d.GetEnabled() {
			c.add(note, "downgrade", nil, fmt.Sprintf("a downgrade to %s is under way", d.TargetVersion), "", "replace the members' program one by one, or end it by `$tool downgrade cancel`")
			return
		}
	}
}

// versions checks that the members are of one minor version.
func (c *checker) versions() {
	minors := map[string][]string{}
	programs := map[bool][]string{}
	for _, m := range c.members {
		if m.status == nil {
			continue
		}
		v, err := semver.NewVersion(m.status.Version)
		if err != nil {
			continue
		}
		minor := fmt.Sprintf("%d.%d", v.Major, v.Minor)
		minors[minor] = append(minors[minor], m.String())
		programs[m.engram] = append(programs[m.engram], m.String())
	}
	if len(minors) > 1 {
		var parts []string
		for v, names := range minors {
			parts = append(parts, fmt.Sprintf("%s: %s", v, strings.Join(names, ", ")))
		}
		slices.Sort(parts)
		c.add(warning, "version", nil, "the members are of different versions", strings.Join(parts, "; "), "finish the upgrade: the cluster offers what the oldest of them can")
	}
	if len(programs) > 1 {
		c.add(note, "mixed", nil, "some members are etcd and some Engram", strings.Join(programs[false], ", ")+" are etcd", "this works; what Engram alone can do begins when the last etcd is replaced")
	}
}

// alarmsOn tells of alarms.
func (c *checker) alarmsOn() {
	for _, a := range c.alarms {
		where := any(fmt.Sprintf("member %x", a.MemberID))
		cure := "take a backup of each member, decide whose data is right, and rebuild the others with `engram ctl rebuild`; then `$tool alarm disarm`"
		for _, m := range c.members {
			if m.id == a.MemberID {
				where = m
				cure = "rebuild it from the others, which clears the alarm, too: " + c.rebuildCommands(m)
			}
		}
		switch a.Alarm {
		case pb.AlarmType_NOSPACE:
			c.add(failure, "nospace", where, "the alarm NOSPACE is on: writes are refused, deletes are not", "the store has reached its quota",
				"delete what is not needed (`$tool du` shows what is large), `$tool compaction` at the revision of `$tool endpoint status -w json`; with etcd then `$tool defrag` on each member; then `$tool alarm disarm`; or raise --quota-backend-bytes")
		case pb.AlarmType_CORRUPT:
			c.add(failure, "corrupt", where, "the alarm CORRUPT is on: the members refuse to go on", "its data was found to differ from the others'", cure)
		default:
			c.add(failure, "alarm", where, fmt.Sprintf("the alarm %v is on", a.Alarm), "", "see the member's log")
		}
	}
}

// quota checks how much of the quota is used.
func (c *checker) quota() {
	for _, m := range c.members {
		st := m.status
		if st == nil {
			continue
		}
		used := st.DbSize // what etcd counts
		if m.engram {
			used = st.DbSizeInUse
		}
		limit := st.DbSizeQuota
		if limit == 0 {
			v, _ := m.metrics.value("etcd_server_quota_backend_bytes")
			limit = int64(v)
		}
		if limit > 0 {
			if s, ok := graded(float64(used)/float64(limit), quotaWarning, quotaFailure); ok {
				c.add(s, "quota", m, fmt.Sprintf("%s of its quota of %s are used (%d%%)", bytesText(used), bytesText(limit), used*100/limit), "when all is used, writes are refused",
					"see what is large by `$tool du`; compact; delete; or raise --quota-backend-bytes")
			}
		}
		if free := st.DbSize - st.DbSizeInUse; !m.engram && free > fragmentedBytes && float64(free) > fragmentedShare*float64(st.DbSize) {
			c.add(warning, "fragmented", m, fmt.Sprintf("%s of %s on disk are free inside of the file", bytesText(free), bytesText(st.DbSize)), "etcd gives space back only when it is told to", "`$tool defrag` one member after the other, the leader last: it serves nobody meanwhile")
		}
	}
}

// leaderReport is the member that leads, nil if it is not among those who answer.
func (c *checker) leaderReport() *memberReport {
	for _, m := range c.members {
		if m.status != nil && m.status.Leader != 0 && m.status.Leader == m.id {
			return m
		}
	}
	return nil
}

// learners checks that learners are on their way.
func (c *checker) learners() {
	leader := c.leaderReport()
	for _, m := range c.members {
		if m.member == nil || !m.member.IsLearner || m.member.Name == "" {
			continue
		}
		switch {
		case m.status == nil:
			c.add(warning, "learner", m, "it is a learner, and does not answer", "it is down, or not reached from here", "start it, or remove it")
		case leader != nil && leader.status.RaftIndex > m.status.RaftAppliedIndex+lagWarning:
			c.add(warning, "learner", m, fmt.Sprintf("it is a learner, and %d entries behind the leader", leader.status.RaftIndex-m.status.RaftAppliedIndex), "it is still catching up, or its disk or network is slower than the load", "wait and look again; if it does not come nearer, see its log")
		default:
			c.add(note, "learner", m, "it is a learner and has caught up: it does not vote", "", fmt.Sprintf("`$tool member promote %x` makes a voter of it", m.id))
		}
	}
}

// lag checks that voters keep up. The members were not asked at the very same moment, so small differences mean nothing.
func (c *checker) lag() {
	leader := c.leaderReport()
	for _, m := range c.members {
		st := m.status
		if st == nil || m.member.GetIsLearner() {
			continue
		}
		if st.RaftIndex > st.RaftAppliedIndex {
			if s, ok := graded(float64(st.RaftIndex-st.RaftAppliedIndex), lagWarning, lagFailure); ok {
				c.add(s, "apply-lag", m, fmt.Sprintf("it has applied %d entries less than were committed", st.RaftIndex-st.RaftAppliedIndex), "its disk or CPU cannot keep up; beyond 5000 it refuses requests", "see what else runs on the machine, and `$tool top`")
			}
		}
		if leader != nil && leader != m && leader.status.RaftIndex > st.RaftIndex {
			if s, ok := graded(float64(leader.status.RaftIndex-st.RaftIndex), lagWarning, lagFailure); ok {
				c.add(s, "lag", m, fmt.Sprintf("it is %d entries behind the leader", leader.status.RaftIndex-st.RaftIndex), "its disk or network is slower than the load, or it was away and is catching up", "look again in a minute; if it does not come nearer, see fsync times and round-trip times")
			}
		}
	}
}

// hashes compares those of members that have compacted alike.
func (c *checker) hashes() {
	type moment struct{ revision, compacted int64 }
	by := map[moment]map[uint32][]*memberReport{}
	answers := 0
	for _, m := range c.members {
		if m.hash == nil {
			continue
		}
		answers++
		at := moment{m.hash.HashRevision, m.hash.CompactRevision}
		if by[at] == nil {
			by[at] = map[uint32][]*memberReport{}
		}
		by[at][m.hash.Hash] = append(by[at][m.hash.Hash], m)
	}
	for at, hashes := range by {
		if len(hashes) < 2 {
			continue
		}
		var parts []string
		for h, members := range hashes {
			parts = append(parts, fmt.Sprintf("%08x: %s", h, joined(members)))
		}
		slices.Sort(parts)
		cure := "look again to be sure. Then take a backup of each, decide whose data is right, and rebuild the others with `engram ctl rebuild`"
		if fewer := minority(hashes); len(fewer) > 0 {
			cure = "look again to be sure. Then take a backup of each, and rebuild those that are fewer: " + c.rebuildCommands(fewer...)
		}
		c.add(failure, "hash", nil, fmt.Sprintf("the members' data differs at revision %d", at.revision), strings.Join(parts, "; "), cure)
	}
	if len(by) > 1 {
		c.skip("hashes of all members: they have not compacted alike yet; look again in a minute")
	}
}

// minority are the members that do not have the hash of most, if there is one.
func minority(by map[uint32][]*memberReport) (fewer []*memberReport) {
	all, most := 0, uint32(0)
	for h, members := range by {
		all += len(members)
		if len(members) > len(by[most]) {
			most = h
		}
	}
	if 2*len(by[most]) <= all {
		return nil
	}
	for h, members := range by {
		if h != most {
			fewer = append(fewer, members...)
		}
	}
	slices.SortFunc(fewer, func(a, b *memberReport) int { return cmp.Compare(a.id, b.id) })
	return fewer
}

func joined(members []*memberReport) string {
	var names []string
	for _, m := range members {
		names = append(names, m.String())
	}
	return strings.Join(names, ", ")
}

// clocks compares the members' clocks with each other and with this machine's.
func (c *checker) clocks() {
	var first, last *memberReport
	for _, m := range c.members {
		if m.clock == nil {
			continue
		}
		if first == nil || m.clock.ahead < first.clock.ahead {
			first = m
		}
		if last == nil || m.clock.ahead > last.clock.ahead {
			last = m
		}
	}
	if first == nil {
		return
	}
	cure := "run NTP or chrony on all machines: leases and tokens do not depend on it, certificates and logs do"
	apart, within := last.clock.ahead-first.clock.ahead, last.clock.precision+first.clock.precision
	if s, ok := graded((apart - within).Seconds(), clockWarning.Seconds(), clockFailure.Seconds()); ok {
		c.add(s, "clock", nil, fmt.Sprintf("the clocks of %v and %v are %s apart (± %s)", first, last, short(apart), short(within)), "no time service keeps them together", cure)
		return
	}
	for _, m := range []*memberReport{first, last} {
		off := m.clock.ahead.Abs()
		if s, ok := graded((off - m.clock.precision).Seconds(), clockWarning.Seconds(), clockFailure.Seconds()); ok {
			c.add(min(s, warning), "clock", m, fmt.Sprintf("its clock is %s off this machine's (± %s)", short(off), short(m.clock.precision)), "no time service keeps them together", cure)
			return
		}
	}
}

// short writes a duration for people.
func short(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= 10*time.Millisecond:
		return d.Round(time.Millisecond).String()
	}
	return d.Round(10 * time.Microsecond).String()
}

// latencies are the histograms that tell of slow disks and networks.
var latencies = []struct {
	name, check, what, cause, cure string
	warn, fail                     float64 // seconds, of 99 in 100
}{
	{"etcd_disk_wal_fsync_duration_seconds", "fsync", "syncs of its log take up to %s (99 of 100)", "the disk is slow, or shared with something that writes much", "give it a disk of its own, an SSD: below 10ms is good", syncWarning, syncFailure},
	{"etcd_disk_backend_commit_duration_seconds", "apply", "committing to its store takes up to %s (99 of 100)", "the disk or CPU is slow for this load", "see what else runs on the machine, and `$tool top`", commitWarning, commitFailure},
	{"etcd_network_peer_round_trip_time_seconds", "round-trip", "messages to other members take up to %s there and back (99 of 100)", "the network between members is slow or loses packets", "if it cannot be better, raise --heartbeat-interval and --election-timeout on all members", roundTripWarning, math.Inf(1)},
}

// latency checks disks and network, by what the members have measured since they started.
func (c *checker) latency() {
	for _, m := range c.members {
		if m.status == nil {
			continue
		}
		if m.metrics == nil {
			c.skip("latency of disk and network, leader changes, open files: %v tells no metrics at its client URL, --metrics-urls may name where (%v)", m, cmp.Or(m.metricsErr, errNoHTTP))
			continue
		}
		for _, h := range latencies {
			seconds, n := m.metrics.quantile(h.name, 0.99)
			if s, ok := graded(seconds, h.warn*1.000001, h.fail); ok && n >= fewSamples {
				took := short(time.Duration(seconds * float64(time.Second)))
				if math.IsInf(seconds, 1) {
					took, s = "more than is measured", failure
				}
				c.add(s, h.check, m, fmt.Sprintf(h.what, took), h.cause, h.cure)
			}
		}
	}
}

// leaderChanges checks that leaders stay. The count is since each member's start; the first election is no change.
func (c *checker) leaderChanges() {
	var most float64
	var who *memberReport
	var up time.Duration
	for _, m := range c.members {
		changes, ok := m.metrics.value("etcd_server_leader_changes_seen_total")
		started, known := m.metrics.value("process_start_time_seconds")
		if !ok || !known {
			continue
		}
		age := c.now.Sub(time.Unix(int64(started), 0))
		if changes--; changes > most {
			most, who, up = changes, m, age
		}
	}
	if who != nil && most >= 3 && most/max(up.Hours(), 1) > changesPerHour {
		c.add(warning, "leader-changes", who, fmt.Sprintf("it has seen %.0f changes of leaders in %s", most, short(up)), "heartbeats come late: slow disks, full CPUs, pauses of the machine, or the network", "see fsync and round-trip times; give members CPU and disk of their own")
	}
}

func (c *checker) files() {
	for _, m := range c.members {
		used, _ := m.metrics.value("os_fd_used")
		limit, _ := m.metrics.value("os_fd_limit")
		if used, limit = max(used, orZero(m.metrics.value("process_open_fds"))), max(limit, orZero(m.metrics.value("process_max_fds"))); limit > 0 && used > filesWarning*limit {
			c.add(warning, "files", m, fmt.Sprintf("it has %.0f files and connections open, of %.0f that it may have", used, limit), "many clients, or clients that do not close connections", "raise the limit (LimitNOFILE), or see who connects by `$tool top`")
		}
	}
}

func orZero(v float64, _ bool) float64 { return v }

// certificates checks the one of --cert.
func (c *checker) certificates() {
	if c.ownCertificate == nil {
		return
	}
	left := c.ownCertificate.NotAfter.Sub(c.now)
	switch {
	case left <= 0:
		c.add(failure, "client-certificate", nil, fmt.Sprintf("the certificate of --cert has expired on %s", day(c.ownCertificate.NotAfter)), "", "renew it: members with --client-cert-auth refuse it")
	case left < expirySoon:
		c.add(warning, "client-certificate", nil, fmt.Sprintf("the certificate of --cert expires in %s, on %s", days(left), day(c.ownCertificate.NotAfter)), "", "renew it before")
	}
}

// largeValues tells of records near the largest request.
func (c *checker) largeValues() {
	var large []string
	s := note
	for _, row := range c.largest {
		size := row.Measure.GetBytes()
		if size < valueNote {
			continue
		}
		if size >= valueWarning {
			s = warning
		}
		large = append(large, fmt.Sprintf("%s (%s)", shown(row.Path), bytesText(size)))
	}
	if len(large) > 0 {
		c.add(s, "large-values", nil, fmt.Sprintf("some values are large: %s", strings.Join(large[:min(len(large), 3)], ", ")), "the largest request is 1.5 MiB unless --max-request-bytes says otherwise; each update writes the whole value again and sends it to all watchers",
			"keep large data elsewhere, or cut it into several keys; `$tool du --keys --sort=live` lists more")
	}
}

// crowds tells of prefixes with very many keys.
func (c *checker) crowds() {
	for _, row := range c.crowded {
		if row.Group && row.Measure.GetKeys() >= crowdedKeys {
			c.add(warning, "crowded", nil, fmt.Sprintf("%s has %d keys", shown(row.Path), row.Measure.Keys), "clients that list it read all of them", "let clients read in pages (limit), give short-lived keys a lease; for Kubernetes' events: --event-ttl, or a cluster of their own")
		}
	}
	if len(c.crowded) == 0 && c.keys >= manyKeys {
		c.add(warning, "crowded", nil, fmt.Sprintf("there are %d keys", c.keys), "", "")
	}
}

// history tells of revisions that nobody compacts.
func (c *checker) history() {
	if t := c.total; t != nil {
		if t.HistoryBytes > historyBytes && float64(t.HistoryBytes) > historyShare*float64(t.Bytes) {
			c.add(warning, "history", nil, fmt.Sprintf("old revisions take %s, and what is live %s", bytesText(t.HistoryBytes), bytesText(t.Bytes)), "nobody compacts, or seldom", "let the members do it: --auto-compaction-mode=periodic --auto-compaction-retention=1h; Kubernetes' API server does it by itself")
		}
		return
	}
	for _, m := range c.members {
		current, ok := m.metrics.value("etcd_debugging_mvcc_current_revision")
		compacted, known := m.metrics.value("etcd_debugging_mvcc_compact_revision")
		if kept := int64(current - max(compacted, 0)); ok && known && kept > retainedRevisions {
			c.add(warning, "history", nil, fmt.Sprintf("%d revisions are kept", kept), "nobody compacts, or seldom", "let the members do it: --auto-compaction-mode=periodic --auto-compaction-retention=1h; Kubernetes' API server does it by itself")
			return
		}
	}
}

// hot tells of prefixes and clients that make most of a member's work.
func (c *checker) hot() {
	for _, m := range c.members {
		t := m.top
		if t == nil {
			continue
		}
		all := requests(t.Total.GetReads(), t.Total.GetWrites(), t.Total.GetEvents())
		for _, list := range []struct {
			what string
			rows int
		}{{"prefix", len(t.Prefixes)}, {"client", len(t.Clients)}} {
			rows := t.Prefixes
			if list.what == "client" {
				rows = t.Clients
			}
			if list.rows < 2 {
				continue // of one, all is from it
			}
			rate := requests(rows[0].Reads, rows[0].Writes, rows[0].Events)
			if rate >= hotRate && rate > hotShare*all {
				c.add(note, "hot", m, fmt.Sprintf("the %s %s makes %.0f%% of its work: %.0f requests and events a second", list.what, shown(rows[0].Name), 100*rate/all, rate), "", "`$tool top` shows more")
			}
		}
	}
}

func requests(reads, writes, events float64) float64 { return reads + writes + events }

func (c *checker) leaseCount() {
	if c.leases >= manyLeases {
		c.add(warning, "leases", nil, fmt.Sprintf("there are %d leases", c.leases), "each is kept alive by a request of its own", "let several keys share a lease; see that clients revoke theirs")
	}
}

// authentication tells who may do what.
func (c *checker) authentication() {
	if c.authOn == nil || *c.authOn {
		return
	}
	for _, m := range c.members {
		if m.reach == nil || m.reach.wantTLS || m.reach.network == "unix" || strings.HasPrefix(m.reach.host, "127.") || cmp.Or(m.reach.host, "localhost") == "localhost" || m.reach.host == "::1" {
			continue
		}
		c.add(warning, "open", nil, "whoever reaches the client ports may read and write all keys", "there is neither authentication nor TLS", "use TLS with --client-cert-auth, or `$tool auth enable`")
		return
	}
	c.add(note, "auth", nil, "authentication is off", "", "")
}
