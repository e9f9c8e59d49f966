package conformance

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"

	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/authority"
)

const (
	caseVariable      = "CONFORMANCE_CASE"
	authorityVariable = "CONFORMANCE_AUTHORITY" // directory of an authority; empty: in cleartext
	gzipVariable      = "CONFORMANCE_GZIP"      // not empty: messages are compressed
	oracleVariable    = "CONFORMANCE_ORACLE"    // not empty: grpc-go's own server, which shows faults of the tests

	interopWithin = time.Minute

	// hasty is the case whose calls have a millisecond. It fails where a busy machine does not let its parts run in that, so it runs alone, and a
	// few times if need be: what is wrong with a server is so each time.
	hasty, hastyTries = "timeout_on_sleeping_server", 5
)

// interopCase runs a case, and ends the process if it fails.
type interopCase func(context.Context, *grpc.ClientConn, ...grpc.CallOption)

// interopCases are those that do not ask for a Google account or for load reports.
func interopCases() map[string]interopCase {
	return map[string]interopCase{
		"empty_unary":                 of(interop.DoEmptyUnaryCall),
		"large_unary":                 of(interop.DoLargeUnaryCall),
		"client_streaming":            of(interop.DoClientStreaming),
		"server_streaming":            of(interop.DoServerStreaming),
		"ping_pong":                   of(interop.DoPingPong),
		"empty_stream":                of(interop.DoEmptyStream),
		hasty:                         of(interop.DoTimeoutOnSleepingServer),
		"cancel_after_begin":          of(interop.DoCancelAfterBegin),
		"cancel_after_first_response": of(interop.DoCancelAfterFirstResponse),
		"custom_metadata":             of(interop.DoCustomMetadata),
		"status_code_and_message":     of(interop.DoStatusCodeAndMessage),
		"special_status_message":      of(interop.DoSpecialStatusMessage),
		"unimplemented_method": func(ctx context.Context, cc *grpc.ClientConn, _ ...grpc.CallOption) {
			interop.DoUnimplementedMethod(ctx, cc)
		},
		"unimplemented_service": func(ctx context.Context, cc *grpc.ClientConn, _ ...grpc.CallOption) {
			interop.DoUnimplementedService(ctx, testgrpc.NewUnimplementedServiceClient(cc))
		},
		"soak":       soak,
		"everything": everything,
	}
}

func of(f func(context.Context, testgrpc.TestServiceClient, ...grpc.CallOption)) interopCase {
	return func(ctx context.Context, cc *grpc.ClientConn, o ...grpc.CallOption) {
		f(ctx, testgrpc.NewTestServiceClient(cc), o...)
	}
}

// soak keeps many calls with large messages on their way at the same time.
func soak(ctx context.Context, cc *grpc.ClientConn, _ ...grpc.CallOption) {
	iterations := 200
	if member.Long() {
		iterations = 2000
	}
	interop.DoSoakTest(ctx, interop.SoakTestConfig{
		RequestSize: 271828, ResponseSize: 314159, NumWorkers: 20, Iterations: iterations,
		PerIterationMaxAcceptableLatency: 10 * time.Second, OverallTimeout: interopWithin,
		ChannelForTest: func() (*grpc.ClientConn, func()) { return cc, func() {} },
	})
}

// everything runs all other cases many times at once on one connection.
func everything(ctx context.Context, cc *grpc.ClientConn, o ...grpc.CallOption) {
	callers, rounds := 16, 2
	if member.Long() {
		rounds = 10
	}
	var work sync.WaitGroup
	for caller := range callers {
		work.Go(func() {
			cases := interopCases()
			names := slices.Sorted(maps.Keys(cases))
			for round := range rounds {
				for i := range names {
					name := names[(i+caller+round)%len(names)]
					switch name {
					case "soak", "everything", hasty:
					default:
						cases[name](ctx, cc, o...)
					}
				}
			}
		})
	}
	work.Wait()
}

// TestInterop runs the interop cases of grpc-go against its own test service on our server: services that are registered
// as generated code does it.
func TestInterop(t *testing.T) {
	dir := t.TempDir()
	a, err := authority.New(dir)
	must(t, err)
	clear, secure := serveInterop(t, a)
	for _, over := range []struct{ name, address, authority, gzip string }{
		{"cleartext", clear, "", ""},
		{"cleartext gzip", clear, "", "yes"},
		{"tls", secure, a.File, ""},
	} {
		for name := range interopCases() {
			t.Run(over.name+"/"+name, func(t *testing.T) {
				tries := hastyTries
				if name != hasty {
					t.Parallel()
					tries = 1
				}
				for try := 1; ; try++ {
					cmd := part(t, "interop", caseVariable+"="+name, targetVariable+"="+over.address,
						authorityVariable+"="+over.authority, gzipVariable+"="+over.gzip)
					text, err := cmd.CombinedOutput()
					if err == nil {
						break
					}
					if try == tries {
						t.Fatalf("%v\n%s", err, text)
					}
					t.Logf("try %d: %v\n%s", try, err, text)
				}
			})
		}
	}
}

// serveInterop serves the test service in this process and returns the addresses.
func serveInterop(t *testing.T, a *authority.Authority) (clear, secure string) {
	t.Helper()
	certFile, keyFile, err := a.Issue("server")
	must(t, err)
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	must(t, err)
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}}
	var listeners [2]net.Listener
	for i := range listeners {
		listeners[i], err = net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
	}
	var serve [2]func(net.Listener) error
	if os.Getenv(oracleVariable) != "" {
		plain, over := grpc.NewServer(), grpc.NewServer(grpc.Creds(credentials.NewTLS(cfg)))
		for i, s := range []*grpc.Server{plain, over} {
			testgrpc.RegisterTestServiceServer(s, interop.NewTestServer())
			serve[i] = s.Serve
			t.Cleanup(s.Stop)
		}
	} else {
		s := grpcserver.New(grpcserver.Options{TLS: cfg})
		testgrpc.RegisterTestServiceServer(s, interop.NewTestServer())
		serve = [2]func(net.Listener) error{s.Serve, s.ServeTLS}
		t.Cleanup(s.Stop)
	}
	for i, l := range listeners {
		go serve[i](l) // until it is stopped
	}
	return listeners[0].Addr().String(), listeners[1].Addr().String()
}

// runInterop runs one case as a client in this process. A case that fails ends it.
func runInterop() error {
	creds := insecure.NewCredentials()
	if file := os.Getenv(authorityVariable); file != "" {
		var err error
		if creds, err = credentials.NewClientTLSFromFile(file, ""); err != nil {
			return err
		}
	}
	cc, err := grpc.NewClient(os.Getenv(targetVariable), grpc.WithTransportCredentials(creds))
	if err != nil {
		return err
	}
	defer cc.Close()
	name, cases := os.Getenv(caseVariable), interopCases()
	run, ok := cases[name]
	if !ok {
		return fmt.Errorf("case %q: there are %s", name, strings.Join(slices.Sorted(maps.Keys(cases)), ", "))
	}
	var options []grpc.CallOption
	if os.Getenv(gzipVariable) != "" {
		options = append(options, grpc.UseCompressor(gzip.Name))
	}
	ctx, cancel := context.WithTimeout(context.Background(), interopWithin)
	defer cancel()
	run(ctx, cc, options...)
	return ctx.Err()
}
