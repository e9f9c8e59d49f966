package raftlog

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.etcd.io/raft/v3/raftpb"
)

// TestScripts runs the stories in testdata. Their commands:
//
//	open [segment=bytes] [cache=bytes] [cluster=id member=id]
//	write [sync]             one line per append: entries 1-5 term=1 size=10,
//	                         hard term=1 vote=2 commit=3, snapshot index= term= dir= voters=
//	sync | mark | prepare | close | abandon | compact index=
//	entries lo= hi= [max=] | prefetch lo= hi= [max=] | miss later|read
//	state | size after= | files | scan
//	flip file= offset=       changes a byte on disk
//	cut file= offset=        ends the file there
//	disk full|free
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		s := &script{mem: vfs.NewMem()}
		defer func() {
			if s.log != nil {
				_ = s.log.Abandon()
			}
		}()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out, err := s.run(t, d)
			if err != nil {
				out += "error: " + err.Error() + "\n"
			}
			if out == "" {
				return "ok\n"
			}
			return out
		})
	})
}

type script struct {
	mem  *vfs.MemFS
	log  *Log
	full bool
}

func number(t *testing.T, d *datadriven.TestData, name string, otherwise uint64) uint64 {
	d.MaybeScanArgs(t, name, &otherwise)
	return otherwise
}

func (s *script) run(t *testing.T, d *datadriven.TestData) (string, error) {
	n := func(name string, otherwise uint64) uint64 { return number(t, d, name, otherwise) }
	var out strings.Builder
	switch d.Cmd {
	case "open":
		o := testOptions(errorfs.Wrap(s.mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			if s.full && op.Kind == errorfs.OpFilePreallocate {
				return syscall.ENOSPC
			}
			return nil
		})))
		o.SegmentBytes, o.CacheBytes = int64(n("segment", 4096)), int64(n("cache", 100000))
		o.Identity = Identity{n("cluster", 12), n("member", 10)}
		l, err := Open(o)
		if err == nil {
			s.log = l
		}
		return "", err
	case "write":
		return s.write(t, d)
	case "sync":
		return "", s.log.Sync()
	case "mark":
		return "", s.log.Mark()
	case "prepare":
		return "", s.log.Prepare()
	case "close":
		return "", s.log.Close()
	case "abandon":
		return "", s.log.Abandon()
	case "compact":
		return "", s.log.Compact(n("index", 0))
	case "prefetch":
		return "", s.log.Prefetch(n("lo", 0), n("hi", 0), n("max", NoLimit))
	case "miss":
		later := d.HasArg("later")
		s.log.SetOnMiss(func(_, _ uint64) bool { return later })
		return "", nil
	case "entries":
		es, err := s.log.Entries(n("lo", 0), n("hi", 0), n("max", NoLimit))
		for _, e := range es {
			fmt.Fprintf(&out, "%d term %d, %d bytes\n", e.GetIndex(), e.GetTerm(), len(e.GetData()))
		}
		if err == nil && len(es) == 0 {
			return "none\n", nil
		}
		return out.String(), err
	case "state":
		return s.state()
	case "size":
		return fmt.Sprintf("%d\n", s.log.SizeAfter(n("after", 0))), nil
	case "files":
		names, err := s.mem.List(testDir)
		slices.Sort(names)
		return strings.Join(names, "\n") + "\n", err
	case "scan":
		sum, err := Scan(s.mem, testDir, func(r Record) error {
			fmt.Fprintf(&out, "%s offset %d: %v", s.mem.PathBase(r.File), r.Offset, r.Kind)
			if r.Index > 0 {
				fmt.Fprintf(&out, " %d term %d", r.Index, r.Term)
			}
			fmt.Fprintf(&out, " (position %d, synced %d)\n", r.Position, r.Synced)
			return nil
		})
		if err != nil {
			return out.String(), err
		}
		fmt.Fprintf(&out, "member %x of cluster %x, %d segments, entries %d to %d, term %d vote %d commit %d\n",
			sum.Identity.MemberID, sum.Identity.ClusterID, sum.Segments, sum.First, sum.Last, sum.Term, sum.Vote, sum.Commit)
		fmt.Fprintf(&out, "ends in %s at %d, %d bytes unproven, torn %v\n", s.mem.PathBase(sum.EndFile), sum.EndOffset, sum.Unproven, sum.Torn)
		return out.String(), nil
	case "flip", "cut":
		var file string
		d.ScanArgs(t, "file", &file)
		path, offset := s.mem.PathJoin(testDir, file), n("offset", 0)
		if d.Cmd == "flip" {
			flipByte(t, s.mem, path, int64(offset), 0x10)
		} else {
			putFile(t, s.mem, path, fileBytes(t, s.mem, path)[:offset])
		}
		return "", nil
	case "disk":
		s.full = d.HasArg("full")
		return "", nil
	}
	t.Fatalf("unknown command %s", d.Cmd)
	return "", nil
}

func (s *script) write(t *testing.T, d *datadriven.TestData) (string, error) {
	var as []Append
	for line := range strings.Lines(d.Input) {
		fields := strings.Fields(line)
		sub := &datadriven.TestData{Cmd: fields[0]}
		for _, f := range fields[1:] {
			k, v, _ := strings.Cut(f, "=")
			sub.CmdArgs = append(sub.CmdArgs, datadriven.CmdArg{Key: k, Vals: []string{v}})
		}
		n := func(name string, otherwise uint64) uint64 { return number(t, sub, name, otherwise) }
		switch sub.Cmd {
		case "entries":
			var first, last uint64
			if _, err := fmt.Sscanf(fields[1], "%d-%d", &first, &last); err != nil {
				return "", err
			}
			as = append(as, Append{Entries: entries(first, last, n("term", 1), int(n("size", 10)))})
		case "hard":
			as = append(as, Append{HardState: hard(n("term", 1), n("vote", 0), n("commit", 0))})
		case "snapshot":
			var dir string
			sub.ScanArgs(t, "dir", &dir)
			as = append(as, Append{Snapshot: &Snapshot{
				Index: n("index", 0), Term: n("term", 1), Dir: dir,
				ConfState: &raftpb.ConfState{Voters: []uint64{n("voter", 1)}},
			}})
		default:
			return "", errors.New("unknown append " + sub.Cmd)
		}
	}
	must, err := s.log.Write(as)
	if err != nil {
		return "", err
	}
	out := fmt.Sprintf("must sync: %v\n", must)
	if d.HasArg("sync") {
		err = s.log.Sync()
	}
	return out, err
}

func (s *script) state() (string, error) {
	c, err := read(s.log)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "term %d vote %d commit %d\n", c.hard.term, c.hard.vote, c.hard.commit)
	fmt.Fprintf(&b, "compacted at %d term %d\n", c.compacted.index, c.compacted.term)
	if c.installed != "" {
		fmt.Fprintf(&b, "installed %s\n", c.installed)
	}
	for i := 0; i < len(c.entries); {
		j := i
		for j < len(c.entries) && c.entries[j].term == c.entries[i].term {
			j++
		}
		fmt.Fprintf(&b, "entries %d to %d term %d\n", c.entries[i].index, c.entries[j-1].index, c.entries[i].term)
		i = j
	}
	return b.String(), nil
}
