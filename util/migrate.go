package util

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/etcdimport"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/terminal"
)

// migrateFlags are those of migrate.
type migrateFlags struct {
	check            bool
	walDir, scratch  string
	dataDir, version string // of etcdutl's migrate
	force            bool
}

func newMigrateCommand() *cobra.Command {
	var f migrateFlags
	c := &cobra.Command{
		Use:   "migrate --check <data-dir>",
		Short: "Tells what would come of an etcd data directory",
		Long: `Tells what would come of the data directory of an etcd 3.5, 3.6 or 3.7 member that is stopped, if Engram were started on it: what is in it,
what would be done, and all that would be refused. The import itself is done by Engram's start: nothing is changed here. All of
it is tried out in a scratch directory, which takes as much time and space as the import, and is deleted again.

The exit code is 0 if the import would succeed, and 1 if it would be refused.`,
		RunE: func(c *cobra.Command, args []string) error { return toolOf(c).migrate(c.Context(), f, args) },
	}
	fs := c.Flags()
	fs.BoolVar(&f.check, "check", false, "only look: required, since the import is done by Engram's start")
	fs.StringVar(&f.walDir, "wal-dir", "", "etcd's --wal-dir, if it had one")
	fs.StringVar(&f.scratch, "scratch-dir", "", "where to try it out (default: the system's directory for temporary files)")
	fs.StringVar(&f.dataDir, "data-dir", "", "as the argument")
	fs.StringVar(&f.version, "target-version", "", "of etcdutl's migrate")
	fs.BoolVar(&f.force, "force", false, "of etcdutl's migrate")
	for _, name := range []string{"data-dir", "target-version", "force"} {
		_ = fs.MarkHidden(name) // fails only for a flag that is not there
	}
	return c
}

func (t *tool) migrate(ctx context.Context, f migrateFlags, args []string) (err error) {
	if f.version == "3.4" {
		return badArguments(`target version "3.4" not supported. Minimal "3.5"`)
	}
	if f.version != "" || f.force {
		return exit(exitFailed, fmt.Errorf("--target-version=%s: the storage version is a row in etcd's own database, which only etcd's tools change: use etcdutl migrate; "+
			"Engram's data has no such version, and a cluster goes back to etcd by its members or by a backup", f.version))
	}
	if f.dataDir != "" {
		args = append(args, f.dataDir)
	}
	if len(args) != 1 {
		return badArguments("migrate requires exactly one argument, etcd's data directory")
	}
	if !f.check {
		return exit(exitFailed, fmt.Errorf("the import is done by Engram when it is started with --data-dir=%s: give --check to see what it would do", args[0]))
	}
	if _, err := os.Stat(args[0]); err != nil {
		return err
	}
	scratch, err := os.MkdirTemp(f.scratch, "engram-migrate-")
	if err != nil {
		return fmt.Errorf("--scratch-dir: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	r, err := etcdimport.Check(ctx, etcdimport.Options{
		FS: storage.DefaultFS, Dir: args[0], WALDir: f.walDir,
		State:  state.Options{MinLeaseTTL: 1, Version: config.EtcdVersion},
		Logger: slog.New(slog.NewTextHandler(t.err, &slog.HandlerOptions{Level: slog.LevelInfo, ReplaceAttr: plainAttr})),
		OnFatal: func(err error) {
			t.say("Error: %s: %v", scratch, err)
			_ = os.RemoveAll(scratch)
			os.Exit(exitFailed)
		},
	}, scratch)
	if err != nil && ctx.Err() != nil {
		return exit(exitFailed, errors.Join(errors.New("interrupted"), err))
	}
	if r == nil {
		return exit(exitFailed, fmt.Errorf("%s would be refused: %w", args[0], err))
	}
	if printErr := t.print(describeMigration(args[0], r, err == nil)); printErr != nil {
		return printErr
	}
	if err != nil {
		return exit(exitFailed, fmt.Errorf("%s would be refused: %w", args[0], err))
	}
	return nil
}

