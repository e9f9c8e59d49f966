package datadir_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/engram-kv/engram/internal/datadir"
)

// TestVerifyNames: each name that may be in a data directory is told of as what it is, and no other is known.
func TestVerifyNames(t *testing.T) {
	const (
		crash, key, snapshot = "a crash left of a file", "may hold a key", "a snapshot left behind"
		restore, importing   = "an interrupted restore left behind", "an import of etcd's data that was interrupted"
		etcd, unknown        = "the etcd member that this one was made of", "none of a member's files"
	)
	for path, want := range map[string]string{
		"LOCK": "", "IDENTITY.tmp": crash, "log/LOG-LOCK": "", "log/spare-00000007": "", "index/index.checkpoint.tmp": crash,
		"fixtures/client/cert.pem": "", "fixtures/peer/key.pem": "", "fixtures/client/.new-123": key,
		"snapshot-0000000000000001-0000000000000001/store/MANIFEST-000001": snapshot, "snapshot-0000000000000001-0000000000000001.receiving/received.db": snapshot,
		"sending-1/store/000001.sst": snapshot, "restoring/log/x": restore, "wal.restoring/x": restore,
		"import.tmp/MARKER": importing, "IMPORT": importing, "IMPORT.tmp": importing, "member": "", "member.etcd-20260101T000000Z/snap/db": etcd, "wal.etcd-20260101T000000Z/0.wal": etcd,

		"mine": unknown, "log/mine": unknown, "index/mine": unknown, "fixtures/mine": unknown, "fixtures/client/mine": unknown, "LOCK.tmp": unknown,
		"snapshot-0000000000000001-0000000000000001/index/mine": unknown, "index/index.checkpoint.tmp.tmp": unknown,
	} {
		fs := restored(t)
		if err := fs.MkdirAll(fs.PathDir("d/"+path), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, fs, "d/"+path, nil)
		r := verify(t, fs)
		told := slices.DeleteFunc(slices.Clone(r.Notes), func(note string) bool { return !strings.Contains(note, want) })
		if len(r.Problems) > 0 || want == "" && len(r.Notes) > 0 || want != "" && len(told) != 1 {
			t.Errorf("%s: problems %+v, notes %q, want %q", path, r.Problems, r.Notes, want)
		}
		strange, err := datadir.Unknown(fs, "d", "")
		if err != nil || len(strange) > 0 != (want == unknown) || want == unknown && !slices.Equal(strange, []string{"d/" + path}) {
			t.Errorf("%s: unknown are %q, %v", path, strange, err)
		}
	}
}

// TestNamesOfALogElsewhere: a directory of the log is known, wherever it is.
func TestNamesOfALogElsewhere(t *testing.T) {
	for _, dir := range []string{"wal", "d/wal", "d/deep/wal", "d"} {
		fs := restored(t)
		if err := fs.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		names, err := fs.List("d/log")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if err := fs.Rename("d/log/"+name, dir+"/"+name); err != nil {
				t.Fatal(err)
			}
		}
		write(t, fs, dir+"/mine", nil)
		unknown, err := datadir.Unknown(fs, "d", dir)
		if want := []string{dir + "/mine"}; err != nil || !slices.Equal(unknown, want) {
			t.Errorf("log in %s: unknown are %q, %v, want %q", dir, unknown, err, want)
		}
	}
}
