package peer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"runtime"
	"strings"
	"testing"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// TestGolden has the bytes of both encodings, as etcd 3.7 writes them.
func TestGolden(t *testing.T) {
	entry := func(index uint64, data string) *raftpb.Entry {
		return &raftpb.Entry{Term: proto.Uint64(2), Index: &index, Data: []byte(data)}
	}
	app := func(logTerm, index, commit uint64, entries ...*raftpb.Entry) *raftpb.Message {
		return &raftpb.Message{Type: raftpb.MsgApp.Enum(), To: proto.Uint64(2), From: proto.Uint64(1), Term: proto.Uint64(2),
			LogTerm: &logTerm, Index: &index, Commit: &commit, Entries: entries}
	}
	for _, tc := range []struct {
		enc  encoder
		dec  func(r io.Reader) decoder
		msgs []*raftpb.Message
		want []string
	}{
		{
			messageEncoder{}, func(r io.Reader) decoder { return &messageDecoder{frameReader{r: r}} },
			[]*raftpb.Message{nil, {Type: raftpb.MsgHeartbeatResp.Enum(), To: proto.Uint64(2), From: proto.Uint64(1), Context: []byte("x")}},
			[]string{"0000000000000002 0808", "0000000000000009 0809 1002 1801 6201 78"},
		},
		{
			&msgAppEncoder{}, func(r io.Reader) decoder { return &msgAppDecoder{frameReader: frameReader{r: r}, local: 2, remote: 1} },
			[]*raftpb.Message{
				nil,
				app(1, 4, 4, entry(5, "a")), // in full: nothing is known
				app(2, 5, 5, entry(6, "b"), entry(7, "")),
				app(2, 7, 7),               // a commit alone
				app(2, 3, 7),               // in full: elsewhere in the log
				app(2, 3, 7, entry(4, "")), // and on from there
			},
			[]string{
				"00",
				"02 0000000000000017 0803 1002 1801 2002 2801 3004 3a07 1002 1805 220161 4004",
				"01 0000000000000002 0000000000000007 1002 1806 220162 0000000000000006 1002 1807 2200 0000000000000005",
				"01 0000000000000000 0000000000000007",
				"02 000000000000000e 0803 1002 1801 2002 2802 3003 4007",
				"01 0000000000000001 0000000000000006 1002 1804 2200 0000000000000007",
			},
		},
	} {
		var all []byte
		for i, m := range tc.msgs {
			b, err := tc.enc.append(nil, m)
			if err != nil || !bytes.Equal(b, unhex(tc.want[i])) {
				t.Errorf("%v: %x %v, want %s", m, b, err, tc.want[i])
			}
			all = append(all, b...)
		}
		d := tc.dec(bytes.NewReader(all))
		for _, m := range tc.msgs {
			got, err := d.decode()
			if err != nil || (got == nil) != (m == nil) || m != nil && !proto.Equal(got, m) {
				t.Errorf("%v %v, want %v", got, err, m)
			}
		}
		if m, err := d.decode(); err != io.EOF {
			t.Errorf("%v %v at the end", m, err)
		}
		if n := d.take(); n != len(all) {
			t.Errorf("%d bytes counted of %d", n, len(all))
		}
		// Cut anywhere inside a frame it is no clean end.
		ends := map[int]bool{0: true}
		n := 0
		for _, w := range tc.want {
			n += len(unhex(w))
			ends[n] = true
		}
		for cut := range all {
			d := tc.dec(bytes.NewReader(all[:cut]))
			var err error
			for err == nil {
				_, err = d.decode()
			}
			if want := map[bool]error{true: io.EOF, false: io.ErrUnexpectedEOF}[ends[cut]]; err != want {
				t.Errorf("cut at %d: %v, want %v", cut, err, want)
			}
		}
	}
	// etcd 3.6 writes zeros too: an entry.
	e := &raftpb.Entry{}
	if err := proto.Unmarshal(unhex("0800 1002 1803"), e); err != nil || e.GetIndex() != 3 || e.GetTerm() != 2 {
		t.Fatal(e, err)
	}
}

// TestOldLinkHeartbeat is etcd 3.6's: every scalar zero, and an empty snapshot.
func TestOldLinkHeartbeat(t *testing.T) {
	b := unhex("0808 1000 1800 2000 2800 3000 4000 5000 5800 4a00")
	frame := append(binary.BigEndian.AppendUint64(nil, uint64(len(b))), b...)
	d := &messageDecoder{frameReader{r: bytes.NewReader(frame)}}
	if m, err := d.decode(); m != nil || err != nil {
		t.Fatal(m, err)
	}
}

