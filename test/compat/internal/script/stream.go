package script

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/wire"
)

const (
	maxWaiting = 1 << 14                // messages of one stream a script has not asked for yet
	quiet      = 150 * time.Millisecond // a stream is taken for done if nothing came for so long
)

// watch is one open watch stream. One goroutine reads it into messages.
type watch struct {
	stream   etcdserverpb.Watch_WatchClient
	cancel   context.CancelFunc
	messages chan *etcdserverpb.WatchResponse // closed at the stream's end, after err is set
	err      error
}

func openWatch(s *side, md metadata.MD) (*watch, error) {
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(context.Background(), md))
	stream, err := etcdserverpb.NewWatchClient(s.Conn()).Watch(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	w := &watch{stream: stream, cancel: cancel, messages: make(chan *etcdserverpb.WatchResponse, maxWaiting)}
	go func() {
		defer close(w.messages)
		for {
			m, err := stream.Recv()
			if err != nil {
				w.err = err
				return
			}
			w.messages <- m
		}
	}()
	return w, nil
}

func (s *side) watch(d *datadriven.TestData, lines []string) (string, error) {
	name := d.CmdArgs[0].Key
	w := s.watches[name]
	if w == nil {
		md := metadata.MD{}
		if d.HasArg("hasleader") {
			md.Set("hasleader", "true")
		}
		var err error
		if w, err = openWatch(s, md); err != nil {
			return "", err
		}
		s.watches[name] = w
	}
	for _, line := range lines {
		if line == "empty" {
			line = ""
		}
		m, err := s.parse(s.methods["Watch"], line)
		if err != nil {
			return "", err
		}
		if err := w.stream.Send(m.(*etcdserverpb.WatchRequest)); err != nil && err != io.EOF {
			return "", err
		}
	}
	if d.HasArg("half-close") {
		if err := w.stream.CloseSend(); err != nil {
			return "", err
		}
	}
	events, err := number(d, "events")
	if err != nil {
		return "", err
	}
	controls, err := number(d, "controls")
	if err != nil {
		return "", err
	}
	p := printer{side: s, bounds: d.HasArg("messages"), distinct: d.HasArg("distinct"), eventsOnly: d.HasArg("events-only")}
	timeout := time.After(callWithin)
	for p.events < events || p.controls < controls {
		select {
		case m, ok := <-w.messages:
			if !ok {
				return p.String() + streamEnd(w.err), nil
			}
			p.add(m)
		case <-timeout:
			return p.String() + fmt.Sprintf("timed out with %d events and %d other messages", p.events, p.controls), nil
		}
	}
	return p.String(), nil
}

func (s *side) watchEnd(d *datadriven.TestData) (string, error) {
	name := d.CmdArgs[0].Key
	w := s.watches[name]
	if w == nil {
		return "", fmt.Errorf("watch stream %s is not open", name)
	}
	delete(s.watches, name)
	defer w.cancel()
	p := printer{side: s, distinct: d.HasArg("distinct"), eventsOnly: d.HasArg("events-only")}
	for {
		select {
		case m, ok := <-w.messages:
			if !ok {
				return p.String() + streamEnd(w.err), nil
			}
			p.add(m)
		case <-time.After(quiet): // that nothing comes can only be waited for
			return p.String(), nil
		}
	}
}

func (s *side) keepalive(lines []string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callWithin)
	defer cancel()
	stream, err := etcdserverpb.NewLeaseClient(s.Conn()).LeaseKeepAlive(ctx)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, line := range lines {
		m, err := s.parse(s.methods["LeaseKeepAlive"], line)
		if err != nil {
			return "", err
		}
		if err := stream.Send(m.(*etcdserverpb.LeaseKeepAliveRequest)); err != nil && err != io.EOF {
			return "", err
		}
		answer, err := stream.Recv()
		if err != nil {
			return out.String() + wire.ErrorText(err), nil
		}
		out.WriteString(s.Names.Text(answer) + "\n")
	}
	if err := stream.CloseSend(); err != nil {
		return "", err
	}
	_, err = stream.Recv()
	return out.String() + streamEnd(err), nil
}

func streamEnd(err error) string {
	if errors.Is(err, io.EOF) {
		return "end: ok"
	}
	return "end: " + wire.ErrorText(err)
}

// printer gathers a stream's messages by watcher: how the messages of different watchers interleave is the server's affair,
// and, unless bounds is set, so is how many events it puts into one message.
type printer struct {
	side             *side
	bounds           bool // tell where each message of events ends
	distinct         bool // print equal lines in a row once
	eventsOnly       bool // leave out messages without events: notices of progress come by the clock
	events, controls int

	lines []printedLine
}

type printedLine struct {
	watcher int64
	text    string
}

func (p *printer) add(m *etcdserverpb.WatchResponse) {
	line := func(format string, args ...any) {
		p.lines = append(p.lines, printedLine{m.WatchId, fmt.Sprintf("watcher %d: ", m.WatchId) + fmt.Sprintf(format, args...)})
	}
	if len(m.Events) == 0 {
		p.controls++
		if p.eventsOnly {
			return
		}
		line("%s", p.side.Names.Text(m))
		return
	}
	p.events += len(m.Events)
	if p.bounds {
		bare := proto.CloneOf(m)
		bare.Events = nil
		line("%d events in a message: %s", len(m.Events), p.side.Names.Text(bare))
	} else if last := m.Events[len(m.Events)-1].Kv.ModRevision; m.Header.GetRevision() < last {
		line("header revision %d is below the event's, %d", m.Header.GetRevision(), last)
	} else if m.Created || m.Canceled {
		line("events in a control message: %s", p.side.Names.Text(m))
	}
	for _, e := range m.Events {
		line("%s", p.side.Names.Text(e))
	}
}

func (p *printer) String() string {
	slices.SortStableFunc(p.lines, func(a, b printedLine) int { return int(a.watcher - b.watcher) })
	if p.distinct {
		p.lines = slices.Compact(p.lines)
	}
	var b strings.Builder
	for _, l := range p.lines {
		b.WriteString(l.text + "\n")
	}
	return b.String()
}

// Merge joins the chunks of a RangeStream into the answer Range would give.
func Merge(chunks []proto.Message) *etcdserverpb.RangeResponse {
	whole := &etcdserverpb.RangeResponse{}
	for _, c := range chunks {
		proto.Merge(whole, c.(*etcdserverpb.RangeStreamResponse).GetRangeResponse())
	}
	return whole
}

// Chunks tells how many keys came in each chunk, and which chunks carried a header.
func Chunks(chunks []proto.Message) string {
	var parts []string
	for _, c := range chunks {
		r := c.(*etcdserverpb.RangeStreamResponse).GetRangeResponse()
		part := fmt.Sprint(len(r.GetKvs()))
		if r.GetHeader() != nil {
			part += " with header"
		}
		parts = append(parts, part)
	}
	return "chunks of " + strings.Join(parts, ", ")
}
