// Package member builds etcd and Engram and runs one member of either as a child process on loopback ports.
//
// It knows nothing of what is measured, only how to read what a process has used. Member is the main type. Invariants:
//
//	P1: every Member listens on loopback ports only and has a data directory of its own.
//	P2: a Member is ended by its own process id, never by name.
//	P3: both programs get the same flags.
package member

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const module = "github.com/engram-kv/engram"

// BuildEngram builds engram into dir and returns the program's path.
func BuildEngram(dir string) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	out := filepath.Join(dir, "bin", "engram")
	return out, build(root, "./cmd/engram", out)
}

// FindEtcd returns real etcd's program: the one built before into the user's cache directory, or else one built now from
// the nested module that pins its version.
func FindEtcd() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	out := filepath.Join(cache, "engram-compat", "etcd")
	if _, err := os.Stat(out); err == nil {
		return out, nil
	}
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	return out, build(filepath.Join(root, "test", "compat"), "./cmd/etcd", out)
}

func moduleRoot() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("finding module %s: %w: run this from inside it\n%s", module, err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

func build(dir, pkg, out string) error {
	cmd := exec.Command("go", "build", "-o", out, pkg)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s in %s: %w\n%s", pkg, dir, err, text)
	}
	return nil
}
