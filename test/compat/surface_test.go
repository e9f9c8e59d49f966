package compat

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/wire"
)

// compatibilityPage goes through etcd's surface line by line. What it says of methods, metrics and flags is held against
// the running programs here, so the page cannot promise more or less than there is.
const compatibilityPage = parentModule + "/docs/compatibility.md"

// What the page says of a line.
const (
	passes  = "pass"
	differs = "differs"
	absent  = "absent"
)

// pageLine is one line of the page's tables.
type pageLine struct{ area, item, status, why string }

// readPage returns the lines of the page in order.
func readPage(t *testing.T) []pageLine {
	t.Helper()
	f, err := os.Open(compatibilityPage)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var lines []pageLine
	area := ""
	for s := bufio.NewScanner(f); s.Scan(); {
		text := s.Text()
		if name, ok := strings.CutPrefix(text, "## "); ok {
			area = name
		}
		cells := strings.Split(strings.Trim(text, "|"), " | ")
		if !strings.HasPrefix(text, "| ") || len(cells) != 3 {
			continue
		}
		l := pageLine{area, strings.Trim(cells[0], " `"), strings.TrimSpace(cells[1]), strings.TrimSpace(cells[2])}
		if l.status == passes || l.status == differs || l.status == absent {
			lines = append(lines, l)
		}
	}
	return lines
}

// areaOf returns the lines of one area by item.
func areaOf(t *testing.T, area string) map[string]pageLine {
	t.Helper()
	items := make(map[string]pageLine)
	for _, l := range readPage(t) {
		if l.area == area {
			items[l.item] = l
		}
	}
	if len(items) == 0 {
		t.Fatalf("%s has no area %s", compatibilityPage, area)
	}
	return items
}

// TestPageCounts checks the table of counts at the head of the page.
func TestPageCounts(t *testing.T) {
	counts := make(map[string]map[string]int)
	for _, l := range readPage(t) {
		if counts[l.area] == nil {
			counts[l.area] = make(map[string]int)
		}
		counts[l.area][l.status]++
		if l.why == "" {
			t.Errorf("%s, %s: no word on why or where", l.area, l.item)
		}
	}
	page, err := os.ReadFile(compatibilityPage)
	if err != nil {
		t.Fatal(err)
	}
	for area, n := range counts {
		want := fmt.Sprintf("| %s | %d | %d | %d |", area, n[passes], n[differs], n[absent])
		if !strings.Contains(string(page), want+"\n") {
			t.Errorf("the table of counts lacks: %s", want)
		}
	}
}

var testName = regexp.MustCompile(`\bTest[A-Z]\w+`)