// TestHostileLengths promises much and sends nothing: the decoder must refuse, or read, but never allocate.
func TestHostileLengths(t *testing.T) {
	max := strings.Repeat("ff", 8)
	for name, tc := range map[string]struct {
		bytes     string
		malformed bool
		message   bool
	}{
		"frame, endless":         {max, true, true},
		"frame over the limit":   {"0000000020000001", true, true},
		"frame at the limit":     {"0000000020000000 0808", false, true},
		"full, endless":          {"02" + max, true, false},
		"full at the limit":      {"02 0000000020000000", false, false},
		"entries, endless":       {"01" + max, true, false},
		"entries at the limit":   {"01 0000000000100000 0000000000000000", false, false},
		"entry, endless":         {"01 0000000000000001" + max, true, false},
		"entry at the limit":     {"01 0000000000000001 000000001fffff00", false, false},
		"entries over the limit": {"01 0000000000000002 0000000000000006 1002 1804 2200 0000000020000000", true, false},
		"unknown type":           {"03", true, false},
		"bad entry":              {"01 0000000000000001 0000000000000001 ff", true, false},
		"bad message":            {"0000000000000001 ff", true, true},
	} {
		r := bytes.NewReader(unhex(tc.bytes))
		var d decoder = &msgAppDecoder{frameReader: frameReader{r: r}}
		if tc.message {
			d = &messageDecoder{frameReader{r: r}}
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		m, err := d.decode()
		runtime.ReadMemStats(&after)
		if m != nil || err == nil || errors.Is(err, errFrame) != tc.malformed || err == io.EOF {
			t.Errorf("%s: %v %v", name, m, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
			t.Errorf("%s: %d bytes allocated for %d received", name, n, len(tc.bytes)/2)
		}
	}
}

// TestManyElements: lists of many small elements take far more memory than they have bytes. They are refused before they take it.
func TestManyElements(t *testing.T) {
	field := func(number protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), b)
	}
	entries := bytes.Repeat([]byte{0x3a, 0}, maxEntries+1)
	nested := []byte(nil)
	for range maxNesting {
		nested = field(14, nested)
	}
	for name, b := range map[string][]byte{
		"entries":       entries,
		"responses":     bytes.Repeat([]byte{0x72, 0}, maxEntries+1),
		"in a response": field(14, entries),
		"voters":        field(9, field(2, field(1, bytes.Repeat([]byte{8, 1}, maxEntries+1)))),
		"packed voters": field(9, field(2, field(1, field(1, make([]byte, maxEntries+1))))),
		"deep":          append(make([]byte, 0, maxEntries), append(nested, field(12, make([]byte, maxEntries))...)...),
		"cut":           append(field(12, make([]byte, maxEntries)), 0x3a),
	} {
		for _, of := range []struct {
			head string
			d    func(frameReader) decoder
		}{
			{"", func(f frameReader) decoder { return &messageDecoder{f} }},
			{"\x02", func(f frameReader) decoder { return &msgAppDecoder{frameReader: f} }},
		} {
			frame := append(binary.BigEndian.AppendUint64([]byte(of.head), uint64(len(b))), b...)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			m, err := of.d(frameReader{r: bytes.NewReader(frame)}).decode()
			runtime.ReadMemStats(&after)
			if m != nil || !errors.Is(err, errFrame) {
				t.Errorf("%s: %v", name, err)
			}
			if n := int(after.TotalAlloc - before.TotalAlloc); n > 5*len(b) { // the frame, as its buffer grows
				t.Errorf("%s: %d bytes allocated for %d received", name, n, len(b))
			}
		}
	}
	for _, c := range []struct {
		m    *raftpb.Message
		want int
	}{
		{&raftpb.Message{}, 0}, {msgApp(1, 2, 3, 4, 5, 6), 5}, {msgSnap(1, 2), 2},
	} {
		b, err := proto.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := countElements(b, c.m); n != c.want || err != nil {
			t.Errorf("%v has %d elements, %v", c.m, n, err)
		}
	}
}

