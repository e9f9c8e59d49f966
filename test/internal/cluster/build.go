package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/engram-kv/engram/test/internal/race"
)

const (
	module = "github.com/engram-kv/engram"

	// ProgramVariable names the environment variable that chooses the program of tests: etcd, which shows faults of the
	// tests themselves, etcd36 or engram. Unset: DefaultProgram.
	ProgramVariable = "CLUSTER_PROGRAM"
	DefaultProgram  = "engram"
)

// Chosen is the name of the program that ProgramVariable or else DefaultProgram chooses.
func Chosen() string {
	if name := os.Getenv(ProgramVariable); name != "" {
		return name
	}
	return DefaultProgram
}

// sources are the modules and packages of the programs, below the root.
var sources = map[string]struct{ dir, pkg string }{
	"engram": {".", "./cmd/engram"},
	"etcd":   {"test/compat", "./cmd/etcd"},
	"etcd36": {"test/compat36", "."},
	"etcd35": {"test/compat35", "."},

	"etcdutl36": {"test/compat36", "./etcdutl"}, // no server
}

// Build builds a program, etcd, etcd36, etcd35 or engram, into the user's cache directory. Go's build cache makes every build
// after the first one a link.
func Build(name string) (Program, error) {
	source, ok := sources[name]
	if !ok {
		return Program{}, fmt.Errorf("program %q: there is etcd, etcd36, etcd35 and engram", name)
	}
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).CombinedOutput()
	if err != nil {
		return Program{}, fmt.Errorf("finding module %s: %w\n%s", module, err, root)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return Program{}, err
	}
	build := race.BuildReference
	if name == DefaultProgram {
		build = race.Build
	}
	path, err := build(filepath.Join(strings.TrimSpace(string(root)), source.dir), source.pkg, filepath.Join(dir, "engram-compat", name))
	return Program{Name: name, Path: path}, err
}
