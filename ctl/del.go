package ctl

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// delFlags are the flags of del, on the command line and in a transaction.
type delFlags struct {
	prefix, fromKey, prevKV, ranged bool
}

// delayBeforeRange is how long a del of a range, which might have been meant as a del of two keys, can still be interrupted.
const delayBeforeRange = 2 * time.Second

func (t *tool) delCommand() *cobra.Command {
	c, f := newDel()
	c.RunE = func(c *cobra.Command, args []string) error {
		op, err := f.op(args, t.warnOfRange)
		if err != nil {
			return err
		}
		client, p, err := t.connect(c)
		if err != nil {
			return err
		}
		defer closeClient(client)
		ctx, cancel := t.commandContext()
		defer cancel()
		r, err := client.Do(ctx, op)
		if err != nil {
			return err
		}
		return p.del(r.Del())
	}
	return c
}

func newDel() (*cobra.Command, *delFlags) {
	f := &delFlags{}
	c := &cobra.Command{Use: "del [options] <key> [range_end]", Short: "Removes the specified key or range of keys [key, range_end)"}
	c.Flags().BoolVar(&f.prefix, "prefix", false, "remove all keys that begin with the given key")
	c.Flags().BoolVar(&f.fromKey, "from-key", false, "remove all keys from the given one on, by byte order")
	c.Flags().BoolVar(&f.prevKV, "prev-kv", false, "print the keys and values removed")
	c.Flags().BoolVar(&f.ranged, "range", false, "two arguments are meant as a range: remove it without delay")
	return c, f
}

// op makes the delete. warn is called before a range of two arguments is taken.
func (f *delFlags) op(args []string, warn func(key, end string) error) (clientv3.Op, error) {
	if len(args) == 0 || len(args) > 2 {
		return clientv3.Op{}, badArguments("del command needs one argument as key and an optional argument as range_end")
	}
	key, options, err := rangeOptions(args, f.prefix, f.fromKey)
	if err != nil {
		return clientv3.Op{}, err
	}
	if len(args) == 2 && !f.ranged {
		if err := warn(args[0], args[1]); err != nil {
			return clientv3.Op{}, err
		}
	}
	if f.prevKV {
		options = append(options, clientv3.WithPrevKV())
	}
	return clientv3.OpDelete(key, options...), nil
}

func (t *tool) warnOfRange(key, end string) error {
	fmt.Fprintf(t.err, "Warning: Keys between %q and %q will be deleted. Please interrupt the command within next %d seconds to cancel. "+
		"You can provide `--range` flag to avoid the delay.\n", key, end, int(delayBeforeRange/time.Second))
	select {
	case <-time.After(delayBeforeRange):
		return nil
	case <-t.ctx.Done():
		return context.Cause(t.ctx)
	}
}
