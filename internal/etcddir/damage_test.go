package etcddir

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/engram-kv/engram/internal/etcddir/waltest"
)

// want is what small holds.
func want(t *testing.T) []string {
	d := newDisk(t)
	d.log(small().Files())
	got, err := entries(d.mustOpen())
	if err != nil || len(got) != 9 {
		t.Fatalf("%q: %v", got, err)
	}
	return got
}

// Each bit of each segment is flipped: what is taken then is what was written,
// or lacks the last write alone, which etcd could not tell from one that a crash
// cut. Nothing that was committed is ever left out.
func TestEveryBitFlip(t *testing.T) {
	all, db := want(t), waltest.DB(t, 5, 3, "3.7.0", nil)
	refused, cut, same := 0, 0, 0
	for i, s := range small().Segments {
		for bit := range 8 * len(s.Bytes) {
			files := small().Files()
			files[s.Name][bit/8] ^= 1 << (bit % 8)
			d := newDisk(t)
			d.log(files)
			d.db(db)
			where := fmt.Sprintf("segment %d, bit %d of byte %d", i, bit%8, bit/8)
			dir, err := d.open()
			if err != nil {
				if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrIncomplete) {
					t.Errorf("%s: %v", where, err)
				}
				refused++
				continue
			}
			got, err := entries(dir)
			if err != nil || dir.Hard.Term != 3 || dir.Hard.Vote != self || dir.MemberID != self || dir.ClusterID != cluster {
				t.Fatalf("%s: %v, %+v", where, err, dir)
			}
			switch {
			case slices.Equal(got, all) && dir.Hard.Commit == 7: // padding
				same++
			case dir.Torn != nil && slices.Equal(got, all[:len(got)]) && len(got) >= int(dir.Commit()) && len(got) == len(all)-1:
				cut++
			default:
				t.Errorf("%s: %q, torn %+v", where, got, dir.Torn)
			}
			_ = dir.Close()
		}
	}
	t.Logf("%d refused, %d cut, %d without effect", refused, cut, same)
	if cut > 0 {
		t.Errorf("%d flips were taken for an interrupted write", cut)
	}
}

// The last segment is cut at each byte, as a file system may leave it after a
// crash, with nothing or with zeros behind the cut: a prefix of the records is
// taken as long as it has all that is known to be committed.
func TestEveryCut(t *testing.T) {
	all, db := want(t), waltest.DB(t, 5, 3, "3.7.0", nil)
	last := small().Segments[1]
	for _, zeros := range []bool{false, true} {
		for n := range last.Bytes {
			files := small().Files()
			files[last.Name] = last.Bytes[:n]
			if zeros {
				files[last.Name] = append(bytes.Clone(last.Bytes[:n]), make([]byte, 4096-n)...)
			}
			d := newDisk(t)
			d.log(files)
			d.db(db)
			where := fmt.Sprintf("cut at %d, zeros %v", n, zeros)
			dir, err := d.open()
			whole := n == 0 || slices.Contains(last.Ends, n)
			if err != nil {
				if !zeros || whole {
					t.Errorf("%s: %v", where, err)
				} else if damage := new(DamageError); !errors.As(err, &damage) { // no sector of the torn record is empty
					t.Errorf("%s: %v", where, err)
				}
				continue
			}
			got, err := entries(dir)
			if err != nil || !slices.Equal(got, all[:len(got)]) || len(got) < 5 {
				t.Errorf("%s: %q %v", where, got, err)
			}
			if torn := dir.Torn != nil; torn == whole && !zeros {
				t.Errorf("%s: torn %+v", where, dir.Torn)
			}
			_ = dir.Close()
		}
	}
}

// A record larger than a sector, of which a sector did not reach the disk, is an
// interrupted write at the end of the log and damage elsewhere.
func TestEmptySector(t *testing.T) {
	l := small()
	l.Entries(waltest.Normal(10, 3, bytes.Repeat([]byte("x"), 2000)))
	s := l.Segments[1]
	start := (s.Ends[len(s.Ends)-2] + frameBytes + sectorBytes) / sectorBytes * sectorBytes
	files := l.Files()
	clear(files[s.Name][start : start+sectorBytes])
	d := newDisk(t)
	d.log(files)
	if dir := d.mustOpen(); dir.Last != 9 || dir.Torn == nil || dir.Torn.Offset != int64(s.Ends[len(s.Ends)-2]) {
		t.Errorf("last %d, torn %+v", dir.Last, dir.Torn)
	}
	l.Cut()
	files2 := l.Files()
	files2[s.Name] = files[s.Name]
	d = newDisk(t)
	d.log(files2)
	damage := new(DamageError)
	if _, err := d.open(); !errors.As(err, &damage) || damage.Offset != int64(s.Ends[len(s.Ends)-2]) {
		t.Errorf("not in the last segment: %v", err)
	}
}

// FuzzReader gives the reader of records anything.
func FuzzReader(f *testing.F) {
	for _, s := range small().Segments {
		f.Add(s.Bytes, true, uint32(0))
		f.Add(s.Bytes[:len(s.Bytes)-5], false, uint32(7))
	}
	f.Fuzz(func(t *testing.T, b []byte, last bool, crc uint32) {
		r := newReader("f", bytes.NewReader(b), int64(len(b)), last, crc)
		for {
			rec, err := r.next()
			if r.off > int64(len(b)) || cap(r.buf) > len(b) {
				t.Fatalf("at %d of %d, %d bytes kept", r.off, len(b), cap(r.buf))
			}
			damage, torn := new(DamageError), errTorn{}
			if err != nil {
				if errors.As(err, &torn) && !last || !errors.Is(err, io.EOF) && !errors.As(err, &damage) && !errors.As(err, &torn) {
					t.Fatalf("%v", err)
				}
				return
			}
			// What is taken is what a writer would write, but for the padding.
			d := &Dir{}
			_ = d.take(&seen{}, rec)
		}
	})
}
