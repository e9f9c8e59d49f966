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
	"path/filepath"

	"github.com/engram-kv/engram/test/internal/race"
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
		var err error
		if *path, err = race.BuildReference(moduleDir, "./cmd/"+name, filepath.Join(dir, name)); err != nil {
			return Programs{}, err
		}
	}
	return p, nil
}

// BuildEngram builds engram from the parent module in moduleDir into dir and returns the program's path.
func BuildEngram(moduleDir, dir string) (string, error) {
	return race.Build(moduleDir, "./cmd/engram", filepath.Join(dir, "engram"))
}

// BuildSnapfile builds the tool snapfile from the parent module in moduleDir into dir and returns its path.
func BuildSnapfile(moduleDir, dir string) (string, error) {
	return race.Build(moduleDir, "./test/snapfile", filepath.Join(dir, "snapfile"))
}
