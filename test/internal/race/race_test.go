package race

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMainFails: a process that raced fails the run and is named to who ends it, however it ended; one that did not is not.
func TestMainFails(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		if os.Getenv("ENGRAM_CI") != "" {
			t.Fatal("the race detector needs gcc")
		}
		t.Skip("the race detector needs gcc, of Debian's package gcc")
	}
	for _, c := range []struct {
		program string
		args    []string
		raced   bool
		code    int // with which it ends
	}{
		{"clean", nil, false, 0},
		{"racy", nil, true, ExitCode},
		{"racy", []string{"fails"}, true, 1},
	} {
		t.Run(strings.Join(append([]string{c.program}, c.args...), " "), func(t *testing.T) {
			t.Setenv(Variable, "1")
			t.Setenv(settings, os.Getenv(settings)) // put back in the end
			t.Cleanup(func() { reports.Store(nil) })
			path, err := Build(".", "./testdata/"+c.program, filepath.Join(t.TempDir(), c.program))
			if err != nil {
				t.Fatal(err)
			}
			code := Main(func() int {
				cmd := exec.Command(path, c.args...)
				cmd.Run() // how it ended is asked next
				if got := cmd.ProcessState.ExitCode(); got != c.code {
					t.Errorf("it ended with %d, want %d", got, c.code)
				}
				err := Of(cmd.Process.Pid)
				if raced := err != nil && strings.Contains(err.Error(), "WARNING: DATA RACE"); raced != c.raced || err != nil && !c.raced {
					t.Errorf("of its process: %v, want a race: %t", err, c.raced)
				}
				return 0
			})
			if (code != 0) != c.raced {
				t.Errorf("the run ends with %d, and a race: %t", code, c.raced)
			}
		})
	}
}

// TestOff: without the variable nothing is different.
func TestOff(t *testing.T) {
	t.Setenv(Variable, "")
	out := filepath.Join(t.TempDir(), "racy")
	path, err := Build(".", "./testdata/racy", out)
	if err != nil || path != out {
		t.Fatal(path, err)
	}
	code := Main(func() int {
		cmd := exec.Command(path)
		if err := cmd.Run(); err != nil {
			t.Error(err)
		}
		if err := Of(cmd.Process.Pid); err != nil {
			t.Error(err)
		}
		return 0
	})
	if code != 0 {
		t.Errorf("the run ends with %d", code)
	}
}
