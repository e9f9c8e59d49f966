package wire

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// TestHeaderWriter decodes what is written as a server would, whatever it says of its table and however metadata change meanwhile.
func TestHeaderWriter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	methods := []string{"/a/A", "/a/B", "/b/" + strings.Repeat("long", 200), "/c/" + strings.Repeat("longer", 5000)}
	var got []hpack.HeaderField
	dec := hpack.NewDecoder(4096, func(f hpack.HeaderField) { got = append(got, f) })
	w := newHeaderWriter("http", "host:1")
	for i := range 5000 {
		switch rng.IntN(20) {
		case 0:
			w.set("token", strings.Repeat("t", rng.IntN(100)))
		case 1:
			size := uint32([]int{0, 100, 4096, 1 << 20}[rng.IntN(4)])
			w.limitTable(size)
			dec.SetAllowedMaxDynamicTableSize(size)
		}
		method := methods[rng.IntN(len(methods))]
		frames := w.append(nil, 7, method, frameMax)
		got = got[:0]
		for first := true; len(frames) > 0; first = false {
			n := int(frames[0])<<16 | int(frames[1])<<8 | int(frames[2])
			kind, flags := http2.FrameType(frames[3]), http2.Flags(frames[4])
			last := len(frames) == frameHeader+n
			if n > frameMax || (kind == http2.FrameHeaders) != first || flags.Has(http2.FlagHeadersEndHeaders) != last {
				t.Fatalf("call %d: %v frame of %d bytes, flags %#x", i, kind, n, flags)
			}
			if _, err := dec.Write(frames[frameHeader : frameHeader+n]); err != nil {
				t.Fatalf("call %d: %v", i, err)
			}
			frames = frames[frameHeader+n:]
		}
		if err := dec.Close(); err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
		want := slices.Clone(w.fields)
		want[pathField].Value = method
		if !slices.Equal(got, want) {
			t.Fatalf("call %d: got %v, want %v", i, got, want)
		}
	}
}

// TestHeaderReader reads what servers write, whether their fields go into the table or not, with the answers that are remembered.
func TestHeaderReader(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var out sliceWriter
	enc := hpack.NewEncoder(&out)
	r := newHeaderReader()
	for i := range 5000 {
		message := strings.Repeat("m", rng.IntN(4)*rng.IntN(100))
		want := response{http: "200", contentType: "application/grpc", code: -1}
		fields := []hpack.HeaderField{{Name: ":status", Value: "200"}, {Name: "content-type", Value: "application/grpc"}}
		if rng.IntN(2) == 0 {
			code := rng.IntN(17)
			want = response{code: code, message: message}
			fields = []hpack.HeaderField{{Name: "grpc-status", Value: string(rune('0' + code%10))}, {Name: "grpc-message", Value: message, Sensitive: rng.IntN(2) == 0}}
			want.code = code % 10
		}
		if rng.IntN(100) == 0 {
			enc.SetMaxDynamicTableSize(uint32(rng.IntN(4096)))
		}
		out = out[:0]
		for _, f := range fields {
			if err := enc.WriteField(f); err != nil {
				t.Fatal(err)
			}
		}
		got, err := r.read(out)
		if err != nil || *got != want {
			t.Fatalf("block %d: got %+v, %v; want %+v", i, got, err, want)
		}
	}
	for _, bad := range [][]byte{{0x80}, {0xff}, {0x40}, {0x00, 0x05, 'a'}} {
		if got, err := newHeaderReader().read(bad); err == nil {
			t.Errorf("%x is read as %+v", bad, got)
		}
	}
}

// TestLeavesTable: only what a decoder does not add is said to leave its table.
func TestLeavesTable(t *testing.T) {
	for block, want := range map[string]bool{
		"":                                 true,
		"\x88":                             true,  // :status 200
		"\x88\x40\x01a\x01b":               false, // a literal that is added
		"\x00\x01a\x01b\x88":               true,  // one that is not
		"\x10\x01a\x01b":                   true,  // one that never is
		"\x0f\x11\x01b":                    true,  // with an indexed name
		"\x20":                             false, // a size of the table
		"\xff":                             false, // cut
		"\x00\x01a":                        false,
		"\x00\x7f\xff\xff\xff":             false,
		"\xff\x80\x80\x80\x80\x80\x80\x01": false,
	} {
		if got := leavesTable([]byte(block)); got != want {
			t.Errorf("%x: %t", block, got)
		}
	}
}

type sliceWriter []byte

func (s *sliceWriter) Write(p []byte) (int, error) { *s = append(*s, p...); return len(p), nil }
