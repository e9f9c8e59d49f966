// Package member is the replicated table of who belongs to the cluster, and of
// what the cluster agreed on: its version, a downgrade under way, and the feature
// level, from which on entries may mean more than to etcd.
//
// It does not talk to members and knows nothing of raft but the form of a
// membership change. Table is the writer's handle, Root what readers get.
// Invariants:
//
//	M1: every member that applied the same entries has the same table, and
//	    judges the next change alike (given the same MaxLearners).
//	M2: the role of a member here is its role in raft.
//	M3: an ID that was removed never comes back.
//	M4: a Root never changes.
package member

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/coreos/go-semver/semver"
	"go.etcd.io/etcd/api/v3/membershippb"

	"github.com/engram-kv/engram/internal/storage"
)

var (
	// ErrRemoved says that a member of that ID was removed before.
	ErrRemoved = errors.New("member: id was removed")
	// ErrExists says that there is a member of that ID.
	ErrExists = errors.New("member: id exists")
	// ErrNotFound says that there is no member of that ID.
	ErrNotFound = errors.New("member: not found")
	// ErrPeerURLExists says that a peer URL belongs to another member.
	ErrPeerURLExists = errors.New("member: peer URL exists")
	// ErrTooManyLearners says that one more learner would be beyond MaxLearners.
	ErrTooManyLearners = errors.New("member: too many learners")
	// ErrNotLearner says that a voter cannot be promoted.
	ErrNotLearner = errors.New("member: not a learner")
	// ErrLastVoter says that without this member nobody could vote.
	ErrLastVoter = errors.New("member: last voter")
	// ErrNotEnoughStarted says that after a change too few of the voters would
	// have started to be a quorum.
	ErrNotEnoughStarted = errors.New("member: not enough started members")
	// ErrUnhealthy says that too few voters are connected to risk a change.
	ErrUnhealthy = errors.New("member: unhealthy cluster")
	// ErrLearnerNotReady says that a learner lags too far behind the leader.
	ErrLearnerNotReady = errors.New("member: learner is not in sync with the leader")
	// ErrMalformed says that a change is none that an etcd member proposes, and
	// would stop those that apply it.
	ErrMalformed = errors.New("member: malformed change")
	// ErrVersion says that a cluster version is no version, or beyond ours: this
	// member must not go on, for it cannot know what entries will mean.
	ErrVersion = errors.New("member: cluster version not supported")
	// ErrFeatureLevel says that a feature level is beyond ours: like ErrVersion
	// it stops the member.
	ErrFeatureLevel = errors.New("member: feature level not supported")
)

// Why there is no downgrade.
var (
	// ErrInvalidVersionFormat says that a target is no version.
	ErrInvalidVersionFormat = errors.New("member: downgrade target is not major.minor")
	// ErrInvalidDowngradeTarget says that a target is not the minor version just
	// below that of the cluster.
	ErrInvalidDowngradeTarget = errors.New("member: invalid downgrade target")
	// ErrDowngradeInProcess says that there is one already.
	ErrDowngradeInProcess = errors.New("member: downgrade under way")
	// ErrNoInflightDowngrade says that there is none to cancel.
	ErrNoInflightDowngrade = errors.New("member: no downgrade under way")
	// ErrNoClusterVersion says that the cluster has not agreed on a version yet.
	ErrNoClusterVersion = errors.New("member: no cluster version yet")
)

// Member is one server of the cluster. Its JSON form is the one of etcd's file.
type Member struct {
	ID        uint64   `json:"id"`
	PeerURLs  []string `json:"peerURLs"`
	IsLearner bool     `json:"isLearner,omitempty"`
	// Name and ClientURLs are empty until the member has started.
	Name       string   `json:"name,omitempty"`
	ClientURLs []string `json:"clientURLs,omitempty"`
}

// Downgrade is what the cluster knows of a downgrade.
type Downgrade struct {
	Target  string `json:"target-version"` // "" if there is none
	Enabled bool   `json:"enabled"`
}

