// Package race puts the programs that tests run as processes under the race detector.
//
// The environment variable ENGRAM_RACE asks for it. Build then builds with the detector, Main has every process of the run write what
// the detector finds into files of the run, where neither kill -9 nor a log of which only the end is kept takes it away, and fails the run for
// each of them; Of gives the test that ends a process its finding at once. Without the variable they do what the go command does.
//
// A process goes on after a race, and ends with ExitCode where it would have ended with 0. It takes some times the CPU, time and memory: tests that bound
// these ask On.
package race

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
)

const (
	// Variable names the environment variable that asks for the race detector.
	Variable = "ENGRAM_RACE"
	// ExitCode is that of a process which raced and else had nothing to complain of.
	ExitCode = 66

	settings = "GORACE" // the detector's own variable
	suffix   = "-race"  // of programs
)

// reports is the beginning of the names of the files with findings; the detector adds a dot and the process id.
var reports atomic.Pointer[string]

// On says that programs run under the race detector.
func On() bool {
	v := os.Getenv(Variable)
	return v != "" && v != "0"
}

// Build builds the package pkg of the module in dir as the program out, and returns its path: another one with the race detector, so
// that runs with it and without do not take each other's programs.
func Build(dir, pkg, out string) (string, error) {
	if On() {
		return build(dir, pkg, out+suffix, "CGO_ENABLED=1", "-race")
	}
	return BuildReference(dir, pkg, out)
}

// BuildReference is Build of what others have written, never with the detector.
func BuildReference(dir, pkg, out string) (string, error) {
	return build(dir, pkg, out, "CGO_ENABLED=0")
}

func build(dir, pkg, out, cgo string, flags ...string) (string, error) {
	cmd := exec.Command("go", slices.Concat([]string{"build"}, flags, []string{"-o", out, pkg})...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), cgo)
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s in %s: %w\n%s", strings.Join(cmd.Args, " "), dir, err, text)
	}
	return out, nil
}

// Main runs tests, as testing.M.Run, and fails those whose processes raced. For TestMain, before any process is started.
func Main(run func() int) (code int) {
	if !On() {
		return run()
	}
	code, err := watched(run)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	return code
}

func watched(run func() int) (code int, err error) {
	dir, err := os.MkdirTemp("", "engram-race-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "report")
	// Processes inherit it.
	if err := os.Setenv(settings, strings.TrimSpace(fmt.Sprintf("%s log_path=%s exitcode=%d", os.Getenv(settings), path, ExitCode))); err != nil {
		return 1, err
	}
	reports.Store(&path)
	code = run()
	files, err := filepath.Glob(path + ".*")
	if err != nil {
		return code, err
	}
	var errs []error
	for _, file := range files {
		errs = append(errs, read(file))
	}
	return code, errors.Join(errs...)
}

// Of is an error with what the race detector found in a process that has ended, and nil if that is nothing.
func Of(pid int) error {
	path := reports.Load()
	if path == nil {
		return nil
	}
	if err := read(fmt.Sprintf("%s.%d", *path, pid)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func read(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return fmt.Errorf("process %s under the race detector:\n%s", strings.TrimPrefix(filepath.Ext(file), "."), text)
}
