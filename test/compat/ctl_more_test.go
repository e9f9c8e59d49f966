package compat

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/compat/internal/process"
)

// ctlLine is a command line with its words as they are, and an environment.
type ctlLine struct {
	args  []string
	stdin string
	env   []string
	lines int  // end the tool after so many lines of output
	loose bool // numbers are not compared
}

func ctlWords(s string) []string { return strings.Fields(s) }

// ctlCorners is run in order: corners of arguments, of the little languages on standard input, and of the environment.
var ctlCorners = []ctlLine{
	{args: ctlWords("put a 1")},
	{args: ctlWords("put a 1 2")},
	{args: []string{"put", "two words", "x\ny"}},
	{args: []string{"put", "", "x"}},
	{args: ctlWords("put a")},
	{args: ctlWords("put a 1 --ignore-value")},
	{args: ctlWords("put --ignore-value")},
	{args: ctlWords("put a 1 --lease=12")},
	{args: ctlWords("put a 1 --lease=zz")},
	{args: ctlWords("put a 3 --ignore-lease --lease=1")},
	{args: ctlWords("put w1 x")}, {args: ctlWords("put w2 y")}, {args: ctlWords("put w3 z")},
	{args: []string{"get", ""}},
	{args: []string{"get", "", "--prefix"}},
	{args: []string{"get", "", "--prefix", "--hex"}},
	{args: []string{"get", "", "--from-key", "--keys-only"}},
	{args: ctlWords("get a b c")},
	{args: ctlWords("get a b --prefix")},
	{args: ctlWords("get a b --from-key")},
	{args: ctlWords("get a --prefix --from-key")},
	{args: ctlWords("get a --rev=zz")},
	{args: ctlWords("get a --keys-only --count-only")},
	{args: ctlWords("get a --count-only --print-value-only")},
	{args: ctlWords("get a --keys-only --print-value-only")},
	{args: ctlWords("get w --prefix --sort-by=value --order=descend")},
	{args: ctlWords("get w --prefix --limit=-1")},
	{args: ctlWords("get w --prefix --stream --limit=2")},
	{args: ctlWords("get w --prefix --stream --sort-by=MODIFY")},
	{args: ctlWords("get w --prefix --stream --order=DESCEND")},
	{args: ctlWords("get w --prefix --stream --rev=99")},
	{args: ctlWords("get w --prefix --stream --count-only")},
	{args: ctlWords("del a b c")},
	{args: ctlWords("del a --prefix --from-key")},
	{args: ctlWords("del a b --prefix")},
	{args: ctlWords("del q --range")},
	{args: ctlWords("del q r --range")},
	{args: []string{"del", ""}},
	{args: ctlWords("compact 3")},
	{args: ctlWords("compaction")},
	{args: ctlWords("compaction 1 2")},
	{args: ctlWords("compaction -- -1")},
	{args: ctlWords("lease grant 10000000000")},
	{args: ctlWords("lease grant 1 2")},
	{args: ctlWords("lease timetolive")},
	{args: ctlWords("lease timetolive 0x12")},
	{args: ctlWords("lease timetolive 5 6")},
	{args: ctlWords("lease timetolive 1234 --keys")},
	{args: ctlWords("lease timetolive 1234 --hex")},
	{args: ctlWords("lease keep-alive 5 6")},
	{args: ctlWords("lease keep-alive zz")},
	{args: ctlWords("lease keep-alive 1234")},
	{args: ctlWords("lease list more")},
	{args: ctlWords("lease list --hex")},
	{args: ctlWords("member list --hex")},
	{args: ctlWords("member list --consistency=s")},
	{args: ctlWords("member list more")},
	{args: ctlWords("alarm list --hex")},
	{args: ctlWords("alarm list more")},
	{args: ctlWords("alarm disarm more")},
	{args: ctlWords("endpoint hashkv --cluster")},
	{args: ctlWords("endpoint hashkv --hex")},
	{args: ctlWords("endpoint hashkv --rev=1")},
	{args: ctlWords("endpoint status --hex"), loose: true},
	{args: ctlWords("endpoint status --endpoints=127.0.0.1:1 --command-timeout=200ms")},
	{args: ctlWords("endpoint hashkv --endpoints=127.0.0.1:1 --command-timeout=200ms")},
	{args: ctlWords("endpoint health --endpoints= --command-timeout=200ms")},
	{args: ctlWords("endpoint health --cluster --endpoints=127.0.0.1:1 --command-timeout=200ms")},
	{args: ctlWords("defrag --cluster"), loose: true},
	{args: ctlWords("defrag --endpoints=127.0.0.1:1 --command-timeout=200ms"), loose: true},
	{args: ctlWords("watch w1 w3 --rev=5"), lines: 2},
	{args: ctlWords("watch w --prefix --rev=5 --hex"), lines: 1},
	{args: []string{"watch", "", "--prefix", "--rev=5"}, lines: 1},
	{args: []string{"watch", "w1", "w9", "--rev=5", "--", "sh", "-c", "env | grep ETCD_WATCH | sort; echo; exit 3"}},
	{args: ctlWords("watch w1 --rev=5 -- /nonexistent")},
	{args: ctlWords("watch w1 --rev=5 --")},
	{args: ctlWords("watch -- echo x")},
	{args: ctlWords("watch a --prefix b")},
	{args: ctlWords("watch --rev=5"), env: []string{"ETCDCTL_WATCH_KEY=w1"}, lines: 1},
	{args: ctlWords("watch --rev=5"), env: []string{"ETCDCTL_WATCH_KEY=w1", "ETCDCTL_WATCH_RANGE_END=w3"}, lines: 1},
	{args: ctlWords("watch --prefix --rev=5"), env: []string{"ETCDCTL_WATCH_KEY=w1", "ETCDCTL_WATCH_RANGE_END=w3"}},
	{args: ctlWords("watch w1"), env: []string{"ETCDCTL_WATCH_KEY=w1"}},
	{args: ctlWords("watch w1"), env: []string{"ETCDCTL_WATCH_RANGE_END=w1"}},
	{args: ctlWords("watch -i"), stdin: ""},
	{args: ctlWords("watch -i"), stdin: "bogus\n\nwatch\nwatch a --prefix b\n"},
	{args: ctlWords("watch -i"), stdin: "watch a --nonsense\n"},
	{args: ctlWords("watch -i"), stdin: "watch a --rev zz\n"},
	{args: ctlWords("watch -i"), stdin: "watch a\n", env: []string{"ETCDCTL_WATCH_KEY=w1"}},
	{args: ctlWords("get a"), env: []string{"ETCDCTL_HEX=true"}},
	{args: ctlWords("get a"), env: []string{"ETCDCTL_HEX=nonsense"}},
	{args: ctlWords("get a"), env: []string{"ETCDCTL_NONSENSE=1", "ETCDCTL_API=3"}},
	{args: ctlWords("get a"), env: []string{"ETCDCTL_COMMAND_TIMEOUT=20s", "ETCDCTL_USER="}},
	{args: ctlWords("endpoint health"), env: []string{"ETCDCTL_CLUSTER=true"}, loose: true},
	{args: ctlWords("version"), env: []string{"ETCDCTL_NONSENSE=1"}},
	{args: ctlWords("get a --endpoints=")},
	{args: ctlWords("get a --cert=/nonexistent")},
	{args: ctlWords("get a --cert=/nonexistent --key=/nonexistent")},
	{args: ctlWords("get a --cacert=/nonexistent")},
	{args: ctlWords("gett a")},
	{args: ctlWords("completion")},
	{args: ctlWords("completion nonsense")},
	{args: ctlWords("txn more")},
	{args: ctlWords("lock")},
	{args: ctlWords("lock l false")},
	{args: []string{"lock", "l", "--", "sh", "-c", "exit 7"}},
	{args: ctlWords("lock l /nonexistent")},
	{args: ctlWords("lock l"), lines: 1},
	{args: ctlWords("elect")},
	{args: ctlWords("elect e")},
	{args: ctlWords("elect e -l x")},
}

