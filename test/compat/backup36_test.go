package compat

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestBackupToEtcd36 has Engram save a backup in a cluster with etcd 3.6, and the etcdutl of that release tell of it and restore it: etcd 3.6 has on it
// what the cluster had, with equal hashes.
func TestBackupToEtcd36(t *testing.T) {
	if programs.Engram == "" {
		t.Skip("COMPAT_SUBJECT=etcd: there is no Engram to save a backup")
	}
	etcd, util := seat(t, "etcd36"), seat(t, "etcdutl36") // built while no other test runs
	t.Parallel()                                          // it waits more than it works
	ctx, c := mixedContext(t), tools{t: t}
	cl := newCluster(t, quick...)
	check(t, cl.Start(ctx, etcd, seat(t, "engram")))
	m := cl.Of("engram")
	check(t, fillImport(ctx, cl, m))
	want, err := contentOf(ctx, m)
	check(t, err)
	backup := filepath.Join(t.TempDir(), "backup")
	c.run(programs.Engram, "ctl", "--endpoints", m.ClientURL, "--user", cl.User+":"+cl.Pass, "snapshot", "save", backup)

	type status struct {
		Hash                          uint32
		Revision, TotalKey, TotalSize int64
		Version                       string
	}
	var told [2]status
	for i, command := range [][]string{{util.Path}, {programs.Engram, "util"}} {
		out, err := exec.CommandContext(ctx, command[0], append(command[1:], "snapshot", "status", backup, "-w", "json")...).Output()
		check(t, err)
		check(t, json.Unmarshal(out, &told[i]))
	}
	if told[0] != told[1] || told[0].TotalKey == 0 || told[0].Version != "3.6.0" {
		t.Errorf("etcdutl 3.6 tells %+v, ours %+v", told[0], told[1])
	}

	restored := newCluster(t, quick...)
	check(t, restored.Start(ctx, etcd))
	r := restored.Members()[0]
	check(t, r.Stop())
	check(t, os.RemoveAll(r.DataDir))
	c.run(util.Path, "snapshot", "restore", backup, "--data-dir", r.DataDir, "--name", r.Name,
		"--initial-cluster", r.Name+"="+r.PeerURL, "--initial-advertise-peer-urls", r.PeerURL)
	restored.User, restored.Pass = cl.User, cl.Pass
	check(t, forgetToken(restored, r))
	check(t, r.Restart(ctx))
	got, err := contentOf(ctx, r)
	check(t, err)
	sameContent(t, withoutMembers(want), withoutMembers(got))
	client, err := r.Client()
	check(t, err)
	_, err = client.Put(ctx, "after", "x")
	check(t, err)
}

// withoutMembers leaves out of contentOf what a restore makes anew.
func withoutMembers(lines []string) (out []string) {
	for _, line := range lines {
		if line, _, _ = strings.Cut(line, ", member "); !strings.HasPrefix(line, "member ") {
			out = append(out, line)
		}
	}
	return out
}