// plainAttr leaves out what a person at a terminal knows.
func plainAttr(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
		return slog.Attr{}
	}
	return a
}

func describeMigration(dir string, r *etcdimport.Report, taken bool) answer {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	release := "etcd " + r.Release
	if r.Release == "" {
		release = "an etcd that had only begun"
	}
	line("%s is of %s: member %x of cluster %x, cluster version %s", dir, release, r.MemberID, r.ClusterID, orNone(r.ClusterVersion))
	ran := r.Revision > 0 // else it was refused before the content was known
	if ran {
		line("members: %s", strings.Join(memberTexts(r.Members), "; "))
	}
	line("raft: term %d, vote %x, committed index %d, last index %d (%d not known to be committed)", r.Term, r.Vote, r.Commit, r.Last, r.Last-r.Commit)
	line("log: %s, %d segments, %s, begins after index %d", r.WALPath, r.Segments, terminal.Bytes(r.WALBytes), r.Snapshot)
	line("database: %s, %s, holds index %d and revision %d", r.DBPath, terminal.Bytes(r.DBBytes), r.DBApplied, r.DBRevision)
	compacted := "never compacted"
	if r.CompactRevision >= 0 {
		compacted = fmt.Sprintf("compacted at %d", r.CompactRevision)
	}
	if ran {
		line("content: %d keys at revision %d (%s), %d leases, %d users, %d roles, auth %s, alarms: %s",
			r.Keys, r.Revision, compacted, r.Leases, r.Users, r.Roles, onOff(r.AuthEnabled), orNone(strings.Join(r.Alarms, ", ")))
	}
	for _, w := range r.Warnings {
		line("warning: %s", w)
	}
	if taken {
		line("Engram started on it would: read the database, run the %d entries that it lacks, keep the log from index %d on,", r.Replayed, r.Snapshot+1)
		line("rename %s/member to member.etcd-<time> and leave its content unchanged, and go on as the same member.", dir)
		b.WriteString("Nothing would be refused. Trying it out took " + r.Took.Round(time.Millisecond).String() + ".")
	} else {
		b.WriteString("Engram started on it would refuse it, and change nothing.")
	}

	n := func(v uint64) string { return strconv.FormatUint(v, 10) }
	return answer{
		simple:  b.String(),
		json:    r,
		columns: []string{"version", "member", "cluster", "members", "raft term", "committed", "last index", "snapshot", "segments", "keys", "revision", "leases", "users"},
		row: []string{r.Release, strconv.FormatUint(r.MemberID, 16), strconv.FormatUint(r.ClusterID, 16), strconv.Itoa(len(r.Members)), n(r.Term), n(r.Commit), n(r.Last), n(r.Snapshot),
			strconv.Itoa(r.Segments), strconv.FormatInt(r.Keys, 10), strconv.FormatInt(r.Revision, 10), strconv.Itoa(r.Leases), strconv.Itoa(r.Users)},
		fields: []field{
			{"Version", r.Release}, {"MemberID", r.MemberID}, {"ClusterID", r.ClusterID}, {"Members", len(r.Members)}, {"ClusterVersion", r.ClusterVersion},
			{"RaftTerm", r.Term}, {"RaftVote", r.Vote}, {"RaftCommit", r.Commit}, {"RaftLast", r.Last}, {"RaftSnapshot", r.Snapshot}, {"Replayed", r.Replayed},
			{"Segments", r.Segments}, {"Keys", r.Keys}, {"Revision", r.Revision}, {"CompactRevision", r.CompactRevision}, {"Leases", r.Leases},
			{"Users", r.Users}, {"Roles", r.Roles}, {"AuthEnabled", r.AuthEnabled}, {"Warnings", len(r.Warnings)},
		},
	}
}

func memberTexts(members []*member.Member) (out []string) {
	for _, m := range members {
		role := ""
		if m.IsLearner {
			role = ", a learner"
		}
		out = append(out, fmt.Sprintf("%x %s (%s%s)", m.ID, orNone(m.Name), strings.Join(m.PeerURLs, ","), role))
	}
	return out
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}