// Root is an immutable membership. Its zero value is that of a store without
// any. Members that it returns are shared: nobody changes them.
type Root struct {
	members     []*Member // by ID
	removed     map[uint64]struct{}
	version     string
	downgrade   Downgrade
	level       uint64
	maxLearners int
}

// List returns the members by ID.
func (r *Root) List() []*Member { return slices.Clone(r.members) }

// Member returns the member of that ID, nil if there is none.
func (r *Root) Member(id uint64) *Member {
	if i, found := r.search(id); found {
		return r.members[i]
	}
	return nil
}

func (r *Root) search(id uint64) (int, bool) {
	return slices.BinarySearchFunc(r.members, id, func(m *Member, id uint64) int { return cmp.Compare(m.ID, id) })
}

// Removed says whether a member of that ID was removed.
func (r *Root) Removed(id uint64) bool {
	_, ok := r.removed[id]
	return ok
}

// RemovedIDs returns the IDs that were removed, ascending.
func (r *Root) RemovedIDs() []uint64 { return slices.Sorted(maps.Keys(r.removed)) }

// Count returns how many members vote and how many learn.
func (r *Root) Count() (voters, learners int) {
	for _, m := range r.members {
		if m.IsLearner {
			learners++
		}
	}
	return len(r.members) - learners, learners
}

// Version is the cluster version, as "3.7.0"; empty until the cluster decided.
func (r *Root) Version() string { return r.version }

// Downgrade is the downgrade under way, if any.
func (r *Root) Downgrade() Downgrade { return r.downgrade }

// Options configure a Table.
type Options struct {
	// MaxLearners is how many learners there may be. It decides about changes,
	// so it must be the same on all members; 0 means 1.
	MaxLearners int
	// Version is etcd's version that this member is compatible with, as
	// "3.7.3". A cluster version with a higher minor is refused. Empty means
	// that none is.
	Version string
}

// Table is the membership and its rows. Only the applier uses it.
type Table struct {
	root *Root
	ours *semver.Version // nil: no limit
}

const (
	rowVersion   = "clusterVersion"
	rowDowngrade = "downgrade"
	rowRemoved   = "removed" // the value of a row of the removed
)

// Open reads the table.
func Open(r storage.Reader, o Options) (*Table, error) {
	root := &Root{removed: map[uint64]struct{}{}, maxLearners: cmp.Or(o.MaxLearners, 1)}
	t := &Table{root: root}
	err := storage.Rows(r, storage.TableMember, func(name, value []byte) error {
		m := new(Member)
		if err := json.Unmarshal(value, m); err != nil {
			return fmt.Errorf("member row %q: %w", name, err)
		}
		if id, err := parseID(name); err != nil || id != m.ID {
			return fmt.Errorf("member row %q holds member %x", name, m.ID)
		}
		root.members = append(root.members, m)
		return nil
	})
	slices.SortFunc(root.members, func(a, b *Member) int { return cmp.Compare(a.ID, b.ID) })
	err = errors.Join(err, storage.Rows(r, storage.TableMemberRemoved, func(name, _ []byte) error {
		id, err := parseID(name)
		root.removed[id] = struct{}{}
		return err
	}), storage.Rows(r, storage.TableCluster, func(name, value []byte) error {
		switch string(name) {
		case rowVersion:
			root.version = string(value)
		case rowDowngrade:
			if err := json.Unmarshal(value, &root.downgrade); err != nil {
				return fmt.Errorf("downgrade row: %w", err)
			}
		}
		return nil
	}), readFeatureLevel(r, root))
	if err == nil && o.Version != "" {
		if t.ours, err = semver.NewVersion(o.Version); err != nil {
			err = fmt.Errorf("our own version %q: %w", o.Version, err)
		}
	}
	if err == nil && root.version != "" {
		_, err = t.checkVersion(root.version)
	}
	if err == nil {
		err = checkFeatureLevel(root.level)
	}
	if err != nil {
		return nil, fmt.Errorf("member: open: %w", err)
	}
	return t, nil
}

// Root returns the membership as of now.
func (t *Table) Root() *Root { return t.root }

