package alarm

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/storage"
)

func TestScript(t *testing.T) {
	fs := vfs.NewMem()
	store, table := open(t, fs)
	datadriven.RunTest(t, "testdata/alarm", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "reopen":
			if err := store.Close(); err != nil {
				t.Fatal(err)
			}
			store, table = open(t, fs)
			return show(table.Root().List(pb.AlarmType_NONE))
		case "has":
			var typ string
			d.ScanArgs(t, "type", &typ)
			return fmt.Sprintln(table.Root().Has(typeOf(t, typ)))
		case "rows":
			var out strings.Builder
			if err := storage.Rows(store, storage.TableAlarm, func(name, value []byte) error {
				fmt.Fprintf(&out, "%x = %x\n", name, value)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			return out.String()
		}
		var member uint64
		typ := "NONE"
		d.MaybeScanArgs(t, "member", &member)
		d.MaybeScanArgs(t, "type", &typ)
		a := Alarm{Member: member, Type: typeOf(t, typ)}
		before := table.Root()
		kept := show(before.List(pb.AlarmType_NONE))
		b := store.NewBatch()
		action, known := pb.AlarmRequest_AlarmAction_value[strings.ToUpper(d.Cmd)]
		if !known {
			action = 99
		}
		answer := table.Apply(b, &pb.AlarmRequest{Action: pb.AlarmRequest_AlarmAction(action), MemberID: a.Member, Alarm: a.Type})
		written := !b.Empty()
		if err := store.Commit(b); err != nil {
			t.Fatal(err)
		}
		if show(before.List(pb.AlarmType_NONE)) != kept {
			t.Error("a root changed")
		}
		out := show(answer)
		if written {
			out += "changed\n"
		}
		return out
	})
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, fs vfs.FS) (*storage.Store, *Table) {
	store, err := storage.Open(storage.Options{FS: fs, Dir: "db"})
	if err != nil {
		t.Fatal(err)
	}
	table, err := Open(store)
	if err != nil {
		t.Fatal(err)
	}
	return store, table
}

func typeOf(t *testing.T, name string) pb.AlarmType {
	n, ok := pb.AlarmType_value[name]
	if !ok {
		t.Fatalf("no alarm type %s", name)
	}
	return pb.AlarmType(n)
}

func show(alarms []Alarm) string {
	var out strings.Builder
	for _, a := range alarms {
		fmt.Fprintf(&out, "member %x %v\n", a.Member, a.Type)
	}
	return out.String()
}

func TestOpenRefusesGarbage(t *testing.T) {
	store, _ := open(t, vfs.NewMem())
	b := store.NewBatch()
	b.Set(storage.RowKey(storage.TableAlarm, []byte{0xff}), nil)
	if err := store.Commit(b); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(store); err == nil {
		t.Error("a garbage row was read")
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
}
