// Package alarm is the replicated table of raised alarms.
//
// It says which alarms stand, not what follows from them: that is for state.
// Table is the writer's handle, Root what readers get. Invariants:
//
//	A1: rows on disk, memory after a commit, and every Root taken then agree.
//	A2: a Root never changes.
package alarm

import (
	"cmp"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/storage"
)

// Alarm is an alarm of a type, raised for a member (0: for the cluster).
type Alarm struct {
	Member uint64
	Type   pb.AlarmType
}

func compare(a, b Alarm) int {
	return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Member, b.Member))
}

// Root is an immutable set of alarms. The zero value is empty.
type Root struct {
	alarms []Alarm // ordered by compare
}

// Has says whether an alarm of the type stands for any member.
func (r *Root) Has(t pb.AlarmType) bool {
	return slices.ContainsFunc(r.alarms, func(a Alarm) bool { return a.Type == t })
}

// Contains says whether exactly this alarm stands.
func (r *Root) Contains(a Alarm) bool {
	_, found := slices.BinarySearchFunc(r.alarms, a, compare)
	return found
}

// List returns the alarms of a type, of all types for NONE, ordered by type and
// member. The caller owns them.
func (r *Root) List(t pb.AlarmType) []Alarm {
	var out []Alarm
	for _, a := range r.alarms {
		if t == pb.AlarmType_NONE || a.Type == t {
			out = append(out, a)
		}
	}
	return out
}

// Table is the alarms and their rows. Only the applier uses it.
type Table struct{ root *Root }

// Open reads the table.
func Open(r storage.Reader) (*Table, error) {
	var alarms []Alarm
	err := storage.Rows(r, storage.TableAlarm, func(name, _ []byte) error {
		var m pb.AlarmMember
		if err := proto.Unmarshal(name, &m); err != nil {
			return fmt.Errorf("row %x is no alarm: %w", name, err)
		}
		alarms = append(alarms, Alarm{m.GetMemberID(), m.GetAlarm()})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("alarm: open: %w", err)
	}
	slices.SortFunc(alarms, compare)
	return &Table{root: &Root{alarms}}, nil
}

// Root returns the alarms as of now.
func (t *Table) Root() *Root { return t.root }

// Apply runs an alarm request and returns the alarms to answer with: for GET
// those asked for, otherwise the one raised (also if it stood already) or
// cleared, if any. An action that is not known does nothing.
func (t *Table) Apply(b *storage.Batch, r *pb.AlarmRequest) []Alarm {
	a := Alarm{r.GetMemberID(), r.GetAlarm()}
	switch r.GetAction() {
	case pb.AlarmRequest_GET:
		return t.root.List(a.Type)
	case pb.AlarmRequest_ACTIVATE:
		if t.activate(b, a); t.root.Contains(a) {
			return []Alarm{a}
		}
	case pb.AlarmRequest_DEACTIVATE:
		if t.deactivate(b, a) {
			return []Alarm{a}
		}
	}
	return nil
}

func (t *Table) activate(b *storage.Batch, a Alarm) {
	at, found := slices.BinarySearchFunc(t.root.alarms, a, compare)
	if found || a.Type == pb.AlarmType_NONE {
		return
	}
	t.root = &Root{slices.Insert(slices.Clone(t.root.alarms), at, a)}
	b.Set(rowKey(a), nil)
}

func (t *Table) deactivate(b *storage.Batch, a Alarm) (stood bool) {
	at, found := slices.BinarySearchFunc(t.root.alarms, a, compare)
	if !found {
		return false
	}
	t.root = &Root{slices.Delete(slices.Clone(t.root.alarms), at, at+1)}
	b.Delete(rowKey(a))
	return true
}

func rowKey(a Alarm) []byte {
	row, err := proto.MarshalOptions{Deterministic: true}.Marshal(&pb.AlarmMember{MemberID: a.Member, Alarm: a.Type})
	if err != nil {
		panic(fmt.Sprintf("alarm: marshal %+v: %v", a, err)) // it has no strings to fail on
	}
	return storage.RowKey(storage.TableAlarm, row)
}
