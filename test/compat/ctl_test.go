package compat

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/test/compat/internal/process"
)

// ctlCommand is one command line, given to etcd's etcdctl and to ours.
type ctlCommand struct {
	args  string // split at blanks; $lease stands for the last lease granted, $dir for a directory of the tool's own
	stdin string
	lines int  // the tool does not end by itself: end it after so many lines of output
	later bool // engram ctl does not offer it yet
	loose bool // numbers in the output are the server's affair: compare the text around them
}

// ctlCommands is run in order, against a server that starts without data.
var ctlCommands = []ctlCommand{
	{args: "version"},
	{args: "put a 1"},
	{args: "put a 2 --prev-kv"},
	{args: "put b", stdin: "from stdin"},
	{args: "put -- c -dashed"},
	{args: "put a --ignore-value"},
	{args: "put none --ignore-value"},
	{args: "put a 3 --ignore-lease --prev-kv"},
	{args: "put k1 x"},
	{args: "put k2 y"},
	{args: "put k3 x"},
	{args: "put a 4 --lease=1234"},
	{args: "put a 4 --lease=nonsense"},
	{args: "put"},
	{args: "get a"},
	{args: "get a --hex"},
	{args: "get none"},
	{args: "get a c"},
	{args: "get k --prefix"},
	{args: "get k --prefix --keys-only"},
	{args: "get k --prefix --print-value-only"},
	{args: "get k --prefix --count-only"},
	{args: "get k --prefix --limit=2"},
	{args: "get b --from-key"},
	{args: "get k --prefix --order=DESCEND"},
	{args: "get k --prefix --sort-by=VALUE --order=DESCEND --limit=2"},
	{args: "get k --prefix --sort-by=VERSION"},
	{args: "get k --prefix --sort-by=CREATE"},
	{args: "get k --prefix --sort-by=MODIFY --order=ASCEND"},
	{args: "get k --prefix --sort-by=nonsense"},
	{args: "get k --prefix --order=nonsense"},
	{args: "get a --rev=2"},
	{args: "get a --rev=99"},
	{args: "get a --consistency=s"},
	{args: "get a --consistency=x"},
	{args: "get k --prefix --min-mod-rev=8"},
	{args: "get k --prefix --max-mod-rev=8"},
	{args: "get k --prefix --min-create-rev=8"},
	{args: "get k --prefix --max-create-rev=8"},
	{args: "get k --prefix --stream"},
	{args: "get k --prefix --from-key"},
	{args: "get"},
	{args: "get a b c"},
	{args: "txn", stdin: "value(\"a\") = \"3\"\n\nput t 1\nget a\ndel k1\n\nget b\n\n"},
	{args: "txn", stdin: "mod(\"a\") < \"1\"\nversion(\"a\") > \"0\"\ncreate(\"a\") != \"5\"\n\nput t 2\n\nget k --prefix\nget t\n\n"},
	{args: "txn", stdin: "nonsense\n\n\n\n"},
	{args: "txn", stdin: "\nput \"q\" \"two words\"\n\n\n"},
	{args: "del k1"},
	{args: "del k2 --prev-kv"},
	{args: "del k --prefix --prev-kv"},
	{args: "del none"},
	{args: "del x z"},
	{args: "del"},
	{args: "watch a --rev=2", lines: 3},
	{args: "watch --prefix k --rev=2 --prev-kv", lines: 3},
	{args: "watch a --rev=2 -- echo event", lines: 1},
	{args: "watch"},
	{args: "compaction 4"},
	{args: "compaction 4"},
	{args: "compaction 6 --physical"},
	{args: "compaction 999"},
	{args: "compaction nonsense"},
	{args: "get a --rev=3"},
	{args: "watch a --rev=2"},
	{args: "endpoint hashkv"}, // before there is a lease, whose ID would be part of the hash
	{args: "endpoint hashkv --rev=8"},
	{args: "endpoint hashkv --rev=999"},
	{args: "lease grant 500"},
	{args: "put l1 v --lease=$lease"},
	{args: "get l1"},
	{args: "lease timetolive $lease", loose: true},
	{args: "lease timetolive $lease --keys", loose: true},
	{args: "lease list"},
	{args: "lease keep-alive $lease --once"},
	{args: "lease revoke $lease"},
	{args: "lease revoke $lease"},
	{args: "lease timetolive $lease"},
	{args: "lease keep-alive $lease --once"},
	{args: "lease list"},
	{args: "lease grant nonsense"},
	{args: "lease revoke nonsense"},
	{args: "member list"},
	{args: "member add"},
	{args: "member add second --peer-urls=nonsense"},
	{args: "member remove 1"},
	{args: "member remove nonsense"},
	{args: "member update 1 --peer-urls=http://127.0.0.1:1"},
	{args: "member promote 1"},
	{args: "endpoint health", loose: true},
	{args: "endpoint health --cluster", loose: true},
	{args: "endpoint status", loose: true},
	{args: "endpoint status --cluster", loose: true},
	{args: "alarm list"},
	{args: "alarm disarm"},
	{args: "defrag", loose: true},
	{args: "move-leader 1"},
	{args: "move-leader nonsense"},
	{args: "downgrade validate 3.6"},
	{args: "downgrade validate 3.5"},
	{args: "downgrade cancel"},
	{args: "snapshot save $dir/snapshot"},
	{args: "snapshot save $dir/snapshot -w json"},
	{args: "snapshot save"},
	{args: "snapshot save a b"},
	{args: "snapshot save $dir/none/snapshot"},
	{args: "snapshot save $dir"},
	{args: "lock l echo held"},
	{args: "role add r"},
	{args: "role add r"},
	{args: "role grant-permission r readwrite a b"},
	{args: "role grant-permission r read p --prefix"},
	{args: "role grant-permission r write z --from-key"},
	{args: "role grant-permission r nonsense a"},
	{args: "role"},
	{args: "role add"},
	{args: "role grant-permission r read"},
	{args: "role grant-permission r Write single"},
	{args: "role grant-permission r write z x --from-key"},
	{args: "role grant-permission r write z x --prefix"},
	{args: "role grant-permission r write z --prefix --from-key"},
	{args: "role grant-permission r write a b c"},
	{args: "role get r"},
	{args: "role get none"},
	{args: "role get"},
	{args: "role revoke-permission r"},
	{args: "role revoke-permission r p --prefix"},
	{args: "role revoke-permission r z --from-key"},
	{args: "role revoke-permission r single"},
	{args: "role revoke-permission r a b"},
	{args: "role revoke-permission r none"},
	{args: "role list"},
	{args: "role list x"},
	{args: "user add u:secret"},
	{args: "user add u:secret"},
	{args: "user add n --no-password"},
	{args: "user"},
	{args: "user add"},
	{args: "user add :x"},
	{args: "user add empty:"},
	{args: "user add n:pw --no-password"},
	{args: "user add w --new-user-password=pw"},
	{args: "user add w:a --new-user-password=pw"},
	{args: "user add i --interactive=false", stdin: "secret\n"},
	{args: "user grant-role u r"},
	{args: "user grant-role u none"},
	{args: "user get u"},
	{args: "user get u --detail"},
	{args: "user get none"},
	{args: "user get"},
	{args: "user get none --detail"},
	{args: "user grant-role u"},
	{args: "user revoke-role u"},
	{args: "user passwd"},
	{args: "user delete"},
	{args: "user list x"},
	{args: "user list"},
	{args: "user passwd u --interactive=false", stdin: "other\n"},
	{args: "user revoke-role u r"},
	{args: "user revoke-role u r"},
	{args: "auth status"},
	{args: "auth"},
	{args: "auth status x"},
	{args: "auth enable x"},
	{args: "auth disable x"},
	{args: "auth disable"},
	{args: "auth enable"},
	{args: "user add root:secret"},
	{args: "auth enable"},
	{args: "auth enable"},
	{args: "auth enable --user=root:secret"},
	{args: "user get root --detail --user=root:secret"},
	{args: "role get root --user=root:secret"},
	{args: "user passwd root", stdin: "one\nother\n"},
	{args: "auth status --user=root:secret"},
	{args: "get a"},
	{args: "get a --user=u:wrong"},
	{args: "get a --user=u:other"},
	{args: "get a --user=root:secret"},
	{args: "get a --user=root --password=secret"},
	{args: "user list --user=root:secret"},
	{args: "auth disable --user=root:secret"},
	{args: "user delete u"},
	{args: "user delete u"},
	{args: "role delete r"},
	{args: "role delete r"},
	{args: "nonsense"},
	{args: "get a --nonsense"},
	{args: "get a --endpoints=127.0.0.1:1 --command-timeout=300ms"},
	{args: "endpoint health --endpoints=127.0.0.1:1 --command-timeout=300ms", loose: true},
}

