package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/storage"
)

// Scripts under testdata/scripts drive one store. Each line of a txn's input is a put,
// a del or a range, as the commands of the same name:
//
//	put KEY VALUE [lease=N]      del KEY [END]         compact REV
//	range KEY [END] [limit= revision= sort=target:order min-mod= max-mod= min-create= max-create= count-only keys-only max-bytes=]
//	events | history FROM [max-bytes=] | hash [REV] | hashes | usage | records | leases
//	step [n=] | reopen [crash] [lose-checkpoint] | pin NAME | unpin NAME
//
// "all" as END means from KEY on.
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{fixture: newFixture(t, nil), views: map[string]*View{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			return s.run(d)
		})
		for _, v := range s.views {
			v.Release()
		}
	})
}

type script struct {
	*fixture
	views map[string]*View
}

func (s *script) run(d *datadriven.TestData) string {
	if d.Cmd == "txn" {
		return s.txn(d)
	}
	words := words(d.CmdArgs)
	switch d.Cmd {
	case "put", "del":
		var out strings.Builder
		s.apply(func(w *Writer) {
			w.Begin()
			s.op(&out, w, d.Cmd, words, d.CmdArgs)
			fmt.Fprintf(&out, "revision %d\n", w.End())
		})
		return out.String()
	case "range":
		v := s.View(s.Root())
		defer v.Release()
		if name := arg(d.CmdArgs, "view"); name != "" {
			v = s.View(s.views[name].Root())
			defer v.Release()
		}
		return s.rangeIn(v, words, d.CmdArgs)
	case "compact":
		var err error
		s.apply(func(w *Writer) { err = w.Compact(number(words[0])) })
		return result(err)
	case "events":
		return eventLines(s.events)
	case "history":
		var events []Event
		maxBytes := 1 << 20
		if a := arg(d.CmdArgs, "max-bytes"); a != "" {
			maxBytes = int(number(a))
		}
		next, err := s.History(context.Background(), s.Root(), number(words[0]), maxBytes, func(e Event) bool {
			events = append(events, e)
			return true
		})
		if err != nil {
			return result(err)
		}
		return eventLines(events) + fmt.Sprintf("next %d\n", next)
	case "hash":
		rev := int64(0)
		if len(words) > 0 {
			rev = number(words[0])
		}
		h, err := s.HashKV(context.Background(), s.Root(), rev)
		if err != nil {
			return result(err)
		}
		return fmt.Sprintf("%d compact-revision %d hash-revision %d revision %d\n", h.Hash, h.CompactRevision, h.HashRevision, h.Revision)
	case "hashes":
		var out strings.Builder
		for _, h := range s.CompactionHashes() {
			fmt.Fprintf(&out, "%d compact-revision %d hash-revision %d\n", h.Hash, h.CompactRevision, h.HashRevision)
		}
		return out.String()
	case "usage":
		r := s.Root()
		return fmt.Sprintf("%d bytes, %d keys, revision %d, compact revision %d\n", r.UsageBytes(), r.Keys(), r.Revision(), r.CompactRevision())
	case "records":
		return s.records()
	case "leases":
		var out strings.Builder
		s.Leases(func(lease int64, key []byte) { fmt.Fprintf(&out, "%s: %d\n", key, lease) })
		return out.String()
	case "step":
		if n := arg(d.CmdArgs, "n"); n != "" {
			more := false
			for range number(n) {
				var (
					pause time.Duration
					err   error
				)
				more, pause, err = s.CompactStep()
				s.check(err)
				s.now = s.now.Add(pause)
			}
			return fmt.Sprintf("more %v\n", more)
		}
		s.work()
		return ""
	case "pin":
		s.views[words[0]] = s.View(s.Root())
		return ""
	case "unpin":
		s.views[words[0]].Release()
		delete(s.views, words[0])
		return ""
	case "get":
		kv, _, ok, err := s.views[arg(d.CmdArgs, "view")].Get([]byte(words[0]), number(words[1]))
		if err != nil {
			return result(err)
		}
		if !ok {
			return "absent\n"
		}
		return kvLine(kv)
	case "reopen":
		if slices.Contains(words, "crash") {
			s.fs = s.fs.CrashClone(vfs.CrashCloneCfg{})
			s.check(s.storage.Abandon())
		} else {
			s.check(s.Store.Close())
			s.check(s.storage.Close())
		}
		if slices.Contains(words, "lose-checkpoint") {
			s.check(s.fs.Remove("index/" + CheckpointFile))
		}
		s.open()
		a, term := s.Applied()
		return fmt.Sprintf("applied %d term %d revision %d\n", a, term, s.Root().Revision())
	}
	return fmt.Sprintf("no command %s\n", d.Cmd)
}

