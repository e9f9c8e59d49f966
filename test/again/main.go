// Again runs a command of go test, and where one or two of its tests fail, each of them alone once more.
//
//	again [-report FILE] go test ARGUMENTS
//
// Most tests here are of real processes, on a machine that does other things too. One that fails, and then passes three times in a
// row by itself, lets again succeed, and is named in FILE: it is a defect still, of the test or of what it tests. Never run again is
// what time cannot excuse: a data race, a panic, a package that does not build or end, and a guarantee that broke. Tests say the
// last by test/internal/broken.
//
// Flags of go test that have a value are given as -flag=value.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/engram-kv/engram/test/internal/broken"
)

const (
	mostFailures = 2
	passes       = 3
)

// crashed is in the output of what did not end as a test; unexcused in what tests of packages say of a wrong value that cannot use
// broken, which is for what is below test. Only the lines that testing.T wrote are looked at for the latter, up to the logs that a
// test gives in full: logs of members use such words too.
var (
	crashed   = regexp.MustCompile(`WARNING: DATA RACE|(?m)^(panic|fatal error): `)
	unexcused = regexp.MustCompile(`were lost|(is|are) lost|was acknowledged|it should be|should have`)
	said      = regexp.MustCompile(`(?m)^ +[a-z0-9_]+_test\.go:[0-9]+: .*$`)
)

// wrong is what shows that a test found something wrong, and "" if nothing does.
func wrong(output string) string {
	if word := crashed.FindString(output); word != "" {
		return word
	}
	if strings.Contains(output, broken.Mark) {
		return broken.Mark
	}
	return unexcused.FindString(strings.Join(said.FindAllString(output, -1), "\n"))
}

// event is one of cmd/test2json's.
type event struct{ Action, Package, ImportPath, Test, Output string }

// failure is of one test with all that is below it.
type failure struct{ Package, Test, Output string }

// A package that did not end has a dump of goroutines in the output of one of its tests. unfinished names the tests that ran;
// stacks are those of the goroutines that are in a test.
var unfinished = regexp.MustCompile(`(?s)\nrunning tests:\n(.*?)\n\n`)

func stacks(output string) string {
	var of strings.Builder
	for _, block := range strings.Split(output, "\n\n") {
		if !strings.HasPrefix(block, "goroutine ") || strings.Contains(block, "_test.go:") {
			of.WriteString(block + "\n\n")
		}
	}
	return of.String()
}

// read copies what go test would print of the events, and returns the tests that failed. Failures that are no test's, as of a
// package that does not build, have no Test.
func read(events io.Reader, verbose bool, out io.Writer) ([]failure, error) {
	var failures []failure
	output := map[[2]string]*strings.Builder{}
	of := func(e event) *strings.Builder {
		top, _, _ := strings.Cut(e.Test, "/")
		key := [2]string{e.Package, top}
		if output[key] == nil {
			output[key] = new(strings.Builder)
		}
		return output[key]
	}
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil || e.Action == "" {
				out.Write(line) // of the go command itself
				continue
			}
			below := strings.Contains(e.Test, "/")
			switch e.Action {
			case "output":
				of(e).WriteString(e.Output)
				if e.Test == "" || verbose && strings.HasPrefix(strings.TrimSpace(e.Output), "--- ") {
					io.WriteString(out, e.Output)
				}
			case "build-output":
				io.WriteString(out, e.Output)
			case "build-fail":
				failures = append(failures, failure{Package: e.ImportPath})
			case "fail":
				if below {
					continue
				}
				if e.Test != "" {
					io.WriteString(out, of(e).String())
					failures = append(failures, failure{Package: e.Package, Test: e.Test, Output: of(e).String()})
				} else {
					left := of(e).String()
					for key, text := range output {
						if key[0] == e.Package && key[1] != "" { // did not end
							io.WriteString(out, stacks(text.String()))
							left += text.String()
							delete(output, key)
						}
					}
					known := slices.ContainsFunc(failures, func(f failure) bool { return f.Package == e.Package })
					if !known || crashed.MatchString(left) {
						failures = append(failures, failure{Package: e.Package, Output: left})
					}
				}
				fallthrough
			case "pass", "skip":
				if !below {
					delete(output, [2]string{e.Package, e.Test})
				}
			}
		}
		if err == io.EOF {
			return failures, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// excused tells whether the failures may be the tests' own fault.
func excused(failures []failure) error {
	if len(failures) > mostFailures {
		return fmt.Errorf("%d failures", len(failures))
	}
	for _, f := range failures {
		if f.Test == "" {
			running := ""
			if found := unfinished.FindStringSubmatch(strings.ReplaceAll(f.Output, "\t", "")); found != nil {
				running = ": these did not end: " + strings.ReplaceAll(found[1], "\n", ", ")
			}
			return fmt.Errorf("%s failed, and not in a test%s", f.Package, running)
		}
		if word := wrong(f.Output); word != "" {
			return fmt.Errorf("%s %s failed, and says %q", f.Package, f.Test, word)
		}
	}
	return nil
}

// alone is the command that runs one test so often.
func alone(command []string, f failure) []string {
	again := []string{command[0], command[1], "-count=" + fmt.Sprint(passes), "-failfast", "-run=^" + f.Test + "$"}
	for _, argument := range command[2:] {
		name, _, _ := strings.Cut(strings.TrimLeft(argument, "-"), "=")
		if strings.HasPrefix(argument, "-") && !slices.Contains([]string{"run", "skip", "count", "v"}, name) {
			again = append(again, argument)
		}
	}
	return append(again, f.Package)
}

func run(command []string, report string) error {
	verbose := slices.Contains(command, "-v")
	test := exec.Command(command[0], append([]string{command[1], "-json"}, command[2:]...)...)
	test.Stderr = os.Stderr
	events, err := test.StdoutPipe()
	if err != nil {
		return err
	}
	if err := test.Start(); err != nil {
		return err
	}
	failures, err := read(events, verbose, os.Stdout)
	if err != nil {
		return err
	}
	failed := test.Wait()
	if failed == nil {
		return nil
	}
	if len(failures) == 0 {
		return failed
	}
	if err := excused(failures); err != nil {
		return err
	}
	for _, f := range failures {
		fmt.Printf("*** %s %s failed: %d times alone\n", f.Package, f.Test, passes)
		command := alone(command, f)
		test := exec.Command(command[0], command[1:]...)
		test.Stdout, test.Stderr = os.Stdout, os.Stderr
		if err := test.Run(); err != nil {
			return fmt.Errorf("%s %s failed alone too: %w", f.Package, f.Test, err)
		}
	}
	if report == "" {
		return nil
	}
	file, err := os.OpenFile(report, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	for _, f := range failures {
		fmt.Fprintf(file, "%s %s failed once, and passed %d times alone\n", f.Package, f.Test, passes)
	}
	return file.Close()
}

func main() {
	report := flag.String("report", "", "`file` that gets a line for each test that passed only alone")
	flag.Parse()
	if flag.NArg() < 2 || flag.Arg(1) != "test" {
		fmt.Fprintln(os.Stderr, "again: give it a command, go test and its arguments")
		os.Exit(2)
	}
	if err := run(flag.Args(), *report); err != nil {
		fmt.Fprintln(os.Stderr, "again:", err)
		os.Exit(1)
	}
}
