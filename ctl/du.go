package ctl

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/inspectpb"
	"github.com/engram-kv/engram/internal/keypath"
)

// duFlags are the flags of du.
type duFlags struct {
	depth       int
	delimiter   string
	sort        string
	limit       int
	keys        bool
	consistency string
}

var duOrders = map[string]inspectpb.UsageRequest_Order{
	"path": inspectpb.UsageRequest_PATH, "total": inspectpb.UsageRequest_TOTAL, "live": inspectpb.UsageRequest_LIVE,
	"history": inspectpb.UsageRequest_HISTORY, "keys": inspectpb.UsageRequest_KEYS,
}

func (t *tool) duCommand() *cobra.Command {
	var f duFlags
	c := &cobra.Command{
		Use:   "du [options] [prefix]",
		Short: "Shows how many keys and bytes there are, by path",
		Long: `Shows what the keys below a prefix take, by path, the largest first: live keys and the bytes of their records, and retained revisions
that are not live (overwritten ones and marks of deletions, until a compaction removes them) and theirs. A record is key, value
and some bytes more. A path ends with a delimiter and stands for all keys that begin with it; one without is a key.

No value is read, and a line costs the server some microseconds, however many keys it stands for. While authentication is on,
the whole range must be readable. etcd knows no sizes: there only keys are counted, one request a line, in the order of paths.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 1 {
				return badArguments("du command needs at most one argument, a prefix")
			}
			r, err := f.request(args)
			if err != nil {
				return err
			}
			client, _, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			if err := t.simpleOrJSON(); err != nil {
				return err
			}
			u, err := t.usage(client, r, f.limit)
			if err != nil {
				return err
			}
			if t.global.writeOut == "json" {
				return (&jsonPrinter{out: t.out}).print(u)
			}
			u.print(t)
			return nil
		},
	}
	fs := c.Flags()
	fs.IntVar(&f.depth, "depth", 1, "delimiters that a path has behind the prefix")
	fs.StringVar(&f.delimiter, "delimiter", "/", "what ends a segment of a path")
	fs.StringVar(&f.sort, "sort", "total", "what comes first: total, live, history or keys (the most), or path")
	fs.IntVar(&f.limit, "limit", 50, "most lines; the others are summed up")
	fs.BoolVar(&f.keys, "keys", false, "a line for each key, to find the largest ones")
	fs.StringVar(&f.consistency, "consistency", "l", "l (linearizable) or s (serializable)")
	return c
}

func (f *duFlags) request(args []string) (*inspectpb.UsageRequest, error) {
	r := &inspectpb.UsageRequest{Delimiter: []byte(f.delimiter), Depth: int32(min(f.depth, math.MaxInt32)), Limit: int32(min(f.limit, maxDuLines))}
	if len(args) > 0 {
		r.Prefix = []byte(args[0])
	}
	var ok bool
	var err error
	if r.Order, ok = duOrders[f.sort]; !ok {
		return nil, exit(exitFormat, fmt.Errorf("bad sort order %q: give total, live, history, keys or path", f.sort))
	}
	if f.depth < 1 {
		return nil, badArguments("--depth is %d: give 1 or more", f.depth)
	}
	if f.limit < 1 || f.limit > maxDuLines {
		return nil, badArguments("--limit is %d: give 1 to %d", f.limit, maxDuLines)
	}
	switch {
	case f.keys:
		r.Delimiter = nil
	case f.delimiter == "":
		return nil, badArguments("--delimiter is empty: for a line for each key, give --keys")
	}
	r.Serializable, err = parseConsistency(f.consistency)
	return r, err
}

// maxDuLines is the most that a server answers with at once.
const maxDuLines = 10_000

// simpleOrJSON refuses other formats, for commands that etcdctl has not.
func (t *tool) simpleOrJSON() error {
	switch t.global.writeOut {
	case "simple", "json":
		return nil
	}
	return refuser{t.global.writeOut}.refuse()
}

// duUsage is the answer of du, as it is printed in JSON.
type duUsage struct {
	Member   uint64  `json:"member_id,omitempty"`
	Revision int64   `json:"revision"`
	Compact  int64   `json:"compact_revision,omitempty"` // -1 for never
	Prefix   string  `json:"prefix"`
	Rows     []duRow `json:"rows"`
	// Others are paths that there was no line for.
	Others      *duMeasure `json:"others,omitempty"`
	OthersCount int64      `json:"others_count,omitempty"`
	Total       duMeasure  `json:"total"`
	// More says that Rows and Others are not all.
	More bool `json:"more,omitempty"`
	// KeysOnly says that the server is etcd, which tells no sizes.
	KeysOnly bool `json:"keys_only,omitempty"`
}

type duRow struct {
	Path   string `json:"path"`
	Base64 []byte `json:"path_base64,omitempty"` // of a path that is no text
	Group  bool   `json:"group"`
	duMeasure
}

type duMeasure struct {
	Keys         int64 `json:"keys"`
	Bytes        int64 `json:"bytes"`
	Revisions    int64 `json:"history"`
	HistoryBytes int64 `json:"history_bytes"`
}

func newDuRow(path []byte, group bool, m duMeasure) duRow {
	row := duRow{Path: string(path), Group: group, duMeasure: m}
	if !utf8.Valid(path) {
		row.Path, row.Base64 = shown(path), path
	}
	return row
}

func newDuMeasure(m *inspectpb.Measure) duMeasure {
	return duMeasure{m.GetKeys(), m.GetBytes(), m.GetHistory(), m.GetHistoryBytes()}
}

// usage asks the server, or does what can be done without it.
func (t *tool) usage(client *clientv3.Client, r *inspectpb.UsageRequest, limit int) (*duUsage, error) {
	ctx, cancel := t.commandContext()
	defer cancel()
	answer, err := inspectpb.NewInspectClient(client.ActiveConnection()).Usage(ctx, r)
	if status.Code(err) == codes.Unimplemented {
		return countKeys(ctx, client, r, limit)
	}
	if err != nil {
		return nil, err
	}
	u := &duUsage{
		Member: answer.MemberId, Revision: answer.Revision, Compact: answer.CompactRevision, Prefix: string(r.Prefix), Rows: []duRow{},
		OthersCount: answer.OthersCount, Total: newDuMeasure(answer.Total), More: len(answer.Next) > 0,
	}
	for _, row := range answer.Rows {
		u.Rows = append(u.Rows, newDuRow(row.Path, row.Group, newDuMeasure(row.Measure)))
	}
	if u.OthersCount > 0 {
		others := newDuMeasure(answer.Others)
		u.Others = &others
	}
	return u, nil
}

// countKeys is du on a server that is no Engram: two requests a line, all at one revision.
func countKeys(ctx context.Context, client *clientv3.Client, r *inspectpb.UsageRequest, limit int) (*duUsage, error) {
	if len(r.Delimiter) == 0 {
		return nil, fmt.Errorf("the server is no Engram and does not tell how large keys are: --keys needs one")
	}
	prefix := string(r.Prefix)
	options := []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithCountOnly()}
	if r.Serializable {
		options = append(options, clientv3.WithSerializable())
	}
	all, err := client.Get(ctx, prefix, options...)
	if err != nil {
		return nil, err
	}
	u := &duUsage{
		Member: all.Header.MemberId, Revision: all.Header.Revision, Prefix: prefix, Rows: []duRow{}, KeysOnly: true, Total: duMeasure{Keys: all.Count},
	}
	at := append(options[2:], clientv3.WithRev(all.Header.Revision))
	from, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
	if prefix == "" {
		from, end = "\x00", "\x00"
	}
	for end == "\x00" || from < end {
		first, err := client.Get(ctx, from, append(at, clientv3.WithRange(end), clientv3.WithLimit(1), clientv3.WithKeysOnly())...)
		if err != nil {
			return nil, err
		}
		if len(first.Kvs) == 0 {
			break
		}
		if u.More = len(u.Rows) == limit; u.More {
			break
		}
		key := first.Kvs[0].Key
		path, group := keypath.Cut(key, len(prefix), r.Delimiter, int(r.Depth))
		keys := int64(1)
		from = string(key) + "\x00"
		if group {
			counted, err := client.Get(ctx, string(path), append(at, clientv3.WithPrefix(), clientv3.WithCountOnly())...)
			if err != nil {
				return nil, err
			}
			keys = counted.Count
			if from = clientv3.GetPrefixRangeEnd(string(path)); from == "\x00" {
				u.Rows = append(u.Rows, newDuRow(path, group, duMeasure{Keys: keys}))
				break
			}
		}
		u.Rows = append(u.Rows, newDuRow(path, group, duMeasure{Keys: keys}))
	}
	if r.Order == inspectpb.UsageRequest_KEYS && !u.More {
		slices.SortStableFunc(u.Rows, func(a, b duRow) int { return int(b.Keys - a.Keys) })
	}
	return u, nil
}

// print writes a line for each row, for people.
func (u *duUsage) print(t *tool) {
	columns := newColumns("KEYS", "LIVE", "REVISIONS", "HISTORY", "PATH")
	line := func(m duMeasure, what string) {
		sizes := []string{bytesText(m.Bytes), strconv.FormatInt(m.Revisions, 10), bytesText(m.HistoryBytes)}
		if u.KeysOnly {
			sizes = []string{"-", "-", "-"}
		}
		columns.add(append(append([]string{strconv.FormatInt(m.Keys, 10)}, sizes...), what)...)
	}
	for _, row := range u.Rows {
		line(row.duMeasure, shown([]byte(row.Path)))
	}
	if u.Others != nil {
		line(*u.Others, fmt.Sprintf("(%d others)", u.OthersCount))
	}
	line(u.Total, fmt.Sprintf("(total at revision %d)", u.Revision))
	columns.write(t.out)
	if u.More {
		fmt.Fprintln(t.err, "There are more paths than were looked at: give a longer prefix, or a smaller --depth.")
	}
	if u.KeysOnly {
		fmt.Fprintln(t.err, "The server is no Engram: it counts keys, and does not tell their sizes.")
	}
}

// shown is a key as it is, or quoted if a terminal would not show it.
func shown(key []byte) string {
	printable := func(r rune) bool { return unicode.IsPrint(r) && r != utf8.RuneError }
	if len(key) == 0 || strings.IndexFunc(string(key), func(r rune) bool { return !printable(r) }) >= 0 {
		return strconv.Quote(string(key))
	}
	return string(key)
}
