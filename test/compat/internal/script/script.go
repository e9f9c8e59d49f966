// Package script runs written scripts against two servers at once.
//
// A script is a datadriven file: each directive is carried out on both servers, both results are printed, and they must be
// equal. The result in the file is the reference's, so a reader sees what etcd answers, and `-rewrite` records it. The
// directives:
//
//	servers [flag ...]         starts a fresh pair with these flags added; without it a pair starts with none
//	call                       one call a line: a method's name and its request in protobuf's text form. A line that
//	                           starts with a blank continues the one before. Between the calls:
//	                             @ key "value"     metadata of the calls that follow
//	                             within duration   the deadline of the calls that follow
//	                             let name = path   names a field of the next answer; $name stands for it from then on
//	raw path=/service/method   calls a method that need not exist
//	fill prefix=p count=n size=b   puts n keys p000, p001, ... with values of b bytes
//	watch name [events=n] [controls=n] [messages] [distinct] [events-only] [half-close] [hasleader]
//	                           sends the lines as WatchRequests (`empty` sends one without fields), then waits for so many
//	                           events and other messages and prints them by watcher; `messages` prints the bounds of
//	                           messages too, `distinct` equal lines of one watcher once,
//	                           `events-only` nothing but events
//	watch-end name [distinct] [events-only]  prints what still comes, and the status if the server ended the stream; then cancels it
//	keepalive                  sends each line as a LeaseKeepAliveRequest and prints each answer
//	restart [kill]             ends both members and starts them again
//
// In a line @repeat("x", n) stands for a string of n times x.
package script

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/broken"
)

const callWithin = 20 * time.Second

// Runner carries out one script.
type Runner struct {
	Reference, Subject string // programs
	Methods            map[string]wire.Method

	pair  *process.Pair
	sides [2]side
}

type side struct {
	*process.Side
	methods map[string]wire.Method
	vars    map[string]string
	watches map[string]*watch
}

// Run carries out the script in the file at path.
func (r *Runner) Run(t *testing.T, path string) {
	defer func() {
		if r.pair != nil {
			r.pair.Close()
		}
	}()
	datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
		t.Helper()
		if d.Cmd == "servers" || r.pair == nil {
			var flags []string
			if d.Cmd == "servers" {
				for _, a := range d.CmdArgs {
					flags = append(flags, a.String())
				}
			}
			r.start(t, flags)
			if d.Cmd == "servers" {
				return ""
			}
		}
		return r.both(t, d)
	})
	for i := range r.sides {
		for name := range r.sides[i].watches {
			t.Errorf("%s: watch stream %s is not ended", path, name)
		}
	}
}

func (r *Runner) start(t *testing.T, flags []string) {
	t.Helper()
	if r.pair != nil {
		r.pair.Close()
	}
	// Their defaults differ, and Status tells the quota.
	flags = append([]string{"--quota-backend-bytes=2147483648"}, flags...)
	pair, err := process.StartPair(r.Reference, r.Subject, t.TempDir(), flags...)
	if err != nil {
		t.Fatal(err)
	}
	r.pair = pair
	for i, s := range pair {
		r.sides[i] = side{
			Side: s, methods: r.Methods, watches: make(map[string]*watch),
			vars: map[string]string{
				"member": fmt.Sprint(s.Names.Member), "cluster": fmt.Sprint(s.Names.Cluster),
				"client": s.ClientURL, "peer": s.PeerURL,
			},
		}
	}
}

// both returns the reference's result and fails the test if the subject's is another.
func (r *Runner) both(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	if d.Cmd == "restart" {
		if err := r.pair.Restart(d.HasArg("kill")); err != nil {
			t.Fatal(err)
		}
		return ""
	}
	var results [2]string
	err := r.pair.Each(func(i int, _ *process.Side) (err error) {
		results[i], err = r.sides[i].run(d)
		return err
	})
	if err != nil {
		t.Fatalf("%s: %s: %v", d.Pos, d.Cmd, err)
	}
	if results[0] != results[1] {
		t.Error(broken.Errorf("%s: %s: the answers differ\n%s", d.Pos, d.Cmd, Difference(results[0], results[1])))
	}
	return results[0]
}

// Difference shows the lines of two results that differ.
func Difference(reference, subject string) string {
	var b strings.Builder
	a, c := strings.Split(reference, "\n"), strings.Split(subject, "\n")
	for i := range max(len(a), len(c)) {
		var left, right string
		if i < len(a) {
			left = a[i]
		}
		if i < len(c) {
			right = c[i]
		}
		if left != right {
			fmt.Fprintf(&b, "  reference: %s\n  subject:   %s\n", left, right)
		}
	}
	return b.String()
}

func (s *side) run(d *datadriven.TestData) (string, error) {
	lines := joinLines(d.Input)
	switch d.Cmd {
	case "call":
		return s.calls(lines)
	case "raw":
		return s.raw(argument(d, "path", "")), nil
	case "fill":
		return s.fill(d)
	case "watch":
		return s.watch(d, lines)
	case "watch-end":
		return s.watchEnd(d)
	case "keepalive":
		return s.keepalive(lines)
	}
	return "", fmt.Errorf("no directive is called %q", d.Cmd)
}

var (
	variable = regexp.MustCompile(`\$[a-z][a-z0-9]*`)
	repeat   = regexp.MustCompile(`@repeat\("([^"]*)", *(\d+)\)`)
)

