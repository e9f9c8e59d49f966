package raftlog

import (
	"errors"
	"testing"

	"go.etcd.io/raft/v3/raftpb"
)

// FuzzOpen opens a log whose last segment is arbitrary bytes. Whatever they are,
// Open refuses or gives a log that can be read, written, and opened again. With
// reseal set, checksums are made right first, so that the fuzzer gets past them.
func FuzzOpen(f *testing.F) {
	var o Options
	fs, _, path, _, _ := smallLog(f, &o)
	whole := fileBytes(f, fs, path)
	name := fs.PathBase(path)
	f.Add(whole, false)
	f.Add(whole, true)
	f.Add(whole[:len(whole)-9], true)
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, b []byte, reseal bool) {
		if len(b) > 1<<16 {
			return
		}
		mem := copyFS(t, fs)
		if reseal {
			b = resealed(b, name)
		}
		putFile(t, mem, path, b)
		o := o
		o.FS = mem
		_, scanErr := Scan(mem, testDir, nil)
		l, err := Open(o)
		if (err == nil) != (scanErr == nil) && !errors.Is(err, ErrIdentity) {
			t.Fatalf("Scan says %v, Open says %v", scanErr, err)
		}
		if err != nil {
			return
		}
		want, err := read(l)
		if err != nil {
			t.Fatal(err)
		}
		last, _ := l.LastIndex()
		if last > 1<<62 {
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			return
		}
		write(t, l, Append{Entries: entries(last+1, last+3, 9, 30)})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = mustOpen(t, o)
		got, err := read(l)
		if err != nil {
			t.Fatal(err)
		}
		want.entries = append(want.entries, got.entries[len(got.entries)-3:]...)
		if !got.equal(want) {
			t.Fatalf("got %v\nwant %v", got, want)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// resealed makes the checksums and positions of all records right, as far as
// the lengths lead from one to the next.
func resealed(b []byte, name string) []byte {
	b = append([]byte(nil), b...)
	seed, base := uint32(0), uint64(firstPosition)
	for at := int64(0); at+frameBytes <= int64(len(b)); {
		f := decodeFrame(b[at:])
		if f.length > maxPayloadBytes || at+f.size() > int64(len(b)) {
			break
		}
		if at == 0 {
			base = f.position
		}
		f.position = base + uint64(at)
		rec := b[at : at+f.size()]
		sealRecord(rec, f, seed)
		if at == 0 {
			h, err := decodeHeader(rec[frameBytes:][:f.length])
			if err != nil {
				break
			}
			seed = h.seed()
		}
		at += f.size()
	}
	return b
}

// FuzzPayloads decodes arbitrary payloads, and encodes again what it got.
func FuzzPayloads(f *testing.F) {
	h := header{sequence: 3, first: 9, snap: &Snapshot{Index: 8, Term: 2, Dir: "d", ConfState: &raftpb.ConfState{Voters: []uint64{1}}}}
	b, err := h.append(nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[headerFixedBytes:])
	f.Add(appendCompact(nil, point{4, 2}, 3))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := decodeHeader(b); err == nil {
			c, err := h.append(nil)
			if err != nil {
				t.Fatal(err)
			}
			again, err := decodeHeader(c)
			if err != nil || again.sequence != h.sequence || again.hard != h.hard || (again.snap == nil) != (h.snap == nil) {
				t.Fatalf("%+v became %+v (%v)", h, again, err)
			}
		}
		if s, err := decodeSnapshot(b); err == nil {
			c, err := appendSnapshot(nil, &s)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := decodeSnapshot(c); err != nil || again.Dir != s.Dir || again.Index != s.Index {
				t.Fatalf("%+v became %+v (%v)", s, again, err)
			}
		}
		if p, n, err := decodeCompact(b); err == nil && string(appendCompact(nil, p, n)) != string(b) {
			t.Fatal("compaction changed")
		}
		if h, err := decodeHardState(b); err == nil && string(appendHardState(nil, h)) != string(b) {
			t.Fatal("hard state changed")
		}
		if len(b) >= frameBytes {
			f := decodeFrame(b)
			if f.size() < int64(f.length)+frameBytes || f.size()%alignment != 0 {
				t.Fatalf("%+v occupies %d", f, f.size())
			}
		}
	})
}
