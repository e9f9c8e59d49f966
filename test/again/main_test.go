package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/engram-kv/engram/test/internal/broken"
)

// TestAgain: a test that fails at first is run alone and reported; one that goes on failing, that finds a wrong value or a broken
// guarantee, wherever it says so, or that panics fails the whole.
func TestAgain(t *testing.T) {
	const mod = "module example.com/m\n\ngo 1.26\n"
	const begin = "package m\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestOther(t *testing.T) {}\n\nvar _ = os.Stat\n\n"
	const first = "func TestFirst(t *testing.T) {\n\tif _, err := os.Stat(\"ran\"); err != nil {\n\t\tos.WriteFile(\"ran\", nil, 0o644)\n\t\tt.Error(\"%MESSAGE%\")\n\t}\n}\n"
	says := func(message string) string { return strings.Replace(first, "%MESSAGE%", message, 1) } // the first time
	said := fmt.Sprintf("says %q", broken.Mark)
	for name, test := range map[string]struct {
		source, cause, report, timeout string
	}{
		"passes":                    {source: "func TestFirst(t *testing.T) {}\n"},
		"then passes":               {source: says("too late"), report: "example.com/m TestFirst failed once, and passed 3 times alone\n"},
		"wrong value":               {source: says("the lease has 3 s left, it should be 5"), cause: `says "it should be"`},
		"a guarantee":               {source: says(broken.Errorf("of users and roles a tells 1, b tells 2").Error()), cause: said},
		"a guarantee, further down": {source: says("seed 7, life 2:\\nwatcher 1: " + broken.Errorf("event 5 after event 6").Error() + "\\nand more"), cause: said},
		"a guarantee, logged":       {source: strings.Replace(says("too late"), "t.Error(", "t.Log(\"in the end\\n"+broken.Mark+" a write is gone\"); t.Error(", 1), cause: said},
		"a guarantee, below": {source: "func TestFirst(t *testing.T) { t.Run(\"a\", func(t *testing.T) { t.Error(\"after 3 s\\n" + broken.Mark + " the hashes differ\") }) }\n",
			cause: said},
		"a log": {source: says("too late\\nacknowledged writes are lost if this machine stops"),
			report: "example.com/m TestFirst failed once, and passed 3 times alone\n"},
		"always":   {source: "func TestFirst(t *testing.T) { t.Error(\"too late\") }\n", cause: "failed alone too"},
		"below":    {source: "func TestFirst(t *testing.T) { t.Run(\"a\", func(t *testing.T) { t.Error(\"3 places were lost\") }) }\n", cause: `says "were lost"`},
		"panics":   {source: strings.Replace(first, "t.Error(\"%MESSAGE%\")", "panic(1)", 1), cause: `says "panic: "`},
		"exits":    {source: "func TestFirst(t *testing.T) { os.Exit(3) }\n", cause: "failed"},
		"no build": {source: "func TestFirst(t *testing.T) { no }\n", cause: "not in a test"},
		"stands still": {source: "func TestFirst(t *testing.T) { t.Run(\"a\", func(t *testing.T) { select {} }) }\nfunc init() { go func() { for { os.Stat(\"ran\") } }() }\n",
			timeout: "1s", cause: "these did not end: TestFirst (1s), TestFirst/a (1s)"},
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
			err := run([]string{"go", "test", "-timeout=" + cmp.Or(test.timeout, "1m"), "./..."}, report)
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
