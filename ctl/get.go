package ctl

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// getFlags are the flags of get, on the command line and in a transaction.
type getFlags struct {
	consistency    string
	sortBy, order  string
	limit, rev     int64
	minCreate      int64
	maxCreate      int64
	minMod, maxMod int64
	prefix         bool
	fromKey        bool
	keysOnly       bool
	countOnly      bool
	printValueOnly bool
	stream         bool
	decode         bool
}

func (t *tool) getCommand() *cobra.Command {
	c, f := newGet()
	c.Long = c.Short + "." + decodeHelp
	registerDecode(c.Flags(), &f.decode)
	c.RunE = func(c *cobra.Command, args []string) error {
		key, options, err := f.options(args)
		if err != nil {
			return err
		}
		client, p, err := t.connect(c)
		if err != nil {
			return err
		}
		defer closeClient(client)
		if f.countOnly && t.global.writeOut != "fields" {
			return badArguments("--count-only is only for `--write-out=fields`")
		}
		if f.printValueOnly {
			s, ok := p.(*simplePrinter)
			if !ok {
				return badArguments("print-value-only is only for `--write-out=simple`")
			}
			s.valueOnly = true
		}
		if err := setDecode(p, f.decode); err != nil {
			return err
		}
		if f.stream {
			return t.getStream(client, p, key, options)
		}
		ctx, cancel := t.commandContext()
		defer cancel()
		r, err := client.Get(ctx, key, options...)
		if err != nil {
			return err
		}
		return p.get(r)
	}
	return c
}

// getStream prints the chunks of a list as they come, so that it needs not fit into memory, where the format is one that can be
// cut into pieces.
func (t *tool) getStream(client *clientv3.Client, p printer, key string, options []clientv3.OpOption) error {
	ctx, cancel := t.commandContext()
	defer cancel()
	chunks, err := client.GetStream(ctx, key, options...)
	if err != nil {
		return rpctypes.Error(err)
	}
	if _, inPieces := p.(*simplePrinter); !inPieces {
		r, err := clientv3.GetStreamToGetResponse(chunks)
		if err != nil {
			return rpctypes.Error(err)
		}
		return p.get(r)
	}
	for chunk := range chunks {
		if err := chunk.Err(); err != nil {
			return rpctypes.Error(err)
		}
		if err := p.get((*clientv3.GetResponse)(chunk.RangeResponse)); err != nil {
			return err
		}
	}
	return nil
}

func newGet() (*cobra.Command, *getFlags) {
	f := &getFlags{}
	c := &cobra.Command{Use: "get [options] <key> [range_end]", Short: "Gets the key or a range of keys"}
	fs := c.Flags()
	fs.StringVar(&f.consistency, "consistency", "l", "l (linearizable) or s (serializable)")
	fs.StringVar(&f.order, "order", "", "order of the results: ASCEND or DESCEND")
	fs.StringVar(&f.sortBy, "sort-by", "", "what the results are sorted by: CREATE, KEY, MODIFY, VALUE or VERSION")
	fs.Int64Var(&f.limit, "limit", 0, "most results wanted; 0 is all")
	fs.BoolVar(&f.prefix, "prefix", false, "get all keys that begin with the given key")
	fs.BoolVar(&f.fromKey, "from-key", false, "get all keys from the given one on, by byte order")
	fs.Int64Var(&f.rev, "rev", 0, "revision to read at; 0 is the present")
	fs.BoolVar(&f.keysOnly, "keys-only", false, "get keys without values")
	fs.BoolVar(&f.countOnly, "count-only", false, "get how many keys there are, for the output format \"fields\"")
	fs.BoolVar(&f.printValueOnly, "print-value-only", false, "print values without keys, for the output format \"simple\"")
	fs.Int64Var(&f.minCreate, "min-create-rev", 0, "lowest create revision wanted")
	fs.Int64Var(&f.maxCreate, "max-create-rev", 0, "highest create revision wanted")
	fs.Int64Var(&f.minMod, "min-mod-rev", 0, "lowest modification revision wanted")
	fs.Int64Var(&f.maxMod, "max-mod-rev", 0, "highest modification revision wanted")
	fs.BoolVar(&f.stream, "stream", false, "receive the results in pieces (RangeStream)")
	return c, f
}

// op makes the get, for a transaction.
func (f *getFlags) op(args []string) (clientv3.Op, error) {
	key, options, err := f.options(args)
	if err != nil {
		return clientv3.Op{}, err
	}
	return clientv3.OpGet(key, options...), nil
}

func (f *getFlags) options(args []string) (key string, options []clientv3.OpOption, err error) {
	if len(args) == 0 {
		return "", nil, badArguments("get command needs one argument as key and an optional argument as range_end")
	}
	if f.keysOnly && f.countOnly {
		return "", nil, badArguments("`--keys-only` and `--count-only` cannot be set at the same time, choose one")
	}
	serializable, err := parseConsistency(f.consistency)
	if err != nil {
		return "", nil, err
	}
	if key, options, err = rangeOptions(args, f.prefix, f.fromKey); err != nil {
		return "", nil, err
	}
	if serializable {
		options = append(options, clientv3.WithSerializable())
	}
	sort, err := f.sort()
	if err != nil {
		return "", nil, err
	}
	options = append(options, clientv3.WithLimit(f.limit), clientv3.WithRev(f.rev),
		clientv3.WithMinCreateRev(f.minCreate), clientv3.WithMaxCreateRev(f.maxCreate),
		clientv3.WithMinModRev(f.minMod), clientv3.WithMaxModRev(f.maxMod))
	options = append(options, sort...)
	if f.keysOnly {
		options = append(options, clientv3.WithKeysOnly())
	}
	if f.countOnly {
		options = append(options, clientv3.WithCountOnly())
	}
	return key, options, nil
}

func (f *getFlags) sort() ([]clientv3.OpOption, error) {
	order, ok := map[string]clientv3.SortOrder{
		"": clientv3.SortNone, "ASCEND": clientv3.SortAscend, "DESCEND": clientv3.SortDescend,
	}[strings.ToUpper(f.order)]
	if !ok {
		return nil, exit(exitFormat, fmt.Errorf("bad sort order %v", f.order))
	}
	target, ok := map[string]clientv3.SortTarget{
		"": clientv3.SortByKey, "CREATE": clientv3.SortByCreateRevision, "KEY": clientv3.SortByKey,
		"MODIFY": clientv3.SortByModRevision, "VALUE": clientv3.SortByValue, "VERSION": clientv3.SortByVersion,
	}[strings.ToUpper(f.sortBy)]
	if !ok {
		return nil, exit(exitFormat, fmt.Errorf("bad sort target %v", f.sortBy))
	}
	if f.order == "" && f.sortBy == "" {
		return nil, nil
	}
	return []clientv3.OpOption{clientv3.WithSort(target, order)}, nil
}

// parseConsistency tells if a read may be serializable.
func parseConsistency(s string) (serializable bool, err error) {
	switch s {
	case "l":
		return false, nil
	case "s":
		return true, nil
	}
	return false, exit(exitFormat, fmt.Errorf("unknown consistency flag %q", s))
}

var errUnsupportedFormat = errors.New("unsupported output format")
