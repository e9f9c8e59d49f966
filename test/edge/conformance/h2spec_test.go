package conformance

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	"github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"

	"github.com/engram-kv/engram/test/edge/member"
)

const (
	targetVariable = "CONFORMANCE_TARGET" // host and port
	tlsVariable    = "CONFORMANCE_TLS"    // not empty: over TLS
	reportVariable = "CONFORMANCE_REPORT" // file for the outcome

	// h2spec waits this long for what shall come, and as long to see that nothing comes.
	h2specPatience = time.Second
	// What has not come by then is waited for once more, for so long: the machine may be busy.
	h2specSlow = 10 * time.Second

	h2specCases = 146 // those that it calls strict included

	// Over TLS, where what is no gRPC is answered by the web handlers, this has a body. In cleartext it is refused.
	path = "/health"
)

const passed, failed, skipped = "passed", "failed", "skipped"

// outcome is what became of one case of h2spec.
type outcome struct {
	Name    string
	Verdict string
	Why     string
}

// TestHTTP2 runs all of h2spec. A case that does not pass and is not listed fails, and so does one that is listed and passes.
func TestHTTP2(t *testing.T) {
	m := member.Start(t, 0, "--max-concurrent-streams=100") // one case needs a limit
	for _, c := range []struct {
		name, address, tls string
		exceptions         map[string]string
	}{{"cleartext", m.Clear, "", inCleartext}, {"tls", m.TLS, "yes", nil}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			report := filepath.Join(t.TempDir(), "report")
			cmd := part(t, "h2spec", targetVariable+"="+c.address, tlsVariable+"="+c.tls, reportVariable+"="+report)
			if text, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			text, err := os.ReadFile(report)
			must(t, err)
			var outcomes map[string]outcome
			must(t, json.Unmarshal(text, &outcomes))
			counts := map[string]int{}
			for _, id := range slices.Sorted(maps.Keys(outcomes)) {
				o := outcomes[id]
				counts[o.Verdict]++
				reason, listed := c.exceptions[id]
				switch {
				case o.Verdict != passed && !listed:
					t.Errorf("%s %s: %s\n%s", id, o.Verdict, o.Name, o.Why)
				case o.Verdict == passed && listed:
					t.Errorf("%s passes: %s; take it from the list of those that cannot: %s", id, o.Name, reason)
				}
			}
			for id := range c.exceptions {
				if _, ran := outcomes[id]; !ran {
					t.Errorf("%s is listed, and h2spec has no such case", id)
				}
			}
			if len(outcomes) != h2specCases {
				t.Errorf("%d cases were run, h2spec has %d", len(outcomes), h2specCases)
			}
			t.Logf("%d cases: %d passed, %d skipped, %d failed", len(outcomes), counts[passed], counts[skipped], counts[failed])
		})
	}
}

// runH2spec runs the suite in this process.
func runH2spec() error {
	host, port, err := net.SplitHostPort(os.Getenv(targetVariable))
	if err != nil {
		return err
	}
	c := config.Config{
		Host: host, Path: path, Timeout: h2specPatience, MaxHeaderLen: 4000, Strict: true,
		TLS: os.Getenv(tlsVariable) != "", Insecure: true,
	}
	if c.Port, err = strconv.Atoi(port); err != nil {
		return err
	}
	outcomes := map[string]outcome{}
	run := func(c config.Config, sections ...string) {
		c.Sections = sections
		for _, g := range []*spec.TestGroup{generic.Spec(), http2.Spec(), hpack.Spec()} {
			g.Test(&c)
			collect(g, outcomes)
		}
	}
	run(c)
	for _, id := range racing {
		for i := 1; i < racingTries && outcomes[id].Verdict != passed; i++ {
			run(c, id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(outcomes)) {
		if _, listed := inCleartext[id]; outcomes[id].Verdict == failed && (c.TLS || !listed) {
			slow := c
			slow.Timeout = h2specSlow
			run(slow, id)
		}
	}
	text, err := json.Marshal(outcomes)
	if err != nil {
		return err
	}
	return os.WriteFile(os.Getenv(reportVariable), text, 0o600)
}

func collect(g *spec.TestGroup, into map[string]outcome) {
	for i, c := range slices.Concat(g.Tests, g.StrictTests) {
		if c.Result == nil {
			continue // it was not chosen
		}
		o := outcome{Name: c.Desc, Verdict: passed}
		switch r := c.Result; {
		case r.Failed:
			o.Verdict, o.Why = failed, fmt.Sprint(r.Error)
		case r.Skipped:
			o.Verdict, o.Why = skipped, fmt.Sprint(r.Error)
		}
		into[fmt.Sprintf("%s/%d", g.ID(), i+1)] = o
	}
	for _, sub := range g.Groups {
		collect(sub, into)
	}
}

// inCleartext are the cases that do not pass in cleartext, and why they cannot. Over TLS all pass. What the cases ask for is no
// gRPC: in cleartext it is refused with 415 and without a body, as real members refuse it, and at once.
var inCleartext = map[string]string{
	"generic/2/2":   "it waits for DATA, and a refusal has no body",
	"generic/2/3":   "it waits for DATA, and a refusal has no body",
	"http2/6.5.3/1": "it measures windows by DATA, and a refusal has no body",
	"http2/6.9.1/1": "it measures windows by DATA, and a refusal has no body",
	"http2/6.9.2/1": "it measures windows by DATA, and a refusal has no body",
	"http2/6.9.2/2": "it measures windows by DATA, and a refusal has no body",
	"http2/5.1.2/1": "it fills the streams of a connection with answers that wait for a window; a refusal waits for nothing",
	"http2/3.5/2":   "what does not begin as HTTP/2 is HTTP/1.1 on this port, and is answered so with 400 before the connection ends",
}

// racing are the cases that need a stream on which the client has not ended its request, and send a wrong frame on it. When
// the answer was faster than that frame, which then comes for a stream that is over, they prove nothing: they are tried again.
var racing = []string{"http2/5.1/8", "http2/5.1/9", "http2/6.9/2", "http2/6.9.1/3", "http2/8.1/1", "http2/8.1.2.1/3", "http2/8.1.2.6/1", "http2/8.1.2.6/2"}

const racingTries = 20
