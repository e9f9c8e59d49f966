// Package process builds the programs under comparison and runs them as child processes on loopback ports.
//
// It knows nothing of what is asked of them. Programs holds the paths of the built programs; Server is one running
// member with a data directory of its own. Invariants:
//
//	P1: every Server listens on loopback ports only.
//	P2: a Server is stopped by its own process id, never by name.
//	P3: Start returns only once the member answers, or with the end of its log in the error.
package process

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Programs are the paths of the programs under comparison. A path is empty if the program was not asked for.
type Programs struct {
	Etcd, Etcdctl, Etcdutl string // the reference, built from its modules
	Engram                 string // ours, built from the parent module
}

// BuildReference builds etcd, etcdctl and etcdutl from moduleDir (this module's root) into dir. Go's build cache makes
// every build after the first one a link.
func BuildReference(moduleDir, dir string) (Programs, error) {
	var p Programs
	for name, path := range map[string]*string{"etcd": &p.Etcd, "etcdctl": &p.Etcdctl, "etcdutl": &p.Etcdutl} {
		*path = filepath.Join(dir, name)
		if err := build(moduleDir, "./cmd/"+name, *path); err != nil {
			return Programs{}, err
		}
	}
	return p, nil
}

// BuildEngram builds engram from the parent module in moduleDir into dir and returns the program's path.
func BuildEngram(moduleDir, dir string) (string, error) {
	out := filepath.Join(dir, "engram")
	return out, build(moduleDir, "./cmd/engram", out)
}

// BuildSnapfile builds the tool snapfile from the parent module in moduleDir into dir and returns its path.
func BuildSnapfile(moduleDir, dir string) (string, error) {
	out := filepath.Join(dir, "snapfile")
	return out, build(moduleDir, "./test/snapfile", out)
}

func build(moduleDir, pkg, out string) error {
	cmd := exec.Command("go", "build", "-o", out, pkg)
	cmd.Dir = moduleDir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s in %s: %w\n%s", pkg, moduleDir, err, text)
	}
	return nil
}
