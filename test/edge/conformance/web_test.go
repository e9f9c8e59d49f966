package conformance

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/engram-kv/engram/test/edge/member"
)

// TestWeb asks the port of gRPC for what is none, in every way that HTTP clients speak: probes and scrapes over TLS
// choose HTTP/2, as all common clients do when a server offers it.
func TestWeb(t *testing.T) {
	m := member.Start(t, 0)
	secure := m.ClientTLS(t, "")
	old := secure.Clone()
	old.NextProtos = []string{"http/1.1"}
	for _, c := range []struct {
		name, base, proto string
		transport         http.RoundTripper
	}{
		{"HTTP/1.1 in cleartext", "http://" + m.Clear, "HTTP/1.1", &http.Transport{}},
		{"HTTP/1.1 over TLS", "https://" + m.TLS, "HTTP/1.1", &http.Transport{TLSClientConfig: old}},
		{"HTTP/2 over TLS", "https://" + m.TLS, "HTTP/2.0", &http.Transport{TLSClientConfig: secure, ForceAttemptHTTP2: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			client := &http.Client{Transport: c.transport}
			ask := func(path, want string) {
				t.Helper()
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.base+path, nil)
				must(t, err)
				resp, err := client.Do(req)
				must(t, err)
				defer resp.Body.Close()
				text, err := io.ReadAll(resp.Body)
				must(t, err)
				if resp.StatusCode != http.StatusOK || resp.Proto != c.proto || !bytes.Contains(text, []byte(want)) {
					t.Errorf("%s: %s by %s, want 200 by %s with %q: %.300q", path, resp.Status, resp.Proto, c.proto, want, text)
				}
			}
			ask("/health", `"health":"true"`)
			ask("/version", `"etcdserver":"3.7`)
			ask("/metrics", "etcd_server_has_leader 1") // longer than a flow-control window
		})
	}
	t.Run("HTTP/2 in cleartext", func(t *testing.T) {
		// Without TLS HTTP/2 is gRPC's alone, as on a real member.
		var only http.Protocols
		only.SetUnencryptedHTTP2(true)
		client := &http.Client{Transport: &http.Transport{Protocols: &only}}
		for contentType, want := range map[string]string{"": `invalid gRPC request content-type ""`, "text/plain": `invalid gRPC request content-type "text/plain"`} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+m.Clear+"/health", nil)
			must(t, err)
			if contentType != "" {
				req.Header.Set("Content-Type", contentType)
			}
			resp, err := client.Do(req)
			must(t, err)
			resp.Body.Close()
			got := fmt.Sprint(resp.StatusCode, resp.Header["Content-Type"], resp.Header["Grpc-Status"], resp.Header["Grpc-Message"])
			if want := fmt.Sprint(http.StatusUnsupportedMediaType, []string{"application/grpc"}, []string{"3"}, []string{want}); got != want {
				t.Errorf("content type %q: %s, want %s", contentType, got, want)
			}
		}
	})
}