func TestWholeMsgApp(t *testing.T) {
	e := &msgAppEncoder{}
	full, _ := e.append(nil, msgApp(1, 2, 3, 4, 2, 5))
	compact, _ := e.append(nil, msgApp(1, 2, 3, 6, 2, 5))
	if full[0] != msgAppFull || compact[0] != msgAppCompact {
		t.Fatal(full[0], compact[0])
	}
	for _, b := range [][]byte{full, compact} {
		for n := range b {
			if wholeMsgApp(b[:n]) {
				t.Fatalf("%x is whole at %d", b, n)
			}
		}
		if !wholeMsgApp(b) || !wholeMsgApp(append(b, 1)) {
			t.Fatalf("%x is not whole", b)
		}
	}
	if !wholeMsgApp([]byte{0}) || wholeMsgApp(unhex("01 ffffffffffffffff 00")) {
		t.Fatal("link heartbeat, endless")
	}
}

// FuzzMsgApp: what is decoded encodes to bytes that decode to the same, and a frame that is called whole never waits.
func FuzzMsgApp(f *testing.F) {
	e := &msgAppEncoder{}
	b, _ := e.append(nil, msgApp(1, 2, 3, 4, 2, 5))
	b, _ = e.append(b, msgApp(1, 2, 3, 6, 1, 5))
	b, _ = e.append(b, nil)
	f.Add(b)
	f.Add(unhex("01 0000000000000001 0000000000000006 1002 1804 2200 0000000000000007"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		d := &msgAppDecoder{frameReader: frameReader{r: r}, local: 2, remote: 1}
		e, again := &msgAppEncoder{}, []byte(nil)
		var msgs []*raftpb.Message
		for {
			whole := wholeMsgApp(b[len(b)-r.Len():])
			m, err := d.decode()
			if whole && (err == io.EOF || err == io.ErrUnexpectedEOF) {
				t.Fatal("a whole frame was not")
			}
			if err != nil {
				break
			}
			if msgs = append(msgs, m); m != nil {
				if again, err = e.append(again, m); err != nil {
					t.Fatal(err)
				}
			}
		}
		d = &msgAppDecoder{frameReader: frameReader{r: bytes.NewReader(again)}, local: 2, remote: 1}
		for _, m := range msgs {
			if m == nil {
				continue
			}
			got, err := d.decode()
			if err != nil {
				t.Fatal(err)
			}
			// The compact form carries no more than this.
			if got.GetIndex() != m.GetIndex() || got.GetTerm() != m.GetTerm() || got.GetLogTerm() != m.GetLogTerm() ||
				got.GetCommit() != m.GetCommit() || len(got.Entries) != len(m.Entries) {
				t.Fatalf("%v, want %v", got, m)
			}
		}
	})
}

// FuzzMessage: what is decoded encodes to what decodes to the same.
func FuzzMessage(f *testing.F) {
	b, _ := messageEncoder{}.append(nil, msgApp(1, 2, 3, 4, 2, 5))
	b, _ = messageEncoder{}.append(b, nil)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		d := &messageDecoder{frameReader{r: bytes.NewReader(b)}}
		for {
			m, err := d.decode()
			if err != nil {
				return
			}
			if m == nil {
				continue
			}
			again, err := messageEncoder{}.append(nil, m)
			if err != nil {
				t.Fatal(err)
			}
			got, err := (&messageDecoder{frameReader{r: bytes.NewReader(again)}}).decode()
			if err != nil || !proto.Equal(got, m) {
				t.Fatalf("%v %v, want %v", got, err, m)
			}
		}
	})
}

// FuzzSnapshotMessage: the head of a snapshot.
func FuzzSnapshotMessage(f *testing.F) {
	b, _ := appendMessage(nil, message(raftpb.MsgSnap, 1, 2))
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, native, err := readSnapshotMessage((&bodies{limit: maxBodies}).share(), bytes.NewReader(b))
		if err == nil && (m == nil || native != (b[0] >= 0x80)) {
			t.Fatal(m, native)
		}
	})
}

func TestCheckURLs(t *testing.T) {
	for _, tc := range []struct {
		url string
		ok  bool
	}{
		{"http://a:1", true}, {"https://[::1]:2380", true}, {" http://a:1 ", true}, {"unix://localhost:2380", true}, {"unixs:///tmp/x", true},
		{"", false}, {"a:1", false}, {"http://a", false}, {"http://:1", false}, {"http://a:1/", false}, {"http://a:1/x", false},
		{"ftp://a:1", false}, {"http://u@a:1", false}, {"http://a:1?x", false}, {"http://a:b", false},
	} {
		good, err := checkURLs([]string{"http://first:1", tc.url})
		if (err == nil) != tc.ok || len(good) != map[bool]int{true: 2, false: 1}[tc.ok] {
			t.Errorf("%q: %q %v", tc.url, good, err)
		}
	}
}
