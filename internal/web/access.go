package web

import (
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
)

// access lets only known hosts be asked for, and tells browsers which origins
// may call.
type access struct {
	origins, hosts []string // nil means all
	next           http.Handler
}

func newAccess(origins, hosts []string, next http.Handler) *access {
	return &access{origins: limits(origins), hosts: limits(hosts), next: next}
}

// limits returns nil for a list that allows all.
func limits(list []string) []string {
	if slices.Contains(list, "*") {
		return nil
	}
	return list
}

func (a *access) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// With TLS the certificate already ties the name to this server.
	if host := hostName(r.Host); r.TLS == nil && len(a.hosts) > 0 && !slices.Contains(a.hosts, host) {
		http.Error(w, fmt.Sprintf("host %q is not one of --host-whitelist; it is refused so that web pages cannot reach this server by rebinding a name of theirs (CVE-2018-5702)", host), http.StatusMisdirectedRequest)
		return
	}
	if origin := a.allowed(r.Header.Get("Origin")); origin != "" {
		h := w.Header()
		h.Set("Access-Control-Allow-Origin", origin)
		h.Set("Access-Control-Allow-Methods", "POST, GET, OPTIONS, PUT, DELETE")
		h.Set("Access-Control-Allow-Headers", "accept, content-type, authorization")
	}
	if r.Method == http.MethodOptions {
		w.WriteHeader(http.StatusOK)
		return
	}
	a.next.ServeHTTP(w, r)
}

// allowed returns what to answer a browser that calls from origin, "" if it may
// not.
func (a *access) allowed(origin string) string {
	switch {
	case len(a.origins) == 0:
		return "*"
	case origin != "" && slices.Contains(a.origins, origin):
		return origin
	}
	return ""
}

// hostName is a Host header without its port and brackets.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return strings.Trim(host, "[]")
}
