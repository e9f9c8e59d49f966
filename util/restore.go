package util

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/backup"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/terminal"
)

// safeBump is how much a restore raises the revision unless it is told otherwise: more than any cluster writes between a backup and
// its restore, and less than would ever be missed.
const safeBump = 1_000_000_000

// restoreFlags are the flags of "snapshot restore".
type restoreFlags struct {
	name, dataDir, walDir string
	cluster, token, peers string
	skipSum               bool
	bump                  uint64
	markCompacted         bool
	mapSize               uint64 // etcd's; nothing is mapped here
	keepRevisions         bool
	all                   bool
	outputDir             string
	set                   func(flag string) bool
}

func newSnapshotRestoreCommand() *cobra.Command {
	f := &restoreFlags{}
	c := &cobra.Command{
		Use:   "restore <filename> --data-dir {output dir} [options]",
		Short: "Makes a data directory of a backup",
		Long: `Makes the data directory of a member of a new cluster, with the keys, leases, users and roles of the backup. Run it for each member with the
same file and the same --initial-cluster, or once with --all. Then start the members as usual. The directory is whole or not there at all.

Whoever watches keys or keeps a cache, such as Kubernetes' controllers, still knows revisions from after the backup. If the restored
cluster counted on from the backup's revision, it would give these revisions to other changes, and nobody would notice. So the revision is
raised by 1000000000 and all below counts as compacted: clients then list everything anew. Called as etcdutl this is off, as in
etcd, and --bump-revision with --mark-compacted turns it on.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("snapshot restore requires exactly one argument")
			}
			f.set = c.Flags().Changed
			return toolOf(c).restore(c.Context(), args[0], f)
		},
	}
	flags := c.Flags()
	flags.StringVar(&f.dataDir, "data-dir", "", "Path to the output data directory (default \"<name>.engram\", called as etcdutl \"<name>.etcd\")")
	flags.StringVar(&f.walDir, "wal-dir", "", "Path to the directory of the raft log (default: in the data directory)")
	flags.StringVar(&f.name, "name", "default", "Human-readable name for this member")
	flags.StringVar(&f.cluster, "initial-cluster", "default=http://localhost:2380", "Members of the new cluster with their peer URLs")
	flags.StringVar(&f.token, "initial-cluster-token", "etcd-cluster", "Token of the new cluster, from which its IDs are made")
	flags.StringVar(&f.peers, "initial-advertise-peer-urls", "http://localhost:2380", "List of this member's peer URLs, written as in --initial-cluster")
	flags.BoolVar(&f.skipSum, "skip-hash-check", false, "Take a file without a checksum, as one copied from the data directory of a stopped member, or with a wrong one")
	flags.Uint64Var(&f.bump, "bump-revision", 0, "How much to increase the latest revision after restore")
	flags.BoolVar(&f.markCompacted, "mark-compacted", false, "Count all revisions up to the new one as compacted (required if --bump-revision > 0, disallowed otherwise)")
	flags.BoolVar(&f.keepRevisions, "keep-revisions", false, "Do not raise the revision: only if nobody holds revisions from after the backup")
	flags.Uint64Var(&f.mapSize, "initial-memory-map-size", 10<<30, "Taken without effect: the database is not mapped into memory")
	flags.BoolVar(&f.all, "all", false, "Make the data directories of all members of --initial-cluster, in --output-dir")
	flags.StringVar(&f.outputDir, "output-dir", "", "With --all: the directory for theirs, one by the name of each member")
	return c
}

// restore checks the flags, in etcd's order and words, and makes what they ask for.
func (t *tool) restore(ctx context.Context, path string, f *restoreFlags) (err error) {
	if err := t.decideBump(f); err != nil {
		return err
	}
	r := backup.Restore{
		SkipSum: f.skipSum, BumpRevision: f.bump,
		State:  state.Options{Version: config.EtcdVersion},
		Logger: slog.New(slog.NewTextHandler(t.err, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	names, err := t.plan(f, &r)
	if err != nil {
		return err
	}
	b, err := backup.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if f.skipSum && b.HasSum() {
		if err := b.CheckSum(ctx); errors.Is(err, backup.ErrSum) {
			t.say("Warning: %v. --skip-hash-check: it is tried all the same.", err)
		}
	}
	began := time.Now()
	if p := t.progress("restoring"); p != nil {
		last := backup.Target{}
		r.Progress = func(target backup.Target, done, of int64) {
			if target != last {
				last = target
				p.Begin("restoring " + target.DataDir)
			}
			p.At(done, of)
		}
		defer p.End()
	}
	report, err := b.Restore(ctx, r)
	if err != nil && ctx.Err() != nil {
		return exit(exitFailed, errors.Join(fmt.Errorf("interrupted: nothing was restored"), err))
	}
	if err != nil {
		return err
	}
	for i, target := range r.Targets {
		t.say("restored %s into %s: member %x (%s) of cluster %x", path, target.DataDir, target.Member, names[i], report.Cluster)
	}
	t.say("%d keys, %d leases, %d users at revision %d (the backup is of revision %d); it took %v", report.Keys, report.Leases, report.Users, report.Revision, report.Saved,
		time.Since(began).Round(time.Millisecond))
	t.tellAfter(f, report)
	return nil
}

// decideBump settles whether the revision is raised.
func (t *tool) decideBump(f *restoreFlags) error {
	if f.keepRevisions && (f.bump > 0 || f.markCompacted) {
		return badArguments("--keep-revisions contradicts --bump-revision and --mark-compacted: give one or the other")
	}
	if !t.asEtcd() && !f.keepRevisions {
		if !f.set("bump-revision") && !f.set("mark-compacted") {
			f.bump = safeBump
		}
		if f.bump > 0 && !f.set("mark-compacted") {
			f.markCompacted = true
		}
	}
	if (f.bump > 0) != f.markCompacted {
		return badArguments("--mark-compacted required if --revision-bump > 0") // etcd's words, which has the flag wrong
	}
	return nil
}

// tellAfter says what an operator must know of what was made.
func (t *tool) tellAfter(f *restoreFlags, report backup.Restored) {
	if f.bump == 0 && !f.keepRevisions {
		t.say("Warning: revisions go on from %d, and changes made after the backup had the same ones: clients that watch or cache, such as Kubernetes' controllers, will miss changes. "+
			"Restore with --bump-revision %d --mark-compacted, or restart all of them.", report.Saved, safeBump)
	}
	if report.Alarms > 0 {
		t.say("Note: %d alarms came with the backup; see \"ctl alarm list\", and \"ctl alarm disarm\" once their cause is gone.", report.Alarms)
	}
}

// plan turns the flags into members and directories. names are the members' of the targets.
func (t *tool) plan(f *restoreFlags, r *backup.Restore) (names []string, err error) {
	members, err := initialCluster(f.cluster)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	ids := map[uint64]string{}
	for _, m := range members {
		for _, u := range m.PeerURLs {
			if seen[u] {
				return nil, fmt.Errorf("initial cluster %s has duplicate url", f.cluster)
			}
			seen[u] = true
		}
		id := member.FoundingID(m.PeerURLs, f.token)
		if other, taken := ids[id]; taken || id == 0 {
			return nil, fmt.Errorf("--initial-cluster: members %s and %s would have one ID, %x: give another --initial-cluster-token", other, m.Name, id)
		}
		ids[id] = m.Name
		r.Founders = append(r.Founders, member.Member{ID: id, PeerURLs: m.PeerURLs, Name: m.Name})
	}
	targets := members
	if f.all {
		if err := f.checkAll(members); err != nil {
			return nil, err
		}
	} else {
		self, err := f.local(members)
		if err != nil {
			return nil, err
		}
		targets = []config.Member{self}
	}
	for _, m := range targets {
		target := backup.Target{Member: member.FoundingID(m.PeerURLs, f.token), DataDir: f.dataDir, LogDir: f.walDir}
		switch {
		case f.all:
			target.DataDir = filepath.Join(f.outputDir, m.Name)
		case f.dataDir == "" && t.asEtcd():
			target.DataDir = f.name + ".etcd"
		case f.dataDir == "":
			target.DataDir = f.name + ".engram"
		}
		// A name may end in a slash, and is renamed beside.
		target.DataDir = filepath.Clean(target.DataDir)
		if target.LogDir != "" {
			target.LogDir = filepath.Clean(target.LogDir)
		}
		r.Targets = append(r.Targets, target)
		names = append(names, m.Name)
	}
	slices.SortFunc(r.Founders, func(a, b member.Member) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return names, nil
}

// checkAll checks what --all needs.
func (f *restoreFlags) checkAll(members []config.Member) error {
	if f.outputDir == "" {
		return badArguments("--all needs --output-dir, the directory to make the members' directories in")
	}
	for _, flag := range [...]string{"data-dir", "wal-dir", "name", "initial-advertise-peer-urls"} {
		if f.set(flag) {
			return badArguments("--%s is about one member, --all makes all of --initial-cluster: leave it out", flag)
		}
	}
	for _, m := range members {
		if m.Name != filepath.Base(m.Name) || m.Name == "." || m.Name == ".." {
			return badArguments("member %q of --initial-cluster cannot be the name of a directory in --output-dir: restore it by itself, with --data-dir", m.Name)
		}
	}
	return nil
}

// local returns the member that is restored.
func (f *restoreFlags) local(members []config.Member) (config.Member, error) {
	if f.outputDir != "" {
		return config.Member{}, badArguments("--output-dir goes with --all: name the directory of one member by --data-dir")
	}
	i := slices.IndexFunc(members, func(m config.Member) bool { return m.Name == f.name })
	if i < 0 {
		return config.Member{}, fmt.Errorf("couldn't find local name %q in the initial cluster configuration", f.name)
	}
	self := members[i]
	advertised, err := peerURLs(f.peers)
	if err != nil {
		return config.Member{}, err
	}
	// The words are etcdutl's; here the URLs are compared as text.
	for _, u := range self.PeerURLs {
		if !slices.Contains(advertised, u) {
			return config.Member{}, fmt.Errorf("--initial-cluster has %s=%s but missing from --initial-advertise-peer-urls=%s (resolved urls: %q != %q)", self.Name, u, f.peers,
				strings.Join(advertised, ","), strings.Join(self.PeerURLs, ","))
		}
	}
	for _, u := range advertised {
		if !slices.Contains(self.PeerURLs, u) {
			return config.Member{}, fmt.Errorf("--initial-advertise-peer-urls has %s but missing from --initial-cluster=%s (resolved urls: %q != %q)", u, f.cluster,
				strings.Join(advertised, ","), strings.Join(self.PeerURLs, ","))
		}
	}
	return self, nil
}

// initialCluster reads --initial-cluster.
func initialCluster(text string) ([]config.Member, error) {
	return (&config.Config{InitialCluster: text}).InitialMembers()
}

// peerURLs reads a list of URLs, sorted.
func peerURLs(text string) ([]string, error) {
	var out []string
	for part := range strings.SplitSeq(text, ",") {
		u, err := url.Parse(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		out = append(out, u.String())
	}
	if err := member.CheckPeerURLs(out); err != nil {
		return nil, fmt.Errorf("--initial-advertise-peer-urls=%s: %w", text, err)
	}
	slices.Sort(out)
	return out, nil
}

// progress returns a meter if there is a terminal to show it on.
func (t *tool) progress(what string) *terminal.Meter { return terminal.NewMeter(t.err, what) }