// change publishes a changed copy of the root.
func (t *Table) change(fn func(*Root)) {
	root := *t.root
	root.members = slices.Clone(root.members)
	fn(&root)
	t.root = &root
}

// set puts a member in place of the one with its ID, if any.
func (t *Table) set(b *storage.Batch, m *Member) {
	t.change(func(r *Root) {
		i, found := r.search(m.ID)
		if found {
			r.members[i] = m
		} else {
			r.members = slices.Insert(r.members, i, m)
		}
	})
	b.Set(memberKey(storage.TableMember, m.ID), mustJSON(m))
}

func (t *Table) remove(b *storage.Batch, id uint64) {
	t.change(func(r *Root) {
		r.members = slices.DeleteFunc(r.members, func(m *Member) bool { return m.ID == id })
		r.removed = maps.Clone(r.removed)
		r.removed[id] = struct{}{}
	})
	b.Delete(memberKey(storage.TableMember, id))
	b.Set(memberKey(storage.TableMemberRemoved, id), []byte(rowRemoved))
}

// SetAttributes replaces name and client URLs of a member. One that was removed
// is ignored. It fails with ErrNotFound for one never heard of, and with
// ErrMalformed without attributes; both would stop an etcd member.
func (t *Table) SetAttributes(b *storage.Batch, r *membershippb.ClusterMemberAttrSetRequest) error {
	id, attr := r.GetMember_ID(), r.GetMemberAttributes()
	if attr == nil {
		return fmt.Errorf("set attributes of member %x, none given: %w", id, ErrMalformed)
	}
	old := t.root.Member(id)
	if old == nil {
		if t.root.Removed(id) {
			return nil
		}
		return fmt.Errorf("set attributes of member %x: %w", id, ErrNotFound)
	}
	m := *old
	m.Name, m.ClientURLs = attr.GetName(), slices.Clone(attr.GetClientUrls())
	t.set(b, &m)
	return nil
}

// SetVersion sets the cluster version. It fails with ErrVersion.
func (t *Table) SetVersion(b *storage.Batch, r *membershippb.ClusterVersionSetRequest) error {
	v, err := t.checkVersion(r.GetVer())
	if err != nil {
		return err
	}
	t.change(func(r *Root) { r.version = v })
	b.Set(storage.RowKey(storage.TableCluster, []byte(rowVersion)), []byte(v))
	return nil
}

// checkVersion returns the version in its usual form.
func (t *Table) checkVersion(text string) (string, error) {
	v, err := semver.NewVersion(text)
	if err != nil {
		return "", fmt.Errorf("cluster version %q, want major.minor.patch: %w: %w", text, ErrVersion, err)
	}
	if t.ours != nil && (v.Major > t.ours.Major || v.Major == t.ours.Major && v.Minor > t.ours.Minor) {
		return "", fmt.Errorf("cluster version %s, this member has %s (upgrade it): %w", v, t.ours, ErrVersion)
	}
	return v.String(), nil
}

// SetDowngrade notes a downgrade, or that there is none.
func (t *Table) SetDowngrade(b *storage.Batch, r *membershippb.DowngradeInfoSetRequest) {
	var d Downgrade
	if r.GetEnabled() {
		d = Downgrade{Target: r.GetVer(), Enabled: true}
	}
	t.change(func(r *Root) { r.downgrade = d })
	b.Set(storage.RowKey(storage.TableCluster, []byte(rowDowngrade)), mustJSON(d))
}

// Row returns a member's row, for whoever makes a store without running entries.
func Row(m Member) (key, value []byte) { return memberKey(storage.TableMember, m.ID), mustJSON(m) }

func memberKey(t storage.Table, id uint64) []byte {
	return storage.RowKey(t, strconv.AppendUint(nil, id, 16))
}

func parseID(name []byte) (uint64, error) {
	id, err := strconv.ParseUint(string(name), 16, 64)
	if err != nil {
		return 0, fmt.Errorf("row %q is no member id: %w", name, err)
	}
	return id, nil
}

// mustJSON is for types that always marshal.
func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("member: marshal %T: %v", v, err))
	}
	return b
}
