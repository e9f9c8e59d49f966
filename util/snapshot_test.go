package util

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/engram-kv/engram/internal/backup/backuptest"
)

const backupKeys = 100

// run runs a command line and returns what it told.
func run(t *testing.T, name string, args ...string) (code int, out, told string) {
	t.Helper()
	var o, e bytes.Buffer
	code = Run(context.Background(), name, args, Streams{Out: &o, Err: &e})
	return code, o.String(), e.String()
}

// backupFile writes a good backup.
func backupFile(t *testing.T) string { return writeFile(t, backuptest.Content(t, backupKeys)) }

func writeFile(t *testing.T, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "b.db")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStatusForms(t *testing.T) {
	path := backupFile(t)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var status struct {
		Hash                          uint32
		Revision, TotalKey, TotalSize int64
		Version                       string
	}
	_, out, _ := run(t, "etcdutl", "snapshot", "status", path, "-w", "json")
	if err := json.Unmarshal([]byte(out), &status); err != nil || status.Revision != backupKeys+1 || status.TotalKey != backupKeys || status.Version != "3.7.0" ||
		status.TotalSize != int64(len(before)-32) || status.Hash == 0 {
		t.Fatalf("%s: %+v, %v", out, status, err)
	}
	for format, want := range map[string]string{
		"simple": ", 101, 100, 172 kB, 3.7.0\n", "table": "│ HASH", "fields": "\"Revision\" : 101\n\"Keys\" : 100\n",
	} {
		code, out, told := run(t, "engram util", "snapshot", "status", "-w", format, path)
		if code != 0 || !strings.Contains(strings.ReplaceAll(out, "  ", ""), want) && !strings.Contains(out, want) || told != "" {
			t.Errorf("%s: %d, %q, %q; want %q", format, code, out, told, want)
		}
	}
	for format, want := range map[string]string{"protobuf": "protobuf not supported as output format", "nonsense": "unsupported output format"} {
		code, _, told := run(t, "engram util", "snapshot", "status", "-w", format, path)
		if code != exitFormat || told != "Error: "+want+"\n" {
			t.Errorf("%s: %d, %q", format, code, told)
		}
	}
	code, simple, _ := run(t, "engram util", "snapshot", "hashkv", path)
	if again, out, _ := run(t, "etcdutl", "hashkv", path); code != 0 || again != 0 || out != simple || !strings.HasSuffix(out, ", 101, -1\n") {
		t.Errorf("hashkv: %q and %q", simple, out)
	}
	if code, out, told := run(t, "etcdutl", "hashkv", path, "--rev", "102"); code != exitFailed || out != "" || !strings.Contains(told, "its last revision is 101, --rev is 102") {
		t.Errorf("hashkv of the future: %d %q %q", code, out, told)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file was changed: %v", err)
	}
}

// TestBadBackups: status and restore refuse what is no backup or not what was
// saved, with etcd's texts where it has them, and leave nothing.
func TestBadBackups(t *testing.T) {
	whole := backuptest.Content(t, backupKeys)
	flip := bytes.Clone(whole)
	flip[20_000] ^= 1
	for _, c := range []struct {
		name    string
		content []byte
		status  string // "" is success
		restore string
	}{
		{"empty", nil, "nothing was written", "nothing was written"},
		{"flipped", flip, "expected sha256 [", "expected sha256 ["},
		{"cut", whole[:30_000], "the file was cut", "snapshot missing hash but --skip-hash-check=false"},
		{"no checksum", whole[:len(whole)-32], "", "snapshot missing hash but --skip-hash-check=false"},
		{"text", []byte("this is not the file you are looking for"), "no database file of etcd", "snapshot missing hash but --skip-hash-check=false"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := writeFile(t, c.content)
			code, _, told := run(t, "engram util", "snapshot", "status", path)
			if (code == 0) != (c.status == "") || code > exitFailed || !strings.Contains(told, c.status) {
				t.Errorf("status: %d, %q", code, told)
			}
			dir := filepath.Join(t.TempDir(), "d")
			for _, name := range []string{"engram util", "etcdutl", "etcdctl"} {
				code, _, told = run(t, name, "snapshot", "restore", path, "--data-dir", dir)
				if code != exitFailed || !strings.HasPrefix(told, "Error: ") || !strings.Contains(told, c.restore) {
					t.Errorf("restore: %d, %q", code, told)
				}
				if names, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(names) > 0 {
					t.Errorf("left behind: %v, %v", names, err)
				}
			}
		})
	}
	// As etcdutl it tells what it can of a file whose checksum is wrong, and warns.
	path := writeFile(t, append(bytes.Clone(whole[:len(whole)-1]), ^whole[len(whole)-1]))
	if code, out, told := run(t, "etcdutl", "snapshot", "status", path); code != 0 || !strings.Contains(out, ", 101, 100, ") || !strings.HasPrefix(told, "Warning: expected sha256") {
		t.Errorf("wrong checksum as etcdutl: %d, %q, %q", code, out, told)
	}
	if code, _, told := run(t, "engram util", "snapshot", "restore", path, "--skip-hash-check", "--data-dir", filepath.Join(t.TempDir(), "d")); code != 0 || !strings.Contains(told, "Warning: expected sha256") {
		t.Errorf("wrong checksum, unchecked: %d, %q", code, told)
	}
}

