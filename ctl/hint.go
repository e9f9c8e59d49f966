package ctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// hintWithin bounds the look at an endpoint after a command failed.
const hintWithin = time.Second

// hint says in a line why nobody answered, "" if that is not what failed or
// nothing can be said. It knocks at the first endpoint.
func (t *tool) hint(err error) string {
	code := status.Code(err)
	if !errors.Is(err, context.DeadlineExceeded) && code != codes.DeadlineExceeded && code != codes.Unavailable || len(t.global.endpoints) == 0 {
		return ""
	}
	endpoint := t.global.endpoints[0]
	address := endpoint
	if _, rest, ok := strings.Cut(endpoint, "://"); ok {
		address = rest
	}
	if strings.HasPrefix(endpoint, "unix") {
		return ""
	}
	conn, dialErr := net.DialTimeout("tcp", address, hintWithin)
	if conn != nil {
		_ = conn.Close()
	}
	switch {
	case errors.Is(dialErr, syscall.ECONNREFUSED):
		return fmt.Sprintf("nothing listens at %s: is a member running there? `engram` starts one; --endpoints names another", address)
	case dialErr != nil:
		return fmt.Sprintf("%s cannot be reached: %v", address, dialErr)
	case strings.HasPrefix(endpoint, "https://"):
		return fmt.Sprintf("somebody listens at %s: if that is a member without TLS, use http://", address)
	}
	return ""
}

// later are the groups of etcdctl that this version has not.
var later = map[string]string{
	"snapshot": "snapshots", "user": "authentication", "role": "authentication", "auth": "authentication",
	"move-leader": "clusters", "downgrade": "clusters", "make-mirror": "mirroring", "check": "load checks",
}

// laterHint says that a command is etcdctl's and not here yet, "" if it is
// neither.
func laterHint(args []string) string {
	for _, a := range args {
		if strings.HasPrefix(a, "-") {
			continue
		}
		if what := later[a]; what != "" {
			return fmt.Sprintf("%s: this version has no %s yet, see docs/compatibility.md", a, what)
		}
		return ""
	}
	return ""
}
