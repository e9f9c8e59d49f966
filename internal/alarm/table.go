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
	"encoding/binary"
	"errors"
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
	fullAt int64   // 1 more than the usage at which the store was found full; 0: none
}

// FullAt is the usage, in bytes, from which on the reserve of a full store is
// counted. It is known while Table.SetFull says so.
func (r *Root) FullAt() (usageBytes int64, known bool) { return r.fullAt - 1, r.fullAt > 0 }

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
	root := &Root{alarms: alarms}
	row, err := r.Get(fullKey())
	switch {
	case err == nil && len(row) == 8:
		root.fullAt = int64(binary.BigEndian.Uint64(row)) + 1
	case err == nil:
		return nil, fmt.Errorf("alarm: open: row %s of %d bytes, want 8", storage.MetaFullAt, len(row))
	case !errors.Is(err, storage.ErrNotFound):
		return nil, fmt.Errorf("alarm: open: %w", err)
	}
	return &Table{root: root}, nil
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
	t.root = &Root{slices.Insert(slices.Clone(t.root.alarms), at, a), t.root.fullAt}
	b.Set(rowKey(a), nil)
}

func (t *Table) deactivate(b *storage.Batch, a Alarm) (stood bool) {
	at, found := slices.BinarySearchFunc(t.root.alarms, a, compare)
	if !found {
		return false
	}
	t.root = &Root{slices.Delete(slices.Clone(t.root.alarms), at, at+1), t.root.fullAt}
	b.Delete(rowKey(a))
	return true
}

// SetFull notes the usage at which the store was found full, if there is none
// noted, or forgets it.
func (t *Table) SetFull(b *storage.Batch, full bool, usageBytes int64) {
	if full == (t.root.fullAt > 0) {
		return
	}
	if !full {
		t.root = &Root{alarms: t.root.alarms}
		b.Delete(fullKey())
		return
	}
	t.root = &Root{t.root.alarms, usageBytes + 1}
	b.Set(fullKey(), binary.BigEndian.AppendUint64(nil, uint64(usageBytes)))
}

func fullKey() []byte { return storage.RowKey(storage.TableMeta, []byte(storage.MetaFullAt)) }

func rowKey(a Alarm) []byte {
	row, err := proto.MarshalOptions{Deterministic: true}.Marshal(&pb.AlarmMember{MemberID: a.Member, Alarm: a.Type})
	if err != nil {
		panic(fmt.Sprintf("alarm: marshal %+v: %v", a, err)) // it has no strings to fail on
	}
	return storage.RowKey(storage.TableAlarm, row)
}
