package ctl

import (
	"errors"
	"io"
	"strconv"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// putFlags are the flags of put, on the command line and in a transaction.
type putFlags struct {
	lease       string
	prevKV      bool
	ignoreValue bool
	ignoreLease bool
}

func (t *tool) putCommand() *cobra.Command {
	c, f := newPut()
	c.RunE = func(c *cobra.Command, args []string) error {
		op, err := f.op(args, func() (string, error) { return readAll(t.in) })
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
		return p.put(r.Put())
	}
	return c
}

func newPut() (*cobra.Command, *putFlags) {
	f := &putFlags{}
	c := &cobra.Command{
		Use:   "put [options] <key> <value> (<value> can also be given from stdin)",
		Short: "Puts the given key into the store",
		Long: `Puts the given key into the store. A value that is not on the command line is read from standard input.

A key or value that begins with '-' goes after '--', so that it is not taken for a flag:

  put -- <key> <value>`,
	}
	c.Flags().StringVar(&f.lease, "lease", "0", "lease ID (in hexadecimal) to attach to the key")
	c.Flags().BoolVar(&f.prevKV, "prev-kv", false, "print the key and value as they were before")
	c.Flags().BoolVar(&f.ignoreValue, "ignore-value", false, "keep the value that the key has")
	c.Flags().BoolVar(&f.ignoreLease, "ignore-lease", false, "keep the lease that the key has")
	return c, f
}

// op makes the put. input reads the value where args have none; an empty one does not count as a value.
func (f *putFlags) op(args []string, input func() (string, error)) (clientv3.Op, error) {
	const arity = "put command needs 1 argument and input from stdin or 2 arguments"
	if len(args) == 0 {
		return clientv3.Op{}, badArguments(arity)
	}
	if f.ignoreValue && len(args) > 1 {
		return clientv3.Op{}, badArguments("put command needs only 1 argument when 'ignore-value' is set")
	}
	lease, err := strconv.ParseInt(f.lease, 16, 64)
	if err != nil {
		return clientv3.Op{}, badArguments("bad lease ID (%w), expecting ID in Hex", err)
	}
	var value string
	switch {
	case len(args) > 1:
		value = args[1]
	case !f.ignoreValue:
		if value, err = input(); err != nil {
			return clientv3.Op{}, err
		}
		if value == "" {
			return clientv3.Op{}, badArguments(arity)
		}
	}
	var options []clientv3.OpOption
	if lease != 0 {
		options = append(options, clientv3.WithLease(clientv3.LeaseID(lease)))
	}
	if f.prevKV {
		options = append(options, clientv3.WithPrevKV())
	}
	if f.ignoreValue {
		options = append(options, clientv3.WithIgnoreValue())
	}
	if f.ignoreLease {
		options = append(options, clientv3.WithIgnoreLease())
	}
	return clientv3.OpPut(args[0], value, options...), nil
}

// readAll reads the whole input as a value. A server refuses more than a few MiB, so reading stops far above that.
func readAll(r io.Reader) (string, error) {
	const most = 1 << 30
	b, err := io.ReadAll(io.LimitReader(r, most+1))
	switch {
	case err != nil:
		return "", badArguments("cannot read the value from standard input: %w", err)
	case len(b) > most:
		return "", badArguments("the value on standard input is longer than %d bytes", most)
	}
	return string(b), nil
}

// closeClient ends a client whose answers are all there; the connection's own end is of no interest any more.
func closeClient(c io.Closer) { _ = c.Close() }

// parseLeaseID parses a lease ID given as an argument.
func parseLeaseID(s string) (clientv3.LeaseID, error) {
	id, err := strconv.ParseInt(s, 16, 64)
	if err != nil {
		return 0, badArguments("bad lease ID arg (%w), expecting ID in Hex", err)
	}
	return clientv3.LeaseID(id), nil
}

var errRangeFlags = errors.New("`--prefix` and `--from-key` cannot be set at the same time, choose one")

// rangeOptions makes the options that say which keys are meant, from the arguments after the command's name.
func rangeOptions(args []string, prefix, fromKey bool) (key string, options []clientv3.OpOption, err error) {
	if prefix && fromKey {
		return "", nil, exit(exitArguments, errRangeFlags)
	}
	key = args[0]
	if len(args) > 1 {
		if prefix || fromKey {
			return "", nil, badArguments("too many arguments, only accept one argument when `--prefix` or `--from-key` is set")
		}
		return key, []clientv3.OpOption{clientv3.WithRange(args[1])}, nil
	}
	switch { // of the empty key, both make the range of all keys
	case prefix:
		options = append(options, clientv3.WithPrefix())
	case fromKey:
		options = append(options, clientv3.WithFromKey())
	}
	return key, options, nil
}
