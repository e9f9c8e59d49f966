package edge

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/net/http2"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/race"
)

const (
	streamMethod = "/etcdserverpb.KV/RangeStream"

	memoryLimit = 1 << 30
	itemBytes   = 10 << 10
	itemsPerPut = 100
	listPrefix  = "list/"
	listWindow  = 4 << 20
	listers     = 100
	streamers   = 10

	// What streams of the whole range take, however large it is: the first fills the member's caches too.
	firstMemory, streamMemory = 128 << 20, 192 << 20

	perList = 3 * time.Second // of CPU, for a whole list in whatever share of the lists is answered
)

// items is how many keys the range has: 300 MB in the long version.
func items() int {
	if member.Long() {
		return 30_000
	}
	return 3000
}

// item is what stands under the i-th key: its number, and what is the same for all.
func item(i int) (key string, value []byte) {
	value = make([]byte, itemBytes)
	for j := 8; j < len(value); j++ {
		value[j] = byte(j * 31)
	}
	binary.BigEndian.PutUint64(value, uint64(i))
	return fmt.Sprintf("%s%06d", listPrefix, i), value
}

// TestListsOfEverything has a hundred clients ask for 300 MB at a time of a member that may have 1 GiB of memory: each gets all
// of it or is refused with ResourceExhausted, and others go on writing. As a stream, each gets all of it, in little memory.
func TestListsOfEverything(t *testing.T) {
	responses := items() * (itemBytes + 100) * 11 / 10 // one list, and some
	flags := []string{"--quota-backend-bytes=8000000000"}
	if member.Engram() {
		flags = append(flags, fmt.Sprintf("--response-bytes=%d", responses), "--memory-budget=65%")
	}
	limit := int64(memoryLimit)
	if race.On() { // whose shadow of it is several times that
		limit = 0
	}
	m := member.Start(t, limit, flags...)
	fill(t, m.Dial(t))
	b := beside(t, m)
	// A list is work for all cores at once.
	b.worstShare, b.worst = max(b.worstShare, time.Second), max(b.worst, 5*time.Second)
	for _, a := range lists() {
		t.Run(a.name, func(t *testing.T) {
			counts := b.bear(t, a)
			t.Logf("%v", counts)
			asked := a.short
			if member.Long() {
				asked = a.long
			}
			if counts[listWhole] == 0 || counts[listWhole]+counts[listRefused] != asked {
				t.Errorf("of %d lists %v, want all to be whole or refused, and some whole", asked, counts)
			}
			if counts[listRefused] > 0 && a.name != everyList {
				t.Errorf("%d streams were refused, want none", counts[listRefused])
			}
			if n := exhausted(t, m); n < counts[listRefused] {
				t.Errorf("%d calls were refused, and grpc_server_handled_total counts %d", counts[listRefused], n)
			}
		})
	}
	_, most, err := m.Memory()
	check(t, err)
	t.Logf("the member had at most %d MiB", most>>20)
	if limit > 0 && most > limit {
		t.Errorf("that is more than %d MiB", memoryLimit>>20)
	}
}

const (
	listWhole, listRefused = "whole", "refused"
	everyList, everyStream = "lists of everything", "streams of everything"
	oneStream              = "one stream of everything"
)

// exhausted is how many calls the member says to have refused with ResourceExhausted.
func exhausted(t *testing.T, m *member.Member) (n int) {
	t.Helper()
	all, err := m.Metrics(t.Context())
	check(t, err)
	for name, v := range all {
		if strings.HasPrefix(name, "grpc_server_handled_total") && strings.Contains(name, `grpc_code="ResourceExhausted"`) {
			n += int(v)
		}
	}
	return n
}

