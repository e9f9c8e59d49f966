package index

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// TestScript runs the scripts in testdata. Commands:
//
//	write                             lines: put key main[.sub] [lease=n] [size=n] [ref=n], delete key main[.sub]
//	get key=k [at=n] [before=m.s]     range key=k [end=e] [at=n] [limit=n]
//	count key=k [end=e] [at=n]        keep at=n          walk [from=k]
//	compact at=n [max=n]              snapshot name=s    setref key=k mod=m.s ref=n
//	reload                            the contents through Encoder, Decoder and Builder
//
// "on=s" reads a snapshot instead of the present. An end of "\0" means open.
func TestScript(t *testing.T) {
	datadriven.Walk(t, "testdata/script", func(t *testing.T, path string) {
		s := &script{tree: New(), snapshots: map[string]Root{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out := s.run(t, d)
			if err := s.tree.Root().Verify(); err != nil {
				t.Fatalf("%s: %v", d.Pos, err)
			}
			return out
		})
	})
}

type script struct {
	tree      *Tree
	snapshots map[string]Root
}

func parseRev(t *testing.T, s string) Revision {
	var r Revision
	main, sub, ok := strings.Cut(s, ".")
	fmt.Sscan(main, &r.Main)
	if ok {
		fmt.Sscan(sub, &r.Sub)
	}
	if r.Main == 0 {
		t.Fatalf("bad revision %q", s)
	}
	return r
}

func showItem(it Item) string {
	s := fmt.Sprintf("%s: create %d, mod %v, version %d, size %d", it.Key, it.Create, it.Mod, it.Version, it.Size)
	if it.Lease != 0 {
		s += fmt.Sprintf(", lease %d", it.Lease)
	}
	if it.Ref != 0 {
		s += fmt.Sprintf(", ref %d", it.Ref)
	}
	return s
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	var key, end, on, from, name, mod, before string
	var at, limit, ref int64
	maxKeys := int64(1000)
	for name, p := range map[string]*string{"key": &key, "end": &end, "on": &on, "from": &from, "name": &name, "mod": &mod, "before": &before} {
		d.MaybeScanArgs(t, name, p)
	}
	for name, p := range map[string]*int64{"at": &at, "limit": &limit, "ref": &ref, "max": &maxKeys} {
		d.MaybeScanArgs(t, name, p)
	}
	endBytes := []byte(end)
	if end == `\0` {
		endBytes = []byte{0}
	}
	root := s.tree.Root()
	if on != "" {
		var ok bool
		if root, ok = s.snapshots[on]; !ok {
			t.Fatalf("no snapshot %q", on)
		}
	}
	switch d.Cmd {
	case "write":
		for line := range strings.Lines(d.Input) {
			fmt.Fprintln(&out, s.write(t, strings.Fields(line)))
		}
	case "get":
		it, ok := root.Get([]byte(key), at)
		if before != "" {
			it, ok = root.Before([]byte(key), parseRev(t, before))
		}
		if !ok {
			return "absent"
		}
		return showItem(it)
	case "range":
		n := int64(0)
		root.Ascend([]byte(key), endBytes, at, func(it Item) bool {
			fmt.Fprintln(&out, showItem(it))
			n++
			return n != limit
		})
	case "count":
		keys, bytes := root.Count([]byte(key), endBytes)
		return fmt.Sprintf("%d keys, %d bytes, %d at %d", keys, bytes, root.CountAt([]byte(key), endBytes, at), at)
	case "keep":
		root.Keep(at, func(r Revision) { fmt.Fprintln(&out, r) })
	case "walk":
		root.Walk([]byte(from), func(r *Record) bool {
			fmt.Fprintf(&out, "%s: lease %d, ref %d\n", r.Key, r.Lease, r.Ref)
			for _, v := range r.Revs {
				if v.Tombstone {
					fmt.Fprintf(&out, "  %v tombstone, size %d\n", v.Revision, v.Size)
				} else {
					fmt.Fprintf(&out, "  %v create %d, version %d, size %d\n", v.Revision, v.Create, v.Version, v.Size)
				}
			}
			return true
		})
		fmt.Fprintf(&out, "live %d keys, %d bytes; history %d; newest %d\n", root.Len(), root.Bytes(), root.History(), root.Newest())
	case "compact":
		for next := []byte(from); ; {
			next = s.tree.Compact(at, next, int(maxKeys), func(r Revision, size uint32, tombstone bool) {
				fmt.Fprintf(&out, "dropped %v, size %d, tombstone %v\n", r, size, tombstone)
			})
			if next == nil {
				break
			}
			fmt.Fprintf(&out, "next %s\n", next)
		}
	case "snapshot":
		s.snapshots[name] = root
	case "setref":
		return fmt.Sprint(s.tree.SetRef([]byte(key), parseRev(t, mod), ValueRef(ref)))
	case "reload":
		tree, err := reload(root)
		if err != nil {
			t.Fatal(err)
		}
		s.tree = tree
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	return out.String()
}

func (s *script) write(t *testing.T, f []string) string {
	if len(f) < 3 {
		t.Fatalf("bad line %q", f)
	}
	rev := parseRev(t, f[2])
	args := map[string]int64{"size": 10}
	for _, a := range f[3:] {
		name, value, _ := strings.Cut(a, "=")
		var n int64
		fmt.Sscan(value, &n)
		args[name] = n
	}
	var prev Item
	var existed bool
	if f[0] == "delete" {
		prev, existed = s.tree.Delete([]byte(f[1]), rev, 3)
	} else {
		prev, existed = s.tree.Put([]byte(f[1]), rev, args["lease"], uint32(args["size"]), ValueRef(args["ref"]))
	}
	if !existed {
		return "no key before"
	}
	return "before: " + showItem(prev)
}

// reload sends a Root through its encoded form, in small blocks.
func reload(r Root) (*Tree, error) {
	var enc Encoder
	var blocks [][]byte
	var block []byte
	r.Walk(nil, func(rec *Record) bool {
		block = enc.Append(block, rec)
		if len(block) >= 200 {
			blocks, block = append(blocks, block), nil
			enc.Reset()
		}
		return true
	})
	if len(block) > 0 {
		blocks = append(blocks, block)
	}
	n := 0
	if err := r.Encode(200, func(block []byte, _ int) error {
		if n == len(blocks) || !bytes.Equal(block, blocks[n]) {
			return fmt.Errorf("block %d is encoded in another way", n)
		}
		n++
		return nil
	}); err != nil || n != len(blocks) {
		return nil, fmt.Errorf("encoded %d blocks of %d: %w", n, len(blocks), err)
	}
	b := NewBuilder()
	var rec Record
	for _, block := range blocks {
		for d := NewDecoder(block); ; {
			if err := d.Next(&rec); err == io.EOF {
				break
			} else if err != nil {
				return nil, err
			}
			if err := b.Add(&rec); err != nil {
				return nil, err
			}
		}
	}
	return b.Tree(), nil
}