// TestCtl gives the same command lines to etcd's etcdctl and to `engram ctl`, in every output format. Both talk to real etcd,
// one after the other and on the same addresses, so that even raw protobuf must be equal.
func TestCtl(t *testing.T) {
	tools := [2][]string{{programs.Etcdctl}, {programs.Etcdctl}}
	if programs.Engram != "" {
		tools[1] = []string{programs.Engram, "ctl"}
	}
	for _, format := range []string{"simple", "fields", "json", "protobuf", "table", "nonsense"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			server, err := process.Start(process.Options{Program: programs.Etcd, Dir: t.TempDir(), Name: "m", Flags: []string{"--auth-token-ttl=60"}})
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			reference, err := runCtl(t, tools[0], format, server)
			if err != nil {
				t.Fatal(err)
			}
			if err := server.Reset(); err != nil {
				t.Fatal(err)
			}
			ours, err := runCtl(t, tools[1], format, server)
			if err != nil {
				t.Fatal(err)
			}
			for i, c := range ctlCommands {
				switch {
				case c.later && programs.Engram != "":
					if reference[i] == ours[i] && strings.HasPrefix(ours[i], "exit code 0\n") {
						t.Errorf("%s: engram ctl offers it now: take the mark off its line", c.args)
					}
				case reference[i] != ours[i]:
					t.Errorf("%s\netcdctl:\n%s\nengram ctl:\n%s", c.args, indent(reference[i]), indent(ours[i]))
				}
			}
		})
	}
}

