// Package compat compares Engram with real etcd: the same requests to both, and every answer, code and text must be equal.
//
// It holds tests only. The programs are built once per run. What is not Engram's own is asked of etcd's own programs, so
// nothing here knows the right answers. The environment chooses what is run:
//
//	COMPAT_SUBJECT  path of the server to compare with etcd; `etcd` compares etcd with itself, which shows faults of the
//	                tests. Unset: engram, built from the parent module
//	COMPAT_SEED     seed of the random test; unset: another one each run, printed
//	COMPAT_OPS      operations of the random test
//	CLUSTER_PROGRAM the program beside etcd in mixed clusters, see package cluster
//	ENGRAM_CI       a missing etcd-client package fails instead of skipping
//	ENGRAM_RACE     builds engram with the race detector, see package race
package compat

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/race"
)

const parentModule = "../.."

// Set by TestMain, read by tests.
var (
	programs process.Programs
	subject  string // the server compared with etcd
	methods  map[string]wire.Method
)

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	// Programs stay here from run to run: go build leaves one that is up to date alone.
	dir, err := os.UserCacheDir()
	if err != nil {
		return 0, err
	}
	dir = filepath.Join(dir, "engram-compat")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, err
	}
	if programs, err = process.BuildReference(".", dir); err != nil {
		return 0, err
	}
	switch subject = os.Getenv("COMPAT_SUBJECT"); subject {
	case "":
		if subject, err = process.BuildEngram(parentModule, dir); err != nil {
			return 0, err
		}
		programs.Engram = subject
	case "etcd":
		subject = programs.Etcd
	default:
		if subject, err = filepath.Abs(subject); err != nil {
			return 0, err
		}
		programs.Engram = subject
	}
	if methods, err = wire.Methods(); err != nil {
		return 0, err
	}
	return race.Main(m.Run), nil
}
