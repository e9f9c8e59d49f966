package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/bench/wire"
)

// renewEvery is how often a token is replaced: servers let them die after five minutes.
const renewEvery = time.Minute

// runner has the connections of one run and what they have in common.
type runner struct {
	o         *options
	ctx       context.Context // of the whole run, cleaning up included
	endpoints []endpoint
	tls       *tls.Config
	base      time.Time
	lanes     []*lane
	progress  *progress
	claimed   bool          // the prefix is ours
	leases    []int64       // asked for in this run
	failed    chan struct{} // closed when the run cannot go on

	mu      sync.Mutex
	err     error // why
	token   string
	conns   map[*wire.Conn]bool
	gone    [2]int64 // bytes sent and received by connections that have ended
	version string
}

func newRunner(ctx context.Context, o *options, p *progress) (*runner, error) {
	r := &runner{o: o, ctx: ctx, base: time.Now(), progress: p, failed: make(chan struct{}), conns: make(map[*wire.Conn]bool)}
	for _, s := range o.endpoints {
		e, err := parseEndpoint(s, o.tls())
		if err != nil {
			return nil, err
		}
		r.endpoints = append(r.endpoints, e)
	}
	var err error
	if r.tls, err = o.tlsConfig(); err != nil {
		return nil, err
	}
	return r, nil
}

// now is the time since the run began; it costs less than time.Now.
func (r *runner) now() int64 { return int64(time.Since(r.base)) }

// connect logs in and makes all connections.
func (r *runner) connect(ctx context.Context) error {
	lanes := r.o.connections
	if r.o.writers > 0 {
		lanes = r.o.writers // the others watch
	}
	for i := range max(lanes, len(r.endpoints)) { // every endpoint is tried, so that a wrong one is told at once
		l := &lane{r: r, index: i}
		if i >= lanes {
			c, err := r.dial(ctx, r.endpoints[i], nil)
			if err != nil {
				return err
			}
			c.Close()
			continue
		}
		if err := l.connect(ctx); err != nil {
			return err
		}
		r.lanes = append(r.lanes, l)
		if i == 0 {
			if err := r.login(ctx); err != nil {
				return err
			}
		}
	}
	if answer, err := r.do(ctx, api.Status, nil); err == nil { // an ordinary user may not be allowed to ask
		r.version, _ = api.VersionOf(answer) // or it is not known
	}
	return nil
}

// dial makes a connection; lost, if not nil, is told of its end.
func (r *runner) dial(ctx context.Context, e endpoint, lost func(error)) (*wire.Conn, error) {
	var c *wire.Conn
	known := make(chan struct{})
	ended := func(err error) {
		<-known
		if c == nil {
			return // it was never made
		}
		sent, received := c.Bytes()
		r.mu.Lock()
		delete(r.conns, c)
		r.gone[0] += sent
		r.gone[1] += received
		r.mu.Unlock()
		if lost != nil {
			lost(err)
		}
	}
	o := wire.Options{Within: r.o.dialTimeout, OnClose: func(err error) { go ended(err) }}
	if e.secure {
		o.TLS = r.tls
	}
	made, err := wire.Dial(ctx, e.network, e.address, o)
	if err != nil {
		close(known)
		hint := ""
		if !e.secure && strings.Contains(err.Error(), "says nothing") || strings.Contains(err.Error(), "EOF") {
			hint = "; if it wants TLS, give https:// and --cacert"
		}
		return nil, fmt.Errorf("cannot connect to endpoint %s: %w%s", e.name, err, hint)
	}
	r.mu.Lock()
	c = made
	r.conns[c] = true
	if r.token != "" {
		c.SetField("token", r.token)
	}
	r.mu.Unlock()
	close(known)
	return c, nil
}

// bytes are those of all connections.
func (r *runner) bytes() (sent, received int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	sent, received = r.gone[0], r.gone[1]
	for c := range r.conns {
		s, v := c.Bytes()
		sent, received = sent+s, received+v
	}
	return sent, received
}

// login gets a token, if there is a user, and has it renewed.
func (r *runner) login(ctx context.Context) error {
	if r.o.user == "" {
		return nil
	}
	if err := r.authenticate(ctx); err != nil {
		return fmt.Errorf("cannot log in: %w", err)
	}
	go func() {
		renew := time.NewTicker(renewEvery)
		defer renew.Stop()
		for {
			select {
			case <-r.ctx.Done():
				return
			case <-renew.C:
				_ = r.authenticate(r.ctx) // should it fail, calls will tell
			}
		}
	}()
	return nil
}

func (r *runner) authenticate(ctx context.Context) error {
	name, password := r.o.credentials()
	answer, err := r.do(ctx, api.Authenticate, api.AppendAuthenticate(nil, name, password))
	if err != nil {
		return err
	}
	token, err := api.TokenOf(answer)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.token = token
	for c := range r.conns {
		c.SetField("token", token)
	}
	return nil
}

// do makes one call that is not part of the load, on any connection.
func (r *runner) do(ctx context.Context, method string, request []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, r.o.timeout)
	defer cancel()
	for _, l := range r.lanes {
		l.mu.Lock()
		c := l.conn
		l.mu.Unlock()
		if c != nil {
			answer, err := c.Do(ctx, method, request)
			return answer, explain(err)
		}
	}
	return nil, errors.New("no connection is left")
}

// explain adds the cure to errors that have one.
func explain(err error) error {
	var e *wire.Error
	if !errors.As(err, &e) {
		return err
	}
	switch {
	case e.Code == codes.InvalidArgument && strings.Contains(e.Message, "user name is empty"),
		e.Code == codes.InvalidArgument && strings.Contains(e.Message, "authentication is not enabled"):
		if strings.Contains(e.Message, "empty") {
			return fmt.Errorf("%w: the cluster demands users; give --user", err)
		}
		return fmt.Errorf("%w: leave out --user", err)
	case e.Code == codes.PermissionDenied:
		return fmt.Errorf("%w: the user needs a role with read and write permission on --prefix", err)
	}
	return err
}

// fail ends the run.
func (r *runner) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
		close(r.failed)
	}
}

func (r *runner) failure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *runner) close() {
	for _, l := range r.lanes {
		l.close()
	}
}

// hasRangeStream tells if the server has that method.
func (r *runner) hasRangeStream(ctx context.Context) error {
	_, err := r.do(ctx, api.RangeStream, api.AppendRange(nil, r.o.markerKey(), api.RangeOptions{}))
	var e *wire.Error
	if errors.As(err, &e) && e.Code == codes.Unimplemented {
		return fmt.Errorf("this server (version %s) has no RangeStream, which etcd has from 3.7 on: use list (%w)", r.version, err)
	}
	return err
}
