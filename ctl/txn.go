package ctl

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) txnCommand() *cobra.Command {
	var interactive bool
	c := &cobra.Command{
		Use:   "txn [options]",
		Short: "Txn processes all the requests in one transaction",
		Long: `Reads a transaction from standard input and runs it as one step.

Three lists of lines, an empty line after each: conditions, the requests if all of them hold, the requests if one does not.

  mod("key1") > "0"                      also: version, create, value, lease; and =, != or <

  put key1 "overwrote-key1"              also: get, del; with the flags of those commands

  put key1 "created-key1"
  put key2 "some extra key"
  `,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return badArguments("txn command does not accept argument")
			}
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			txn := &txnReader{tool: t, prompt: interactive}
			if err := txn.read(); err != nil {
				return err
			}
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.Txn(ctx).If(txn.compares...).Then(txn.success...).Else(txn.failure...).Commit()
			if err != nil {
				return err
			}
			return p.txn(r)
		},
	}
	c.Flags().BoolVarP(&interactive, "interactive", "i", false, "prompt for each list")
	return c
}

// txnReader reads a transaction line by line.
type txnReader struct {
	tool             *tool
	prompt           bool
	compares         []clientv3.Cmp
	success, failure []clientv3.Op
}

// maxTxnLines bounds each list. A server takes far fewer.
const maxTxnLines = 1 << 20

func (r *txnReader) read() error {
	err := r.section("compares:", func(line string) error {
		cmp, err := parseCompare(line)
		r.compares = append(r.compares, cmp)
		return err
	})
	if err != nil {
		return err
	}
	for _, list := range []struct {
		title string
		ops   *[]clientv3.Op
	}{{"success requests (get, put, del):", &r.success}, {"failure requests (get, put, del):", &r.failure}} {
		err := r.section(list.title, func(line string) error {
			op, err := r.tool.parseOp(line)
			*list.ops = append(*list.ops, op)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// section gives each line up to an empty one to add.
func (r *txnReader) section(title string, add func(line string) error) error {
	if r.prompt {
		fmt.Fprintln(r.tool.out, title)
		if err := r.tool.out.Flush(); err != nil {
			return err
		}
	}
	for range maxTxnLines {
		line, err := r.tool.in.ReadString('\n')
		if err != nil { // an empty line must end the list, or half of a file might be taken for the whole
			return exit(exitInput, err)
		}
		if line = strings.TrimSpace(line); line == "" {
			return nil
		}
		if err := add(line); err != nil {
			if _, ok := errors.AsType[*exitError](err); ok {
				return err
			}
			return exit(exitInput, err)
		}
	}
	return exit(exitInput, fmt.Errorf("more than %d lines under %q", maxTxnLines, title))
}

// compareTarget is what a condition looks at.
type compareTarget struct {
	name  string
	least int // shortest form accepted
	cmp   func(key string) clientv3.Cmp
}

var compareTargets = []compareTarget{
	{"version", len("ver"), clientv3.Version},
	{"create", len("c"), clientv3.CreateRevision},
	{"mod", len("m"), clientv3.ModRevision},
	{"value", len("val"), clientv3.Value},
	{"lease", len("lease"), clientv3.LeaseValue},
}

// parseCompare parses a condition: target("key") op "value".
func parseCompare(line string) (clientv3.Cmp, error) {
	name, rest, found := strings.Cut(line, "(")
	if !found {
		return clientv3.Cmp{}, fmt.Errorf("malformed comparison: %s", line)
	}
	var key, op, value string
	if n, _ := fmt.Sscanf(rest, "%q) %s %q", &key, &op, &value); n != 3 {
		return clientv3.Cmp{}, fmt.Errorf("malformed comparison: %s; got %s(%q) %s %q", line, name, key, op, value)
	}
	for _, target := range compareTargets {
		if len(name) < target.least || !strings.HasPrefix(target.name, name) {
			continue
		}
		switch op {
		case "=", "!=", "<", ">":
		default:
			return clientv3.Cmp{}, fmt.Errorf("malformed comparison: %s (unknown operator %s; use =, !=, < or >)", line, op)
		}
		cmp := target.cmp(key)
		if target.name == "value" {
			return clientv3.Compare(cmp, op, value), nil
		}
		base := 10
		if target.name == "lease" { // a lease ID, hexadecimal as everywhere
			base = 16
		}
		number, err := strconv.ParseInt(value, base, 64)
		if err != nil {
			return clientv3.Cmp{}, fmt.Errorf("invalid txn compare request: %s", line)
		}
		return clientv3.Compare(cmp, op, number), nil
	}
	return clientv3.Cmp{}, fmt.Errorf("malformed comparison: %s (unknown target %s)", line, name)
}

// parseOp parses one request: a get, put or del as on the command line.
func (t *tool) parseOp(line string) (clientv3.Op, error) {
	words, err := splitWords(line)
	if err != nil {
		return clientv3.Op{}, err
	}
	if len(words) < 2 {
		return clientv3.Op{}, fmt.Errorf("invalid txn compare request: %s", line)
	}
	var c *cobra.Command
	var op func(args []string) (clientv3.Op, error)
	switch words[0] {
	case "put":
		put, f := newPut()
		c, op = put, func(args []string) (clientv3.Op, error) {
			return f.op(args, func() (string, error) { return "", nil }) // the input is the transaction, it holds no value
		}
	case "get":
		get, f := newGet()
		c, op = get, f.op
	case "del":
		del, f := newDel()
		c, op = del, func(args []string) (clientv3.Op, error) { return f.op(args, t.warnOfRange) }
	default:
		return clientv3.Op{}, fmt.Errorf("invalid txn request: %s", line)
	}
	c.Flags().SetOutput(io.Discard)
	switch err := c.ParseFlags(words[1:]); {
	case errors.Is(err, pflag.ErrHelp):
		return clientv3.Op{}, fmt.Errorf("invalid txn request: %s", line)
	case err != nil:
		fmt.Fprintln(t.err, err)
		return clientv3.Op{}, fmt.Errorf("invalid txn request: %s", line)
	}
	return op(c.Flags().Args())
}