// lists are the attacks that ask for all of the range.
func lists() []attack {
	ask := func(a attack, method string) attack {
		a.once = func(dial func() (*rough, error), spend func() bool, count func(string)) error {
			if !spend() {
				return nil
			}
			r, err := dial()
			if err != nil {
				return err
			}
			defer r.Close()
			// As much ahead as a client that reads takes.
			if err := r.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: listWindow}); err != nil {
				return err
			}
			if err := r.WriteWindowUpdate(0, listWindow); err != nil {
				return err
			}
			request, err := proto.Marshal(&etcdserverpb.RangeRequest{Key: []byte(listPrefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(listPrefix))})
			if err != nil {
				return err
			}
			stream, err := r.Call(method, request)
			if err != nil {
				return err
			}
			body := r.Body(stream)
			n, err := readList(bufio.NewReaderSize(body, 64<<10), method == streamMethod)
			switch {
			case err != nil:
				return fmt.Errorf("after %d keys: %w", n, err)
			case body.end.status == "8" && n == 0: // ResourceExhausted
				count(listRefused)
			case body.end.status == "0" && n == items():
				count(listWhole)
			default:
				return fmt.Errorf("%d of %d keys, and then %v", n, items(), body.end)
			}
			return nil
		}
		return a
	}
	return []attack{ // streams first: what lists have made a member take, it uses again
		ask(attack{name: oneStream, conns: 1, short: 1, long: 1, memory: firstMemory, cpu: perList}, streamMethod),
		ask(attack{name: everyStream, conns: streamers, short: streamers, long: streamers, memory: streamMemory, cpu: perList}, streamMethod),
		ask(attack{name: everyList, conns: listers, short: listers, long: listers, memory: memoryLimit /* which the control group keeps */, cpu: perList}, rangeMethod),
	}
}

// readList reads the messages of an answer, of which each is a part of the list, until there are no more. It checks each key
// and value and returns how many there were.
func readList(r *bufio.Reader, stream bool) (n int, err error) {
	_, want := item(0)
	for {
		var head [5]byte
		if _, err := io.ReadFull(r, head[:]); err == io.EOF {
			return n, nil
		} else if err != nil {
			return n, err
		}
		message := bufio.NewReader(io.LimitReader(r, int64(binary.BigEndian.Uint32(head[1:]))))
		if stream { // the part is a field of the message, and the only one
			if _, err := message.ReadByte(); err != nil {
				return n, err
			}
			if _, err := binary.ReadUvarint(message); err != nil {
				return n, err
			}
		}
		for {
			tag, err := binary.ReadUvarint(message)
			if err == io.EOF {
				break
			} else if err != nil {
				return n, err
			}
			value, err := binary.ReadUvarint(message) // a number, or a length
			if err != nil {
				return n, err
			}
			if tag&7 == 0 {
				if field := tag >> 3; field == 4 && int(value) != items() {
					return n, broken.Errorf("the answer counts %d keys", value)
				}
				continue
			}
			field := make([]byte, value)
			if _, err := io.ReadFull(message, field); err != nil {
				return n, err
			}
			if tag>>3 != 2 {
				continue // the header
			}
			var kv mvccpb.KeyValue
			if err := proto.Unmarshal(field, &kv); err != nil {
				return n, err
			}
			binary.BigEndian.PutUint64(want, uint64(n))
			if key := fmt.Sprintf("%s%06d", listPrefix, n); string(kv.Key) != key || !bytes.Equal(kv.Value, want) {
				return n, broken.Errorf("key %q with %d bytes, want %q with its %d", kv.Key, len(kv.Value), key, len(want))
			}
			n++
		}
	}
}

// fill writes the range.
func fill(t *testing.T, client *clientv3.Client) {
	t.Helper()
	for i := 0; i < items(); i += itemsPerPut {
		var puts []clientv3.Op
		for j := i; j < i+itemsPerPut; j++ {
			key, value := item(j)
			puts = append(puts, clientv3.OpPut(key, string(value)))
		}
		_, err := client.Txn(t.Context()).Then(puts...).Commit()
		check(t, err)
	}
}
