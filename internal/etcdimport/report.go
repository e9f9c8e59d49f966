package etcdimport

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-semver/semver"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/etcddir"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/state"
)

// Report is what an import found and made.
type Report struct {
	// Release is the etcd that wrote the data, as "3.6"; empty if it wrote too
	// little to tell.
	Release             string
	ClusterID, MemberID uint64
	// Members are those after the last committed entry, this one included.
	Members        []*member.Member
	ClusterVersion string
	Downgrade      member.Downgrade

	// DBPath is etcd's database, of DBBytes; DBApplied is the index whose effects
	// it holds, DBRevision its revision.
	DBPath     string
	DBBytes    int64
	DBApplied  uint64
	DBRevision int64
	// WALPath is where etcd's log lies, in Segments files with WALBytes in them.
	WALPath  string
	Segments int
	WALBytes int64
	// Snapshot is the index after which the log begins.
	Snapshot uint64
	// Term, Vote and Commit are raft's, Last is the index of the last entry.
	Term, Vote, Commit, Last uint64
	// Replayed is how many committed entries the database did not hold.
	Replayed uint64

	Keys, Revision, CompactRevision int64
	Leases, Users, Roles            int
	AuthEnabled                     bool
	Alarms                          []string

	// MovedTo and WALMovedTo are where etcd's files lie now; empty when nothing was
	// moved.
	MovedTo, WALMovedTo string
	// Warnings are what an operator should look at.
	Warnings []string
	Took     time.Duration

	removed, old bool
}

func newReport(d *etcddir.Dir) *Report {
	r := &Report{
		Release: d.Release(), ClusterID: d.ClusterID, MemberID: d.MemberID,
		DBPath: d.DB.Path, DBBytes: d.DB.Bytes, DBApplied: d.DB.Applied,
		WALPath: d.WALPath(), Segments: len(d.Segments), Snapshot: d.Snapshot.Index,
		Term: d.Hard.Term, Vote: d.Hard.Vote, Commit: d.Commit(), Last: d.Last,
	}
	for _, s := range d.Segments {
		r.WALBytes += s.Bytes
	}
	if t := d.Torn; t != nil {
		r.warn("the last write to %s was not finished (offset %d: %s): it was never acknowledged, and is left out", t.File, t.Offset, t.Why)
	}
	if d.DB.Received {
		r.warn("etcd was stopped while it took over a snapshot from its leader: %s is used", d.DB.Path)
	}
	if d.DB.Applied == 0 {
		r.warn("etcd's database holds nothing yet: all comes from its log")
	}
	return r
}

func (r *Report) warn(format string, args ...any) {
	r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...))
}

// describe fills in what the state machine holds.
func (r *Report) describe(m *state.Machine, o *Options) {
	auth, members, alarms := m.Tables()
	root := m.Root()
	r.Keys, r.Revision, r.CompactRevision = root.Keys(), root.Revision(), root.CompactRevision()
	r.Leases, r.Users, r.Roles, r.AuthEnabled = m.Leases().Len(), len(auth.UserNames()), len(auth.RoleNames()), auth.Enabled()
	for _, a := range alarms.List(pb.AlarmType_NONE) {
		r.Alarms = append(r.Alarms, fmt.Sprintf("%v of member %x", a.Type, a.Member))
		r.warn("alarm %v of member %x is on", a.Type, a.Member)
	}
	r.Members, r.ClusterVersion, r.Downgrade = members.List(), members.Version(), members.Downgrade()
	if r.Downgrade.Enabled {
		r.warn("a downgrade of the cluster to %s is under way: end it or cancel it (etcdctl downgrade cancel)", r.Downgrade.Target)
	}
	r.removed = members.Removed(r.MemberID)
	v, err := semver.NewVersion(cmp.Or(r.ClusterVersion, "3.5.0"))
	r.old = err != nil || v.LessThan(semver.Version{Major: 3, Minor: 5})
	if r.ClusterVersion != "" && !r.old && len(r.Members) > 1 && v.LessThan(semver.Version{Major: 3, Minor: 6}) {
		r.warn("the cluster is of etcd %d.%d and has %d members: Engram is proven beside etcd 3.6 and 3.7; upgrade the others to 3.6 first, or stop all members and import all", v.Major, v.Minor, len(r.Members))
	}
	r.compare(members.Member(r.MemberID), o)
}

// compare holds what the cluster knows of this member against the flags. As at
// every later start the flags about the initial cluster mean nothing.
func (r *Report) compare(self *member.Member, o *Options) {
	if self == nil {
		if !r.removed {
			r.warn("the log does not say yet that member %x belongs to its cluster: it waits for the leader to tell", r.MemberID)
		}
		return
	}
	if o.Name != "" && self.Name != "" && o.Name != self.Name {
		r.warn("the cluster knows this member as %q: --name=%s will be its name from now on", self.Name, o.Name)
	}
	urls := slices.Sorted(slices.Values(self.PeerURLs))
	if flags := slices.Sorted(slices.Values(o.PeerURLs)); len(flags) > 0 && !slices.Equal(flags, urls) {
		r.warn("the cluster reaches this member at %s, --initial-advertise-peer-urls is %s and changes nothing: use member update, if the other members cannot reach it",
			strings.Join(urls, ","), strings.Join(flags, ","))
	}
}

// Log tells the operator what was done.
func (r *Report) Log(log *slog.Logger) {
	for _, w := range r.Warnings {
		log.Warn("importing: look at this", "reason", w)
	}
	log.Info("etcd's data was imported", "etcd", r.Release, "member", fmt.Sprintf("%x", r.MemberID), "cluster", fmt.Sprintf("%x", r.ClusterID),
		"members", len(r.Members), "keys", r.Keys, "revision", r.Revision, "leases", r.Leases, "users", r.Users,
		"term", r.Term, "index", r.Commit, "replayed", r.Replayed, "uncommitted", r.Last-r.Commit, "took", r.Took)
	log.Info("etcd's own files are unchanged, delete them when you are content", "etcd-data", r.MovedTo)
	if r.WALMovedTo != "" {
		log.Info("and so is its log", "etcd-log", r.WALMovedTo)
	}
}