// TestRestoreRevisions: ours raises the revision unless told otherwise, etcd's
// does not and warns.
func TestRestoreRevisions(t *testing.T) {
	path := backupFile(t)
	for _, c := range []struct {
		name, flags string
		code        int
		told        string
	}{
		{"engram util", "", 0, "at revision 1000000101 (the backup is of revision 101)"},
		{"engram util", "--keep-revisions", 0, "at revision 101 (the backup is of revision 101)"},
		{"engram util", "--bump-revision=5", 0, "at revision 106 "},
		{"engram util", "--bump-revision=5 --mark-compacted", 0, "at revision 106 "},
		{"engram ctl", "", 0, "at revision 1000000101 "},
		{"engram util", "--bump-revision=0", 0, "Warning: revisions go on from 101"},
		{"engram util", "--keep-revisions --bump-revision=5", exitArguments, "--keep-revisions contradicts"},
		{"engram util", "--mark-compacted", exitArguments, "--mark-compacted required if --revision-bump > 0"},
		{"etcdutl", "", 0, "Restore with --bump-revision 1000000000 --mark-compacted"},
		{"etcdctl", "", 0, "Restore with --bump-revision 1000000000 --mark-compacted"},
		{"etcdutl", "--bump-revision=5", exitArguments, "--mark-compacted required if --revision-bump > 0"},
		{"etcdutl", "--mark-compacted", exitArguments, "--mark-compacted required if --revision-bump > 0"},
		{"etcdutl", "--bump-revision=5 --mark-compacted", 0, "at revision 106 "},
		{"etcdutl", "--bump-revision=9223372036854775807 --mark-compacted", exitFailed, "is too much for revision 101"},
	} {
		dir := filepath.Join(t.TempDir(), "d")
		args := append([]string{"snapshot", "restore", path, "--data-dir", dir}, strings.Fields(c.flags)...)
		code, out, told := run(t, c.name, args...)
		if code != c.code || out != "" || !strings.Contains(told, c.told) {
			t.Errorf("%s %s: %d, %q, %q", c.name, c.flags, code, out, told)
		}
		if _, err := os.Stat(dir); (err == nil) != (code == 0) {
			t.Errorf("%s %s: %v", c.name, c.flags, err)
		}
		if warned := strings.Contains(told, "Warning: revisions go on"); code == 0 && warned != (strings.Contains(told, "at revision 101 ") && !strings.Contains(c.flags, "keep")) {
			t.Errorf("%s %s: warned %v: %q", c.name, c.flags, warned, told)
		}
	}
}

// TestRestoreFlags has etcd's refusals.
func TestRestoreFlags(t *testing.T) {
	path := backupFile(t)
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	two := "m1=http://127.0.0.1:1,m2=http://127.0.0.1:2"
	for _, c := range []struct {
		flags string
		code  int
		told  string
	}{
		{"--name x", exitFailed, `couldn't find local name "x" in the initial cluster configuration`},
		{"--name m1 --initial-cluster " + two + " --initial-advertise-peer-urls http://127.0.0.1:9", exitFailed,
			"--initial-cluster has m1=http://127.0.0.1:1 but missing from --initial-advertise-peer-urls=http://127.0.0.1:9"},
		{"--name m1 --initial-cluster " + two + " --initial-advertise-peer-urls http://127.0.0.1:1,http://127.0.0.1:9", exitFailed,
			"--initial-advertise-peer-urls has http://127.0.0.1:9 but missing from --initial-cluster="},
		{"--initial-cluster default=xx://a:1", exitFailed, "URL scheme must be http, https, unix, or unixs"},
		{"--initial-advertise-peer-urls ::", exitFailed, "missing protocol scheme"},
		{"--name m1 --initial-cluster m1=http://a:1,m2=http://a:1 --initial-advertise-peer-urls http://a:1", exitFailed, "has duplicate url"},
		{"--data-dir " + full, exitFailed, `data-dir "` + full + `" not empty or could not be read`},
		{"--wal-dir " + full, exitFailed, `wal-dir "` + full + `" exists`},
		{"--all", exitArguments, "--all needs --output-dir"},
		{"--all --output-dir o --name x", exitArguments, "--name is about one member"},
		{"--output-dir o", exitArguments, "--output-dir goes with --all"},
		{"--all --output-dir o --initial-cluster ../m=http://a:1", exitArguments, "cannot be the name of a directory"},
		{"--nonsense", exitFailed, "unknown flag: --nonsense"},
	} {
		dir := filepath.Join(t.TempDir(), "d")
		args := []string{"snapshot", "restore", path}
		if !strings.Contains(c.flags, "-dir") && !strings.Contains(c.flags, "--all") || strings.Contains(c.flags, "--wal-dir") {
			args = append(args, "--data-dir", dir)
		}
		code, _, told := run(t, "etcdutl", append(args, strings.Fields(c.flags)...)...)
		if code != c.code || !strings.Contains(told, c.told) {
			t.Errorf("%s: %d, %q, want %q", c.flags, code, told, c.told)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s: something was made", c.flags)
		}
	}
	for _, args := range [][]string{{"status"}, {"status", "a", "b"}, {"restore"}, {"restore", "a", "b"}} {
		if code, _, told := run(t, "etcdutl", append([]string{"snapshot"}, args...)...); code != exitArguments || told != "Error: snapshot "+args[0]+" requires exactly one argument\n" {
			t.Errorf("%v: %d, %q", args, code, told)
		}
	}
	if code, _, told := run(t, "etcdutl", "snapshot", "status", "/none"); code != exitFailed || told != "Error: stat /none: no such file or directory\n" {
		t.Errorf("no file: %d, %q", code, told)
	}
	if code, _, told := run(t, "etcdutl", "snapshot", "restore", "/none"); code != exitFailed || told != "Error: open /none: no such file or directory\n" {
		t.Errorf("no file: %d, %q", code, told)
	}
}

