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
	"cmd/engram":          {"ctl", "internal/config", "internal/logging", "internal/server", "play"},
	"ctl":                 {"internal/config"},
	"internal/alarm":      {"internal/storage"},
	"internal/auth":       {"internal/storage"},
	"internal/clock":      {},
	"internal/command":    {},
	"internal/config":     {},
	"internal/consensus":  {"internal/clock", "internal/raftlog"},
	"internal/discovery":  {"internal/clock"},
	"internal/leader":     {"internal/clock", "internal/lease"},
	"internal/lease":      {"internal/storage"},
	"internal/logging":    {},
	"internal/member":     {"internal/storage"},
	"internal/mvcc":       {"internal/mvcc/index", "internal/storage"},
	"internal/mvcc/index": {},
	"internal/peer":       {"internal/clock"},
	"internal/raftlog":    {},
	"internal/rpc":        {"internal/alarm", "internal/auth", "internal/clock", "internal/command", "internal/consensus", "internal/lease", "internal/member", "internal/mvcc", "internal/mvcc/index", "internal/state", "internal/watch"},
	"internal/server":     {"*"},
	"internal/snapfile":   {"internal/member", "internal/mvcc", "internal/storage"},
	"internal/state":      {"internal/alarm", "internal/auth", "internal/command", "internal/lease", "internal/member", "internal/mvcc", "internal/mvcc/index", "internal/storage"},
	"internal/storage":    {},
	"internal/tlsfiles":   {},
	"internal/watch":      {"internal/clock", "internal/mvcc"},
	"internal/web":        {},
	"play":                {},
	"internal":            {},
}

// only lists who may import an outside module.
var only = map[string][]string{
	"github.com/cockroachdb/pebble/v2":     {"internal/storage"},
	"github.com/cockroachdb/pebble/v2/vfs": {"internal/storage", "internal/raftlog", "internal/server"},
	"google.golang.org/grpc":               {"internal/rpc", "internal/server", "ctl", "play"},
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
