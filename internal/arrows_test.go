// Package internal holds the test that keeps the arrows between packages as
// ARCHITECTURE.md draws them.
package internal

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/engram-kv/engram/"

// arrows lists for each package which of ours it may import. A package that is
// not listed, or an import that is not allowed, fails.
var arrows = map[string][]string{
	"bench":                      {"bench/api", "bench/histogram", "bench/process", "bench/wire", "internal/terminal", "internal/tlsfiles"},
	"bench/api":                  {},
	"bench/histogram":            {},
	"bench/process":              {},
	"bench/wire":                 {},
	"cmd/engram":                 {"bench", "ctl", "internal/config", "internal/logging", "internal/processors", "internal/server", "play", "util"},
	"ctl":                        {"internal/backup", "internal/config", "internal/inspectpb", "internal/keypath", "internal/kubeobject", "internal/terminal", "util"},
	"internal/alarm":             {"internal/storage"},
	"internal/auth":              {"internal/storage"},
	"internal/backup":            {"internal/datadir", "internal/member", "internal/mvcc", "internal/raftlog", "internal/snapfile", "internal/state", "internal/storage"},
	"internal/backup/backuptest": {"internal/member", "internal/snapfile", "internal/storage"},
	"internal/clock":             {},
	"internal/command":           {},
	"internal/config":            {},
	"internal/consensus":         {"internal/clock", "internal/raftlog"},
	"internal/datadir":           {"internal/mvcc", "internal/raftlog", "internal/snapfile", "internal/state", "internal/storage"},
	"internal/discovery":         {"internal/clock"},
	"internal/grpcserver":        {"internal/clock"},
	"internal/hot":               {"internal/keypath"},
	"internal/inspectpb":         {},
	"internal/etcddir":           {"internal/member", "internal/snapfile", "internal/storage"},
	"internal/etcddir/waltest":   {},
	"internal/etcdimport":        {"internal/datadir", "internal/etcddir", "internal/member", "internal/mvcc", "internal/raftlog", "internal/snapfile", "internal/state", "internal/storage"},
	"internal/kubeobject":        {},
	"internal/keypath":           {},
	"internal/leader":            {"internal/clock", "internal/lease"},
	"internal/lease":             {"internal/storage"},
	"internal/logging":           {},
	"internal/member":            {"internal/storage"},
	"internal/mvcc":              {"internal/keypath", "internal/mvcc/index", "internal/storage"},
	"internal/mvcc/index":        {},
	"internal/pace":              {"internal/clock"},
	"internal/peer":              {"internal/clock"},
	"internal/processors":        {"internal/clock"},
	"internal/raftlog":           {},
	"internal/rpc":               {"internal/alarm", "internal/auth", "internal/clock", "internal/command", "internal/consensus", "internal/grpcserver", "internal/hot", "internal/inspectpb", "internal/keypath", "internal/lease", "internal/member", "internal/mvcc", "internal/mvcc/index", "internal/processors", "internal/state", "internal/watch"},
	"internal/server":            {"*"},
	"internal/snapfile":          {"internal/member", "internal/mvcc", "internal/storage"},
	"internal/state":             {"internal/alarm", "internal/auth", "internal/command", "internal/lease", "internal/member", "internal/mvcc", "internal/mvcc/index", "internal/storage"},
	"internal/storage":           {},
	"internal/terminal":          {},
	"internal/tlsfiles":          {},
	"internal/watch":             {"internal/clock", "internal/mvcc"},
	"internal/web":               {},
	"play":                       {},
	"internal":                   {},
	"util":                       {"internal/backup", "internal/config", "internal/datadir", "internal/etcdimport", "internal/member", "internal/raftlog", "internal/state", "internal/storage", "internal/terminal"},
}

// only lists who may import an outside module.
var only = map[string][]string{
	"github.com/cockroachdb/pebble/v2":     {"internal/storage"},
	"github.com/cockroachdb/pebble/v2/vfs": {"internal/storage", "internal/raftlog", "internal/server", "internal/backup/backuptest"},
	"google.golang.org/grpc":               {"internal/grpcserver", "internal/inspectpb", "internal/rpc", "internal/server", "ctl", "play"},
	"go.etcd.io/raft/v3":                   {"internal/consensus", "internal/raftlog"},
}

func TestArrows(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", module+"...").Output()
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, module)
		if strings.HasPrefix(name, "test/") {
			continue // tests may look anywhere
		}
		allowed, known := arrows[name]
		if !known {
			t.Errorf("package %s has no place in the picture: give it one in ARCHITECTURE.md and here", name)
		}
		for _, imp := range p.Imports {
			if users, ok := only[imp]; ok && !slices.Contains(users, name) {
				t.Errorf("%s imports %s, which is for %v alone", name, imp, users)
			}
			ours, ok := strings.CutPrefix(imp, module)
			if ok && !slices.Contains(allowed, ours) && !slices.Contains(allowed, "*") {
				t.Errorf("%s imports %s: not an arrow of ARCHITECTURE.md", name, ours)
			}
		}
	}
}
