package rpc

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/grpcserver"
)

func TestSlowCalls(t *testing.T) {
	var out bytes.Buffer
	now := clock.NewFake(time.Unix(100, 0))
	s := &Server{slow: &slowCalls{}, o: Options{SlowCall: time.Second, Clock: now, Logger: slog.New(slog.NewTextHandler(&out, nil))}}
	call := func(after, took time.Duration) {
		now.Advance(after)
		s.finished(grpcserver.NewCall(context.Background(), "/s/M", nil), codes.OK, took)
	}
	call(0, time.Second) // not longer
	if out.Len() > 0 {
		t.Fatalf("logged: %s", &out)
	}
	call(0, 2*time.Second)
	call(time.Millisecond, 2*time.Second) // too soon after the last line
	call(time.Minute, 2*time.Second)
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], "method=/s/M took=2s expected=1s code=OK") ||
		!strings.HasSuffix(lines[0], "not-logged=0") || !strings.HasSuffix(lines[1], "not-logged=1") {
		t.Fatalf("%q", lines)
	}
	s.o.SlowCall = 0
	call(time.Hour, time.Hour)
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Fatalf("%d lines while off", n)
	}
}