// ctlTxnLines are conditions and requests, each run in a transaction of its own.
func ctlTxnLines() []ctlLine {
	var lines []ctlLine
	add := func(stdin string) { lines = append(lines, ctlLine{args: ctlWords("txn"), stdin: stdin}) }
	for _, c := range []string{
		`mod("a") > "0"`, `mod("a") = "zz"`, `mod(a) > "0"`, `mod('a') > '0'`, `mod("a") > 0`, `mod("a")>"0"`, `mod ( "a" ) > "0"`,
		`modx("a") > "0"`, `mod_revision("a") > "0"`, `m("a") > "0"`, `ver("a") > "0"`, `ve("a") > "0"`, `val("a") = "1"`,
		`v("a") = "1"`, `c("a") != "1"`, `("a") = "1"`, `value("a") = "x y"`, `value("a") = "x\"y"`, "value(`a`) = `1`",
		`value("a") = "1" more`, `value("a")`, `value("a"`, `value"a" = "1"`, `value() = "1"`, `value("") = "1"`, `value("a") = "1`,
		`MOD("a") > "0"`, `mod("a") = "+1"`, `mod("a") = ""`, `mod("a") = "9223372036854775808"`, `  create("a")  <	"9"  `, `#`,
	} {
		add(c + "\n\nput s 1\n\nput f 1\n\n")
	}
	for _, op := range []string{
		`bogus`, `put`, `put a`, `put a b c`, `get`, `get a b c`, `del`, `del a b c`, `delete a`, `GET a`, `get a --nonsense`,
		`get a --rev=zz`, `put a 1 --lease=zz`, `put a 1 --ignore-value`, `put a "x y"`, `put a 'x y'`, `put a x\ y`, `put a "c\nd"`,
		`put a "x`, `put a 'x`, `put a "\x41\u00e9\101"`, `put a "\q"`, `put a x"y z"w`, `put a \`, `put a 'it"s'`, `put a it's`,
		`put a "x"y`, `put a 'x\'y'`, `put a \"x\"`, "put a `b c`", `put a --  -dash`, `put "" x`, `get a --sort-by=zz`,
		`get a --consistency=z`, `get a --prefix --from-key`, `get a --keys-only`, `get a --stream`, `get a --hex`, `get a -w json`,
		`del a b --range --prev-kv`, `watch a`,
	} {
		add("\n" + op + "\nget a --print-value-only\n\n\n")
	}
	for _, whole := range []string{"", "\n", "\n\n", "\n\n\n", "\n\n\nmore", "\nget a", "\n\nget a\n\n", "\r\n\r\n\r\n", "\nput p 1\nput p 2\n\n\n"} {
		add(whole)
		lines = append(lines, ctlLine{args: ctlWords("txn -i"), stdin: whole})
	}
	return lines
}