func indent(s string) string { return "    " + strings.ReplaceAll(s, "\n", "\n    ") }

func runCtl(t *testing.T, tool []string, format string, server *process.Server) ([]string, error) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "own"), 0o700); err != nil {
		return nil, err
	}
	var id uint64 // of the lease granted last
	outputs := make([]string, len(ctlCommands))
	for i, c := range ctlCommands {
		line := strings.NewReplacer("$lease", hex(id), "$dir", filepath.Join(dir, "own")).Replace(c.args)
		if format == "json" {
			c.lines = min(c.lines, 1) // one line an answer, not an event
		}
		o, err := process.Command{
			Program: tool, Args: ctlArgs(line, format, server), Stdin: c.stdin, Lines: c.lines,
		}.Run()
		if err != nil {
			o.Stderr += "\nError: " + err.Error()
		}
		if strings.HasPrefix(c.args, "lease grant 5") { // the format may not tell the ID, so it is asked for
			if id, err = grantedLease(server); err != nil {
				return nil, err
			}
		}
		text := fmt.Sprintf("exit code %d\n%s%s", o.Code, o.Stdout, errorLines(o.Stderr))
		text = strings.ReplaceAll(text, dir, "$dir")
		text = explained.ReplaceAllString(text, "Error: $1\n") // by its own name our tool tells more
		text = checked.ReplaceAllString(text, "")
		if id != 0 {
			text = strings.NewReplacer(hex(id), "$lease", itoa(int64(id)), "$lease",
				string(protowire.AppendVarint(nil, id)), "$lease").Replace(text)
		}
		if c.loose {
			text = looseNumbers.ReplaceAllString(text, "N")
			text = looseSpace.ReplaceAllString(text, " ")
		}
		text = address.ReplaceAllString(text, "0x~")
		text = strings.ReplaceAll(text, "engram ctl", "etcdctl") // in help texts
		outputs[i] = ownLease.ReplaceAllString(text, "l/$$lease")
	}
	return outputs, nil
}

func hex(id uint64) string { return fmt.Sprintf("%016x", id) }

func ctlArgs(line, format string, server *process.Server) []string {
	var args []string
	if !strings.Contains(line, "--endpoints") {
		args = append(args, "--endpoints="+server.Endpoint())
	}
	if !strings.Contains(line, "--command-timeout") { // a busy machine is no difference
		args = append(args, "--command-timeout=20s", "--dial-timeout=20s")
	}
	return append(append(args, "--write-out="+format), strings.Fields(line)...)
}

var (
	explained    = regexp.MustCompile(`Error: nothing listens at [^ ]+ \((.*)\)\n`)
	checked      = regexp.MustCompile(`(?m)^Checked: .*\n`) // what our tool adds to a saved snapshot
	looseNumbers = regexp.MustCompile(`[0-9]+(\.[0-9]+)?( ?(kB|MB|GB|B|ms|µs|us|s|%))?`)
	looseSpace   = regexp.MustCompile(`[ ─]+`)
	spaces       = regexp.MustCompile(` +`)                // protobuf prints one or two, by chance
	ownLease     = regexp.MustCompile(`l/[0-9a-f]{15,16}`) // the key of a lock
	address      = regexp.MustCompile(`0x[0-9a-f]{6,}`)    // of a value in memory, in an error text
)

// grantedLease asks for the one lease there is; 0 if the format could not even grant one.
func grantedLease(server *process.Server) (uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := etcdserverpb.NewLeaseClient(server.Conn()).LeaseLeases(ctx, &etcdserverpb.LeaseLeasesRequest{})
	if err != nil || len(r.Leases) == 0 {
		return 0, err
	}
	return uint64(r.Leases[0].ID), nil
}

// errorLines keeps of the error output what is meant for people: the log lines around it are each tool's own.
func errorLines(stderr string) string {
	var b strings.Builder
	for line := range strings.SplitSeq(stderr, "\n") {
		if strings.HasPrefix(line, "Error:") {
			b.WriteString(spaces.ReplaceAllString(line, " ") + "\n")
		}
	}
	return b.String()
}
