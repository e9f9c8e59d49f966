package ctl

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
)

func TestParseCompare(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{`mod("a") > "7"`, "MOD a GREATER 7"},
		{`m("a") != "7"`, "MOD a NOT_EQUAL 7"},
		{`create("a b") = "+1"`, "CREATE a b EQUAL 1"},
		{`ver("a") < "-2"`, "VERSION a LESS -2"},
		{`value("a") = "x \"y\""`, `VALUE a EQUAL x "y"`},
		{"val(`a\"`) = `\\`", `VALUE a" EQUAL \`},
		{`lease("a") = "1f"`, "LEASE a EQUAL 31"},
		{`lease("a") = "0"`, "LEASE a EQUAL 0"},
		{`nonsense`, "malformed comparison: nonsense"},
		{`mod(a) > "0"`, `malformed comparison: mod(a) > "0"; got mod("")  ""`},
		{`mod("a") > 0`, `malformed comparison: mod("a") > 0; got mod("a") > ""`},
		{`modx("a") > "0"`, `malformed comparison: modx("a") > "0" (unknown target modx)`},
		{`v("a") > "0"`, `malformed comparison: v("a") > "0" (unknown target v)`},
		{`value("a") >= "0"`, `malformed comparison: value("a") >= "0" (unknown operator >=; use =, !=, < or >)`},
		{`mod("a") > "x"`, `invalid txn compare request: mod("a") > "x"`},
		{`lease("a") = "x"`, `invalid txn compare request: lease("a") = "x"`},
	} {
		cmp, err := parseCompare(c.line)
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			got = compareText(cmp.GetCompare())
		}
		if got != c.want {
			t.Errorf("parseCompare(%q):\n got %s\nwant %s", c.line, got, c.want)
		}
	}
}

func compareText(c *etcdserverpb.Compare) string {
	var value any
	switch c.GetTarget() {
	case etcdserverpb.Compare_MOD:
		value = c.GetModRevision()
	case etcdserverpb.Compare_CREATE:
		value = c.GetCreateRevision()
	case etcdserverpb.Compare_VERSION:
		value = c.GetVersion()
	case etcdserverpb.Compare_VALUE:
		value = string(c.GetValue())
	case etcdserverpb.Compare_LEASE:
		value = c.GetLease()
	}
	return fmt.Sprintf("%v %s %v %v", c.GetTarget(), c.GetKey(), c.GetResult(), value)
}

func TestParseOpRefuses(t *testing.T) {
	tool := &tool{err: &bytes.Buffer{}, ctx: t.Context()}
	for _, c := range []struct {
		line, want string
		code       int // 0: of txn itself
	}{
		{"put", "invalid txn compare request: put", 0},
		{"bogus a", "invalid txn request: bogus a", 0},
		{"get a --nonsense", "invalid txn request: get a --nonsense", 0},
		{"get a -h", "invalid txn request: get a -h", 0},
		{`put a "\q"`, "invalid syntax", 0},
		{"put a", "put command needs 1 argument and input from stdin or 2 arguments", exitArguments},
		{"get a --sort-by=zz", "bad sort target zz", exitFormat},
		{"del a b c", "del command needs one argument as key and an optional argument as range_end", exitArguments},
	} {
		_, err := tool.parseOp(c.line)
		if err == nil || err.Error() != c.want {
			t.Errorf("parseOp(%q): error %v, want %s", c.line, err, c.want)
			continue
		}
		code := 0
		if e, ok := errors.AsType[*exitError](err); ok {
			code = e.code
		}
		if code != c.code {
			t.Errorf("parseOp(%q): exit code %d, want %d", c.line, code, c.code)
		}
	}
}

func TestTxnReaderTakesThreeLists(t *testing.T) {
	var out bytes.Buffer
	input := "mod(\"a\") > \"0\"\n\nput a b\nget --prefix a\ndel a b --range\n\n\nleft over\n"
	r := &txnReader{prompt: true, tool: &tool{in: bufio.NewReader(strings.NewReader(input)), out: bufio.NewWriter(&out), ctx: t.Context()}}
	if err := r.read(); err != nil {
		t.Fatal(err)
	}
	if len(r.compares) != 1 || len(r.success) != 3 || len(r.failure) != 0 {
		t.Errorf("read %d conditions, %d and %d requests; want 1, 3 and 0", len(r.compares), len(r.success), len(r.failure))
	}
	if get := r.success[1]; !get.IsGet() || string(get.KeyBytes()) != "a" || string(get.RangeBytes()) != "b" {
		t.Errorf("the second request is %v of %q to %q, want a get of a to b", get.IsGet(), get.KeyBytes(), get.RangeBytes())
	}
	if want := "compares:\nsuccess requests (get, put, del):\nfailure requests (get, put, del):\n"; out.String() != want {
		t.Errorf("prompted %q, want %q", out.String(), want)
	}
}

func TestTxnReaderNeedsItsEnd(t *testing.T) {
	for _, input := range []string{"", "\n", "\n\n", "\nput a b", "\nput a b\n\n", "mod(\"a\") > \"0\"\n"} {
		r := &txnReader{tool: &tool{in: bufio.NewReader(strings.NewReader(input)), ctx: t.Context()}}
		err := r.read()
		e, ok := errors.AsType[*exitError](err)
		if !ok || e.code != exitInput || e.Error() != "EOF" {
			t.Errorf("%q: error %v, want EOF with exit code %d", input, err, exitInput)
		}
	}
}
