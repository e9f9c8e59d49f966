package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestAgain: a test that fails at first is run alone and reported; one that goes on failing, that finds a wrong value, or that panics
// fails the whole.
func TestAgain(t *testing.T) {
	const mod = "module example.com/m\n\ngo 1.26\n"
	const begin = "package m\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestOther(t *testing.T) {}\n\nvar _ = os.Stat\n\n"
	const first = "func TestFirst(t *testing.T) {\n\tif _, err := os.Stat(\"ran\"); err != nil {\n\t\tos.WriteFile(\"ran\", nil, 0o644)\n\t\tt.Error(\"%MESSAGE%\")\n\t}\n}\n"
	for name, test := range map[string]struct {
		source, cause, report string
	}{
		"passes":      {source: "func TestFirst(t *testing.T) {}\n"},
		"then passes": {source: strings.Replace(first, "%MESSAGE%", "too late", 1), report: "example.com/m TestFirst failed once, and passed 3 times alone\n"},
		"wrong value": {source: strings.Replace(first, "%MESSAGE%", "the history of 3 operations is not linearizable", 1), cause: `says "linearizable"`},
		"a log": {source: strings.Replace(first, "%MESSAGE%", "too late\\nacknowledged writes are lost if this machine stops", 1),
			report: "example.com/m TestFirst failed once, and passed 3 times alone\n"},
		"always":   {source: "func TestFirst(t *testing.T) { t.Error(\"too late\") }\n", cause: "failed alone too"},
		"below":    {source: "func TestFirst(t *testing.T) { t.Run(\"a\", func(t *testing.T) { t.Error(\"the hashes at revision 3 differ\") }) }\n", cause: `says "hashes at"`},
		"panics":   {source: strings.Replace(first, "t.Error(\"%MESSAGE%\")", "panic(1)", 1), cause: `says "panic: "`},
		"exits":    {source: "func TestFirst(t *testing.T) { os.Exit(3) }\n", cause: "failed"},
		"no build": {source: "func TestFirst(t *testing.T) { no }\n", cause: "not in a test"},
		"many": {source: "func TestA(t *testing.T) { t.Error(1) }\nfunc TestB(t *testing.T) { t.Error(1) }\nfunc TestC(t *testing.T) { t.Error(1) }\n",
			cause: "3 failures"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range map[string]string{"go.mod": mod, "m_test.go": begin + test.source} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			t.Chdir(dir)
			t.Setenv("GOWORK", "off")
			report := filepath.Join(t.TempDir(), "report")
			err := run([]string{"go", "test", "-timeout=1m", "./..."}, report)
			if test.cause == "" && err != nil || test.cause != "" && (err == nil || !strings.Contains(err.Error(), test.cause)) {
				t.Errorf("it ends with %v, want %q", err, test.cause)
			}
			got, _ := os.ReadFile(report)
			if string(got) != test.report {
				t.Errorf("it reports %q, want %q", got, test.report)
			}
		})
	}
}
