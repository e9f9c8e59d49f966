package member

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// Where control groups are found, version 1 with a folder for each kind, and version 2.
const (
	groupsV1 = "/sys/fs/cgroup/memory"
	groupsV2 = "/sys/fs/cgroup"
)

// confine returns a program that runs path with so much memory and no more: the kernel kills what goes above.
func confine(t testing.TB, path string, limit int64) string {
	t.Helper()
	dir, err := group(limit)
	if err != nil {
		Missing(t, "a control group for memory cannot be made, which needs root: %v", err)
	}
	t.Cleanup(func() { // after that of the cluster, which is registered later
		if err := os.Remove(dir); err != nil {
			t.Errorf("the control group stays: %v", err)
		}
	})
	script := filepath.Join(t.TempDir(), "confined")
	text := fmt.Sprintf("#!/bin/sh\necho $$ >%s/cgroup.procs && exec %s \"$@\"\n", dir, path)
	must(t, os.WriteFile(script, []byte(text), 0o700))
	return script
}

func group(limit int64) (string, error) {
	root, file := groupsV1, "memory.limit_in_bytes"
	if _, err := os.Stat(root); err != nil {
		root, file = groupsV2, "memory.max"
	}
	dir, err := os.MkdirTemp(root, "engram-")
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.FormatInt(limit, 10)), 0o600); err != nil {
		os.Remove(dir)
		return "", err
	}
	return dir, nil
}

// Missing skips a test for want of something from outside; in CI it fails it.
func Missing(t testing.TB, format string, args ...any) {
	t.Helper()
	if Long() {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}