// TestPageNames checks that the tests which the page names exist.
func TestPageNames(t *testing.T) {
	known := make(map[string]bool)
	err := filepath.WalkDir(parentModule, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, name := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(source, -1) {
			known[string(name[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range readPage(t) {
		for _, name := range testName.FindAllString(l.why, -1) {
			if !known[name] {
				t.Errorf("%s, %s: there is no %s", l.area, l.item, name)
			}
		}
	}
}

// surfacePair starts both programs for a test of the surface.
func surfacePair(t *testing.T, flags ...string) *process.Pair {
	t.Helper()
	pair, err := process.StartPair(programs.Etcd, subject, t.TempDir(), flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pair.Close)
	return pair
}

func surfaceContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// equal fails the test if the two sides answered differently.
func equal(t *testing.T, what string, answers [2]string) {
	t.Helper()
	if answers[0] != answers[1] {
		t.Errorf("%s\netcd:\n%s\nsubject:\n%s", what, indent(answers[0]), indent(answers[1]))
	}
}

// TestEveryMethod calls each method of etcd, with an empty request but for one. One that is here must answer as etcd does, one that is
// not must say so.
func TestEveryMethod(t *testing.T) {
	if programs.Engram == "" {
		return // etcd has no page
	}
	page := areaOf(t, "grpc.method")
	pair, ctx := surfacePair(t), surfaceContext(t)
	for _, s := range pair { // so that Compact has something to do
		if _, err := etcdserverpb.NewKVClient(s.Conn()).Put(ctx, &etcdserverpb.PutRequest{Key: []byte("k")}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(methods)) {
		m := methods[name]
		line, named := page[m.FullName]
		if !named {
			continue // List of the health service
		}
		text := ""
		if m.Name == "Compact" { // at 0, what is hashed next would not be what is there
			text = "revision:2"
		}
		request, err := m.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		var answers [2]string
		for i, s := range pair {
			if line.status == absent && i == 0 {
				continue // some of these would block, or turn authentication on
			}
			limit := 30 * time.Second
			if m.Name == "HealthWatch" || m.Name == "Watch" || m.Name == "Observe" { // they go on until they are cut off
				limit = 3 * time.Second
			}
			within, cancel := context.WithTimeout(ctx, limit)
			found, err := m.Call(within, s.Conn(), request)
			for _, f := range found {
				answers[i] += s.Names.Text(f) + "\n"
			}
			if err != nil && m.Name != "HealthWatch" { // which goes on until it is cut off, by either side
				answers[i] += wire.ErrorText(err)
			}
			cancel()
		}
		switch line.status {
		case absent:
			if !strings.HasPrefix(answers[1], "error Unimplemented: ") {
				t.Errorf("%s is absent by the page, and answers %s", m.FullName, answers[1])
			}
			if strings.HasPrefix(m.FullName, "/etcdserverpb.") && !strings.Contains(answers[1], " is not served by this version of Engram: ") {
				t.Errorf("%s does not tell why it is absent: %s", m.FullName, answers[1])
			}
		case passes:
			if m.Name == "LeaseGrant" || m.Name == "LeaseLeases" { // tell an ID that was chosen
				answers[0], answers[1] = looseNumbers.ReplaceAllString(answers[0], "N"), looseNumbers.ReplaceAllString(answers[1], "N")
			}
			if m.Name == "Status" && programs.Engram != "" { // TestDefaultQuota has the difference
				answers[1] = strings.Replace(answers[1], "dbSizeQuota:8589934592", "dbSizeQuota:2147483648", 1)
			}
			equal(t, m.FullName, answers)
		}
	}
}

// TestQuota fills a store with a tiny quota: writes that need space are refused, all others are not, and after the alarm is
// off they go on.
func TestQuota(t *testing.T) {
	pair, ctx := surfacePair(t, "--quota-backend-bytes=53248"), surfaceContext(t)
	for i, s := range pair {
		who := []string{"etcd", "subject"}[i]
		kv, maintenance := etcdserverpb.NewKVClient(s.Conn()), etcdserverpb.NewMaintenanceClient(s.Conn())
		put := func() error {
			_, err := kv.Put(ctx, &etcdserverpb.PutRequest{Key: []byte("k"), Value: make([]byte, 4096)})
			return err
		}
		var err error
		n := 0
		for ; err == nil && n < 20000; n++ { // etcd sees what is used only when it commits, ten times a second
			err = put()
		}
		if s := status.Convert(err); s.Code() != codes.ResourceExhausted || s.Message() != "etcdserver: mvcc: database space exceeded" || n < 3 {
			t.Fatalf("%s: put %d of 4 KiB under a quota of 52 KiB: %v", who, n, err)
		}
		alarm := func() []*etcdserverpb.AlarmMember {
			r, err := maintenance.Alarm(ctx, &etcdserverpb.AlarmRequest{})
			if err != nil {
				t.Fatalf("%s: %v", who, err)
			}
			return r.Alarms
		}
		for len(alarm()) == 0 {
			if ctx.Err() != nil {
				t.Fatalf("%s: no alarm is raised", who)
			}
		}
		if a := alarm(); len(a) != 1 || a[0].Alarm != etcdserverpb.AlarmType_NOSPACE || a[0].MemberID != s.Names.Member {
			t.Fatalf("%s: alarms %v", who, a)
		}
		_, grant := etcdserverpb.NewLeaseClient(s.Conn()).LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{TTL: 60})
		if status.Code(grant) != codes.ResourceExhausted {
			t.Errorf("%s: a lease is granted without space: %v", who, grant)
		}
		d, err := kv.DeleteRange(ctx, &etcdserverpb.DeleteRangeRequest{Key: []byte("k")})
		if err != nil {
			t.Fatalf("%s: deleting without space: %v", who, err)
		}
		if _, err := kv.Compact(ctx, &etcdserverpb.CompactionRequest{Revision: d.Header.Revision, Physical: true}); err != nil {
			t.Fatalf("%s: compacting without space: %v", who, err)
		}
		if _, err := maintenance.Defragment(ctx, &etcdserverpb.DefragmentRequest{}); err != nil {
			t.Fatalf("%s: defragmenting without space: %v", who, err)
		}
		if _, err := maintenance.Alarm(ctx, &etcdserverpb.AlarmRequest{
			Action: etcdserverpb.AlarmRequest_DEACTIVATE, MemberID: s.Names.Member, Alarm: etcdserverpb.AlarmType_NOSPACE,
		}); err != nil {
			t.Fatalf("%s: disarming: %v", who, err)
		}
		if err := put(); err != nil {
			t.Errorf("%s: put after the alarm: %v", who, err)
		}
	}
}

// TestDefaultQuota reads the quota that is in force when none is asked for: etcd's 2 GiB, and Engram's 8.
func TestDefaultQuota(t *testing.T) {
	pair, ctx := surfacePair(t), surfaceContext(t)
	for i, s := range pair {
		if _, err := etcdserverpb.NewKVClient(s.Conn()).Put(ctx, &etcdserverpb.PutRequest{Key: []byte("k"), Value: []byte("v")}); err != nil {
			t.Fatal(err)
		}
		r, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Status(ctx, &etcdserverpb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		want := int64(2 << 30)
		if i == 1 && programs.Engram != "" {
			want = 8 << 30
		}
		if r.DbSizeQuota != want || r.DbSize <= 0 || r.DbSizeInUse <= 0 {
			t.Errorf("%s: quota %d, size %d, in use %d", []string{"etcd", "subject"}[i], r.DbSizeQuota, r.DbSize, r.DbSizeInUse)
		}
	}
}

// TestLargeAnswer reads 100 MB in one answer.
func TestLargeAnswer(t *testing.T) {
	const keys, size = 72, 1400 << 10
	server, err := process.Start(process.Options{Program: subject, Dir: t.TempDir(), Name: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	ctx, kv := surfaceContext(t), etcdserverpb.NewKVClient(server.Conn())
	value := make([]byte, size)
	for i := range keys {
		if _, err := kv.Put(ctx, &etcdserverpb.PutRequest{Key: fmt.Appendf(nil, "k%03d", i), Value: value}); err != nil {
			t.Fatal(err)
		}
	}
	r, err := kv.Range(ctx, &etcdserverpb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}, grpc.MaxCallRecvMsgSize(256<<20))
	if err != nil || len(r.GetKvs()) != keys || len(r.Kvs[keys-1].Value) != size {
		t.Fatalf("%d keys, %v", len(r.GetKvs()), err)
	}
}

// TestCompactionUnderRangeStream compacts the revision that a stream reads at, while flow control holds the stream up. Etcd
// ends such a stream with an error; one may also go on to its end, if it tells what was there at the start.
func TestCompactionUnderRangeStream(t *testing.T) {
	const keys, size = 40, 300 << 10
	pair, ctx := surfacePair(t), surfaceContext(t)
	if err := pair.Each(func(i int, s *process.Side) error {
		kv := etcdserverpb.NewKVClient(s.Conn())
		var last int64
		for n := range keys {
			r, err := kv.Put(ctx, &etcdserverpb.PutRequest{Key: fmt.Appendf(nil, "k%03d", n), Value: make([]byte, size)})
			if err != nil {
				return err
			}
			last = r.Header.Revision
		}
		stream, err := kv.RangeStream(ctx, &etcdserverpb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})
		if err != nil {
			return err
		}
		all := &etcdserverpb.RangeStreamResponse{}
		chunk, err := stream.Recv()
		if err != nil {
			return err
		}
		proto.Merge(all, chunk)
		for n := range keys {
			if _, err := kv.Put(ctx, &etcdserverpb.PutRequest{Key: fmt.Appendf(nil, "k%03d", n), Value: []byte("new")}); err != nil {
				return err
			}
		}
		if _, err := kv.Compact(ctx, &etcdserverpb.CompactionRequest{Revision: last + keys, Physical: true}); err != nil {
			return err
		}
		for err == nil {
			if chunk, err = stream.Recv(); err == nil {
				proto.Merge(all, chunk)
			}
		}
		text := wire.ErrorText(err)
		switch {
		case text == "error OutOfRange: etcdserver: mvcc: required revision has been compacted":
		case i == 1 && err == io.EOF:
			r := all.GetRangeResponse()
			if len(r.GetKvs()) != keys || r.GetCount() != keys || r.GetHeader().GetRevision() != last {
				return fmt.Errorf("%d keys, count %d, revision %d, and %d were there at %d", len(r.GetKvs()), r.GetCount(), r.GetHeader().GetRevision(), keys, last)
			}
			for _, kv := range r.Kvs {
				if len(kv.Value) != size {
					return fmt.Errorf("%s has a later value", kv.Key)
				}
			}
		default:
			return errors.New(text)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestConnections speaks HTTP/2 by hand, to see what a server says of a connection itself: how many streams it takes, and
// what it does with a client that pings too often.
func TestConnections(t *testing.T) {
	t.Run("streams", func(t *testing.T) {
		for _, flags := range [][]string{nil, {"--max-concurrent-streams=7"}} {
			pair := surfacePair(t, flags...)
			var answers [2]string
			for i, s := range pair {
				c := dialFrames(t, s.Endpoint())
				for answers[i] == "" {
					if kind, payload := c.read(t); kind == frameSettings {
						answers[i] = fmt.Sprintf("at most %d streams", setting(payload, 3))
					}
				}
			}
			equal(t, fmt.Sprintf("flags %q", flags), answers)
		}
	})
	t.Run("pings", func(t *testing.T) {
		pair := surfacePair(t)
		var answers [2]string
		for i, s := range pair {
			c := dialFrames(t, s.Endpoint())
			for range 5 {
				c.write(t, framePing, make([]byte, 8))
			}
			for answers[i] == "" {
				if kind, payload := c.read(t); kind == frameGoAway {
					answers[i] = fmt.Sprintf("code %d: %s", binary.BigEndian.Uint32(payload[4:]), payload[8:])
				}
			}
		}
		equal(t, "five pings at once", answers)
	})
	t.Run("slower pings", func(t *testing.T) {
		// With a floor of no time at all pings without a stream are still too many, so the stream is what is tested.
		pair := surfacePair(t, "--grpc-keepalive-min-time=0s")
		for _, s := range pair {
			ctx := surfaceContext(t)
			w, err := etcdserverpb.NewWatchClient(s.Conn()).Watch(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if err := w.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
				CreateRequest: &etcdserverpb.WatchCreateRequest{Key: []byte("k")}}}); err != nil {
				t.Fatal(err)
			}
			if r, err := w.Recv(); err != nil || !r.Created {
				t.Fatalf("%v, %v", r, err)
			}
		}
	})
}

// The kinds of HTTP/2 frames needed here.
const (
	frameSettings = 4
	framePing     = 6
	frameGoAway   = 7
)

// frames is a connection on which HTTP/2 is spoken by hand.
type frames struct{ net.Conn }

func dialFrames(t *testing.T, address string) frames {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	f := frames{c}
	f.write(t, frameSettings, nil)
	return f
}

func (f frames) write(t *testing.T, kind byte, payload []byte) {
	t.Helper()
	head := []byte{0, 0, byte(len(payload)), kind, 0, 0, 0, 0, 0}
	if _, err := f.Write(append(head, payload...)); err != nil {
		t.Fatal(err)
	}
}

func (f frames) read(t *testing.T) (kind byte, payload []byte) {
	t.Helper()
	var head [9]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		t.Fatal(err)
	}
	payload = make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
	if _, err := io.ReadFull(f, payload); err != nil {
		t.Fatal(err)
	}
	return head[3], payload
}

// setting returns a setting of a SETTINGS frame, HTTP/2's default of no limit if it is not there.
func setting(payload []byte, id uint16) uint32 {
	for ; len(payload) >= 6; payload = payload[6:] {
		if binary.BigEndian.Uint16(payload) == id {
			return binary.BigEndian.Uint32(payload[2:])
		}
	}
	return 1<<32 - 1
}