func (s *script) txn(d *datadriven.TestData) string {
	var out strings.Builder
	s.apply(func(w *Writer) {
		w.Begin()
		for line := range strings.Lines(d.Input) {
			cmd, args, err := datadriven.ParseLine(line)
			s.check(err)
			s.op(&out, w, cmd, words(args), args)
		}
		fmt.Fprintf(&out, "revision %d\n", w.End())
	})
	return out.String()
}

func (s *script) op(out *strings.Builder, w *Writer, cmd string, words []string, args []datadriven.CmdArg) {
	switch cmd {
	case "put":
		lease := int64(0)
		if l := arg(args, "lease"); l != "" {
			lease = number(l)
		}
		prev, existed := w.Put([]byte(words[0]), []byte(words[1]), lease)
		if existed {
			fmt.Fprintf(out, "replaced %v\n", prev.Mod)
		}
	case "del":
		n := w.DeleteRange([]byte(words[0]), rangeEnd(words), nil)
		fmt.Fprintf(out, "deleted %d\n", n)
	case "range":
		v := w.View()
		out.WriteString(s.rangeIn(v, words, args))
		v.Release()
	default:
		s.t.Fatalf("no op %q in a txn", cmd)
	}
}

func (s *script) rangeIn(v *View, words []string, args []datadriven.CmdArg) string {
	o := RangeOptions{}
	for _, a := range args {
		switch a.Key {
		case "limit":
			o.Limit = number(a.Vals[0])
		case "revision":
			o.Revision = number(a.Vals[0])
		case "min-mod":
			o.MinMod = number(a.Vals[0])
		case "max-mod":
			o.MaxMod = number(a.Vals[0])
		case "min-create":
			o.MinCreate = number(a.Vals[0])
		case "max-create":
			o.MaxCreate = number(a.Vals[0])
		case "max-bytes":
			o.MaxBytes = number(a.Vals[0])
		case "count-only":
			o.CountOnly = true
		case "keys-only":
			o.KeysOnly = true
		case "no-count":
			o.NoCount = true
		case "sort":
			target, order, _ := strings.Cut(a.Vals[0], ":")
			o.Target = SortTarget(slices.Index([]string{"key", "version", "create", "mod", "value"}, target))
			o.Order = SortOrder(slices.Index([]string{"none", "ascend", "descend"}, order))
		}
	}
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return strings.HasSuffix(w, "-only") || w == "no-count" })
	res, err := v.Range(context.Background(), []byte(words[0]), rangeEnd(words), o)
	if err != nil {
		return result(err)
	}
	var out strings.Builder
	for _, kv := range res.KVs {
		out.WriteString(kvLine(kv))
	}
	fmt.Fprintf(&out, "count %d more %v bytes %d\n", res.Count, res.More, res.Bytes)
	return out.String()
}

// records lists what is on disk.
func (s *script) records() string {
	var out strings.Builder
	lower, upper := storage.RevisionBounds(0, 0)
	s.check(s.eachRecord(context.Background(), lower, upper, nil, func(r *logRecord) bool {
		fmt.Fprintf(&out, "%v %s%s\n", r.rev, r.key(), map[bool]string{true: " tombstone"}[r.Tombstone])
		return true
	}))
	return out.String()
}

func kvLine(encoded []byte) string {
	kv, err := decodeKeyValue(encoded)
	if err != nil {
		return err.Error() + "\n"
	}
	lease := ""
	if kv.lease != 0 {
		lease = fmt.Sprintf(", lease %d", kv.lease)
	}
	return fmt.Sprintf("%s = %q (create %d, mod %d, version %d%s)\n", kv.key, kv.value, kv.create, kv.mod, kv.version, lease)
}

func eventLines(events []Event) string {
	var out strings.Builder
	for _, e := range events {
		kind := "put"
		switch {
		case e.Delete:
			kind = "delete"
		case e.Create:
			kind = "create"
		}
		prev := ""
		if e.Prev != (Revision{}) {
			prev = fmt.Sprintf(" after %v", e.Prev)
		}
		fmt.Fprintf(&out, "%v %s %s%s: %s", e.Rev, kind, e.Key, prev, kvLine(e.KV))
	}
	return out.String()
}

func result(err error) string {
	for _, known := range []error{ErrCompacted, ErrFutureRevision, ErrTooBig} {
		if errors.Is(err, known) {
			return "error: " + err.Error() + "\n"
		}
	}
	if err != nil {
		return "unexpected error: " + err.Error() + "\n"
	}
	return "ok\n"
}

func words(args []datadriven.CmdArg) (out []string) {
	for _, a := range args {
		if len(a.Vals) == 0 {
			out = append(out, a.Key)
		}
	}
	return out
}

func arg(args []datadriven.CmdArg, key string) string {
	for _, a := range args {
		if a.Key == key && len(a.Vals) > 0 {
			return a.Vals[0]
		}
	}
	return ""
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func rangeEnd(words []string) []byte {
	if len(words) < 2 {
		return nil
	}
	if words[1] == "all" {
		return []byte{0}
	}
	return []byte(words[1])
}