// TestCtlCorners gives etcd's etcdctl, and ours under the same name, command lines that people get wrong, against real etcd.
func TestCtlCorners(t *testing.T) {
	ours := programs.Etcdctl
	if programs.Engram != "" {
		ours = filepath.Join(t.TempDir(), "etcdctl")
		if err := os.Symlink(programs.Engram, ours); err != nil {
			t.Fatal(err)
		}
	}
	lines := append(append([]ctlLine{}, ctlCorners...), ctlTxnLines()...)
	for _, format := range []string{"simple", "fields", "json"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			server, err := process.Start(process.Options{Program: programs.Etcd, Dir: t.TempDir(), Name: "m"})
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			reference, err := runCtlLines(programs.Etcdctl, format, server, lines)
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Reset(); err != nil {
				t.Fatal(err)
			}
			outputs, err := runCtlLines(ours, format, server, lines)
			if err != nil {
				t.Fatal(err)
			}
			for i, got := range outputs {
				if got != reference[i] {
					t.Errorf("%q with input %q and environment %q\netcdctl:\n%s\nours:\n%s", lines[i].args, lines[i].stdin, lines[i].env,
						indent(reference[i]), indent(got))
				}
			}
		})
	}
}

func runCtlLines(tool, format string, server *process.Server, lines []ctlLine) ([]string, error) {
	outputs := make([]string, len(lines))
	for i, l := range lines {
		if format == "json" {
			l.lines = min(l.lines, 1)
		}
		args := []string{"--write-out=" + format}
		if !strings.Contains(strings.Join(l.args, " "), "--endpoints") {
			args = append(args, "--endpoints="+server.Endpoint())
		}
		if said := strings.Join(slices.Concat(l.args, l.env), " "); !strings.Contains(said, "--command-timeout") && !strings.Contains(said, "ETCDCTL_COMMAND_TIMEOUT") {
			args = append(args, "--command-timeout=20s") // a busy machine is no difference
		}
		o, err := process.Command{Program: []string{tool}, Args: append(args, l.args...), Stdin: l.stdin, Env: l.env, Lines: l.lines}.Run()
		if err != nil {
			o.Stderr += "\nError: " + strings.ReplaceAll(err.Error(), tool, "etcdctl")
		}
		text := fmt.Sprintf("exit code %d\n%s%s", o.Code, o.Stdout, saidLines(o.Stderr))
		if l.loose || l.args[0] == "lock" {
			text = base64Lease.ReplaceAllString(text, `"key":"~"`)
			text = looseSpace.ReplaceAllString(looseNumbers.ReplaceAllString(ownLease.ReplaceAllString(text, "l/~"), "N"), " ")
		}
		outputs[i] = text
		if l.args[0] == "lock" {
			if err := endLeases(server); err != nil {
				return nil, err
			}
		}
	}
	return outputs, nil
}

// endLeases revokes all leases. One that a lock leaves ends by itself ten seconds later, and takes a key along: by then the one tool may
// be commands behind the other, and revisions differ between.
func endLeases(server *process.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	leases := etcdserverpb.NewLeaseClient(server.Conn())
	r, err := leases.LeaseLeases(ctx, &etcdserverpb.LeaseLeasesRequest{})
	if err != nil {
		return fmt.Errorf("listing leases: %w", err)
	}
	for _, l := range r.Leases {
		if _, err := leases.LeaseRevoke(ctx, &etcdserverpb.LeaseRevokeRequest{ID: l.ID}); err != nil && status.Code(err) != codes.NotFound {
			return fmt.Errorf("revoking lease %x: %w", l.ID, err)
		}
	}
	return nil
}

var base64Lease = regexp.MustCompile(`"key":"bC[89][^"]*"`) // ownLease in JSON: base64 of l/ and a digit or a letter

// saidLines keeps of the error output the lines meant for people, without log lines, whose form is each tool's own, and without
// usage texts, whose words are.
func saidLines(stderr string) string {
	var b strings.Builder
	for line := range strings.SplitSeq(stderr, "\n") {
		switch {
		case strings.HasPrefix(line, "Hint:"), // a line of ours that etcdctl has not
			strings.HasPrefix(line, "{"), strings.HasPrefix(line, "Usage:"), strings.HasPrefix(line, "  "), strings.HasPrefix(line, "Flags:"),
			strings.HasPrefix(line, "Use "), strings.HasPrefix(line, "unknown "), strings.HasPrefix(line, "invalid argument"), line == "":
		default:
			b.WriteString(line + "\n")
		}
	}
	return b.String()
}
