package compat

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/script"
)

// TestScripts carries out every script under testdata/scripts, each on a pair of its own.
func TestScripts(t *testing.T) {
	t.Parallel() // it waits more than it works
	runScripts(t, "testdata/scripts", subject)
}

// TestScriptsForLater carries out the scripts for services that Engram does not offer yet, on etcd alone, so that they
// hold when they are needed.
func TestScriptsForLater(t *testing.T) {
	runScripts(t, "testdata/later", programs.Etcd)
}

// TestLaterIsNow fails once Engram offers a service whose test runs on etcd alone: then that test is to be moved.
func TestLaterIsNow(t *testing.T) {
	if programs.Engram == "" {
		return // etcd is compared with itself
	}
	later := map[string]string{
		"Lock": "testdata/later/lock-election.txt belongs under testdata/scripts",
	}
	server, err := process.Start(process.Options{Program: subject, Dir: t.TempDir(), Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for name, what := range later {
		method := methods[name]
		request, err := method.Parse("")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := method.Call(ctx, server.Conn(), request); status.Code(err) != codes.Unimplemented {
			t.Errorf("Engram serves %s now, it answered %v: %s", name, err, what)
		}
	}
}

func runScripts(t *testing.T, dir, subject string) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no scripts in %s: %v", dir, err)
	}
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			runner := script.Runner{Reference: programs.Etcd, Subject: subject, Methods: methods}
			runner.Run(t, path)
		})
	}
}