// TestRestoreAll makes three directories, which verify finds sound, and finds
// damaged once one byte of a table is another.
func TestRestoreAll(t *testing.T) {
	path, dir := backupFile(t), filepath.Join(t.TempDir(), "cluster")
	cluster := "a=http://10.0.0.1:2380,b=http://10.0.0.2:2380,c=http://10.0.0.3:2380"
	code, _, told := run(t, "engram util", "snapshot", "restore", path, "--all", "--output-dir", dir, "--initial-cluster", cluster)
	if code != 0 {
		t.Fatal(told)
	}
	members := map[string]bool{}
	for _, name := range []string{"a", "b", "c"} {
		code, out, told := run(t, "engram util", "verify", filepath.Join(dir, name), "-w", "json")
		var report struct {
			MemberID, ClusterID string
			Sound               bool
			Store               struct{ Keys int }
		}
		if err := json.Unmarshal([]byte(out), &report); err != nil || code != 0 || !report.Sound || report.Store.Keys != backupKeys+1 {
			t.Fatalf("%s: %d, %s, %s, %v", name, code, out, told, err)
		}
		members[report.MemberID+report.ClusterID[:0]] = true
	}
	if len(members) != 3 {
		t.Errorf("member IDs: %v", members)
	}
	if code, _, told := run(t, "engram util", "snapshot", "restore", path, "--all", "--output-dir", dir, "--initial-cluster", cluster); code != exitFailed || !strings.Contains(told, "not empty") {
		t.Errorf("again: %d, %q", code, told)
	}
	if code, out, told := run(t, "etcdutl", "defrag", "--data-dir", filepath.Join(dir, "a")); code != 0 || out != "" || !strings.HasPrefix(told, "finished defragmenting directory ") {
		t.Errorf("defrag: %d, %q, %q", code, out, told)
	}
	if code, _, _ := run(t, "engram util", "verify", filepath.Join(dir, "a")); code != 0 {
		t.Error("after defrag it is not sound")
	}
	for args, want := range map[string]string{"": `required flag(s) "data-dir" not set`, "--data-dir=/none": "Failed to defragment etcd data[/none] (stat /none: no such file or directory)"} {
		if code, _, told := run(t, "etcdutl", append([]string{"defrag"}, strings.Fields(args)...)...); code != exitFailed || told != "Error: "+want+"\n" {
			t.Errorf("defrag %s: %d, %q", args, code, told)
		}
	}
	tables, err := filepath.Glob(filepath.Join(dir, "b", "store", "*.sst"))
	if err != nil || len(tables) == 0 {
		t.Fatal(tables, err)
	}
	var largest string
	var size int64
	for _, table := range tables {
		if info, err := os.Stat(table); err == nil && info.Size() > size {
			largest, size = table, info.Size()
		}
	}
	b, err := os.ReadFile(largest)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/3] ^= 8
	if err := os.WriteFile(largest, b, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, _ := run(t, "engram util", "verify", filepath.Join(dir, "b"))
	if code != exitFailed || !strings.Contains(out, "DAMAGED: ") || !strings.Contains(out, filepath.Base(largest)) || !strings.Contains(out, "What to do: ") {
		t.Errorf("%d, %s", code, out)
	}
}

func TestVersion(t *testing.T) {
	_, etcd, _ := run(t, "etcdutl", "version")
	_, ours, _ := run(t, "engram util", "version")
	if !strings.HasPrefix(etcd, "etcdutl version: 3.7.") || !strings.HasSuffix(etcd, "API version: 3.7\n") || !strings.HasPrefix(ours, etcd) {
		t.Errorf("%q and %q", etcd, ours)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, out, told := run(t, "engram util", "completion", shell); code != 0 || len(out) < 100 {
			t.Errorf("%s: %d, %q", shell, code, told)
		}
	}
	if code, _, told := run(t, "engram util", "nonsense"); code != exitFailed || !strings.Contains(told, `unknown command "nonsense"`) || !strings.Contains(told, "Run 'engram util --help'") {
		t.Errorf("%d, %q", code, told)
	}
}