// joinLines gives the lines that say something, with their continuations.
func joinLines(input string) []string {
	var lines []string
	for line := range strings.SplitSeq(input, "\n") {
		switch {
		case strings.TrimSpace(line) == "":
		case (line[0] == ' ' || line[0] == '\t') && len(lines) > 0:
			lines[len(lines)-1] += " " + strings.TrimSpace(line)
		default:
			lines = append(lines, line)
		}
	}
	return lines
}

// expand fills in variables and repeats.
func (s *side) expand(line string) (string, error) {
	var missing error
	line = variable.ReplaceAllStringFunc(line, func(name string) string {
		value, ok := s.vars[name[1:]]
		if !ok {
			missing = fmt.Errorf("line %q: %s is not set", line, name)
		}
		return value
	})
	return repeat.ReplaceAllStringFunc(line, func(call string) string {
		m := repeat.FindStringSubmatch(call)
		n, _ := strconv.Atoi(m[2]) // the expression admits digits only
		return strconv.Quote(strings.Repeat(m[1], n))
	}), missing
}

// parse reads a request of the method from a line.
func (s *side) parse(m wire.Method, line string) (proto.Message, error) {
	line, err := s.expand(line)
	if err != nil {
		return nil, err
	}
	return m.Parse(line)
}

func (s *side) calls(lines []string) (string, error) {
	var out strings.Builder
	var name, path string
	md, within := metadata.MD{}, callWithin
	for _, line := range lines {
		if rest, ok := strings.CutPrefix(line, "let "); ok {
			name, path, ok = strings.Cut(rest, " = ")
			if !ok {
				return "", fmt.Errorf("line %q: want let name = path", line)
			}
			continue
		}
		if rest, ok := strings.CutPrefix(line, "@ "); ok {
			key, quoted, _ := strings.Cut(rest, " ")
			quoted, err := s.expand(quoted)
			if err != nil {
				return "", err
			}
			value, err := strconv.Unquote(quoted)
			if err != nil {
				return "", fmt.Errorf("line %q: want @ key \"value\": %w", line, err)
			}
			md.Set(key, value)
			continue
		}
		if rest, ok := strings.CutPrefix(line, "within "); ok {
			var err error
			if within, err = time.ParseDuration(rest); err != nil {
				return "", err
			}
			continue
		}
		short, text, _ := strings.Cut(line, " ")
		method, ok := s.methods[short]
		if !ok {
			return "", fmt.Errorf("line %q: no method is called %q", line, short)
		}
		request, err := s.parse(method, text)
		if err != nil {
			return "", err
		}
		answers, err := s.call(method, md, within, request)
		if name != "" && err == nil && len(answers) == 1 {
			if err := s.let(name, path, answers[0]); err != nil {
				return "", err
			}
			name = ""
		}
		fmt.Fprintf(&out, "%s: %s\n", short, s.answer(short, answers, err))
	}
	return out.String(), nil
}

func (s *side) call(m wire.Method, md metadata.MD, within time.Duration, request proto.Message) ([]proto.Message, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return m.Call(metadata.NewOutgoingContext(ctx, md), s.Conn(), request)
}

func (s *side) answer(method string, answers []proto.Message, err error) string {
	var parts []string
	if method == "RangeStream" && len(answers) > 0 {
		parts = append(parts, s.Names.Text(Merge(answers)), Chunks(answers))
	} else {
		for _, a := range answers {
			parts = append(parts, s.Names.Text(a))
		}
	}
	if err != nil {
		parts = append(parts, wire.ErrorText(err))
	}
	return strings.Join(parts, "; ")
}

// let names the field at path (names joined by dots) of an answer.
func (s *side) let(name, path string, answer proto.Message) error {
	m := answer.ProtoReflect()
	steps := strings.Split(path, ".")
	for i, step := range steps {
		f := m.Descriptor().Fields().ByName(protoreflect.Name(step))
		if f == nil {
			return fmt.Errorf("let %s = %s: %s has no field %s", name, path, m.Descriptor().Name(), step)
		}
		v := m.Get(f)
		if i < len(steps)-1 {
			m = v.Message()
			continue
		}
		s.vars[name] = v.String()
		switch f.Kind() {
		case protoreflect.Int64Kind:
			s.Name(uint64(v.Int()), "$"+name)
		case protoreflect.Uint64Kind:
			s.Name(v.Uint(), "$"+name)
		default:
			s.Name(v.String(), "$"+name)
		}
	}
	return nil
}

func (s *side) raw(path string) string {
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	if err := s.Conn().Invoke(ctx, path, &emptypb.Empty{}, &emptypb.Empty{}); err != nil {
		return wire.ErrorText(err)
	}
	return "ok"
}

func (s *side) fill(d *datadriven.TestData) (string, error) {
	prefix := argument(d, "prefix", "k")
	count, err := number(d, "count")
	if err != nil {
		return "", err
	}
	size, err := number(d, "size")
	if err != nil {
		return "", err
	}
	put := s.methods["Put"]
	for i := range count {
		request, err := put.Parse(fmt.Sprintf("key:%q value:%q", fmt.Sprintf("%s%03d", prefix, i), strings.Repeat("v", size)))
		if err != nil {
			return "", err
		}
		if _, err := s.call(put, nil, callWithin, request); err != nil {
			return "", err
		}
	}
	return "", nil
}

func argument(d *datadriven.TestData, key, otherwise string) string {
	if arg, ok := d.Arg(key); ok && len(arg.Vals) == 1 {
		return arg.Vals[0]
	}
	return otherwise
}

func number(d *datadriven.TestData, key string) (int, error) {
	n, err := strconv.Atoi(argument(d, key, "0"))
	if err != nil {
		return 0, fmt.Errorf("%s: %s: %w", d.Pos, key, err)
	}
	return n, nil
}
