package peer

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// ClientOptions configure a Client. Zero values mean the defaults named.
type ClientOptions struct {
	TLS *tls.Config // nil trusts the system's roots
	// ClusterID, if not 0, must be that of the members asked.
	ClusterID uint64
	// Engram is this member's own version, said with each request.
	Engram string

	DialTimeout    time.Duration // default 2s
	RequestTimeout time.Duration // of one call at one URL; default 7s
}

// Client asks other members, without being one. Where a call takes URLs they are of one member and are tried in turn until one
// answers; the errors are those of this package where one fits. Safe for concurrent use.
type Client struct {
	opts ClientOptions
	http *http.Client
}

// NewClient makes a Client; it dials when asked to call.
func NewClient(o ClientOptions) *Client {
	o.DialTimeout = cmp.Or(o.DialTimeout, 2*time.Second)
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 7*time.Second)
	return &Client{o, dialing{o.TLS, o.DialTimeout, 0, 5 * time.Second, 2}.httpClient()}
}

// Close closes the connections that are idle.
func (c *Client) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

// hashWithin is how long a member may take to read all of its store.
const hashWithin = 10 * time.Minute

const (
	maxAnswer      = 16 << 20
	maxLeaseAnswer = 100 << 20 // it may list all keys of a lease
)

// question is one request that is put to one URL after the other.
type question struct {
	method, path string
	headers      map[string]string
	body         []byte
	limit        int64         // of the answer
	within       time.Duration // of one call at one URL; 0 is ClientOptions.RequestTimeout
}

// ask returns the body and the headers of the first 200. A refusal that says why is final; anything else moves on to the next URL.
func (c *Client) ask(ctx context.Context, urls []string, q question) (body []byte, h http.Header, err error) {
	if len(urls) == 0 {
		return nil, nil, fmt.Errorf("%s %s: the member has no peer URLs", q.method, q.path)
	}
	var errs []error
	for _, u := range urls {
		body, h, err := c.askOne(ctx, u, q)
		if err == nil {
			return body, h, nil
		}
		err = fmt.Errorf("%s %s at %s: %w", q.method, q.path, u, err)
		if slices.ContainsFunc(refusals, func(known error) bool { return errors.Is(err, known) }) {
			return nil, nil, err
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	return nil, nil, errors.Join(errs...)
}

// refusals are told apart by their text. Those that speak for the member end the asking.
var refusals = []error{ErrLeaseNotFound, ErrNotPrimary, ErrNotCaughtUp, ErrMemberNotFound, ErrNotLearner, ErrLearnerNotReady,
	ErrFutureRevision, ErrCompacted}

func (c *Client) askOne(ctx context.Context, u string, q question) ([]byte, http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(q.within, c.opts.RequestTimeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, q.method, target(u, q.path), bytes.NewReader(q.body))
	if err != nil {
		return nil, nil, err
	}
	for name, value := range q.headers {
		req.Header.Set(name, value)
	}
	if c.opts.Engram != "" {
		req.Header.Set(engramHeader, c.opts.Engram)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	if got := resp.Header.Get(clusterHeader); c.opts.ClusterID != 0 && got != "" && got != hexID(c.opts.ClusterID) {
		return nil, nil, fmt.Errorf("%w: the member answering is of %s, not of %x", ErrClusterMismatch, got, c.opts.ClusterID)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, refusal(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, q.limit+1))
	if err == nil && int64(len(body)) > q.limit {
		err = fmt.Errorf("the answer has more than %d bytes", q.limit)
	}
	return body, resp.Header, err
}

// refusal makes an answer that is not 200 the error it stands for.
func refusal(resp *http.Response) error {
	err := answerError(resp)
	var status *statusError
	if errors.As(err, &status) {
		for _, known := range refusals {
			if status.body == known.Error() {
				return fmt.Errorf("status %d: %w", status.status, known)
			}
		}
		if status.status == http.StatusRequestTimeout {
			return fmt.Errorf("%w: %w", err, ErrNotCaughtUp)
		}
	}
	return err
}

// Members returns the members that the member at url knows, and the ID of its cluster.
func (c *Client) Members(ctx context.Context, url string) (clusterID uint64, members []Member, err error) {
	body, h, err := c.ask(ctx, []string{url}, question{method: http.MethodGet, path: "/members", limit: maxAnswer})
	if err != nil {
		return 0, nil, err
	}
	if clusterID, err = parseHex(h.Get(clusterHeader)); err != nil {
		return 0, nil, fmt.Errorf("GET /members at %s: header %s: %w", url, clusterHeader, err)
	}
	if err := json.Unmarshal(body, &members); err != nil {
		return 0, nil, fmt.Errorf("GET /members at %s: %w", url, err)
	}
	return clusterID, members, nil
}

// Version returns the member's versions.
func (c *Client) Version(ctx context.Context, urls []string) (v Versions, err error) {
	body, _, err := c.ask(ctx, urls, question{method: http.MethodGet, path: "/version", limit: maxAnswer})
	if err == nil {
		err = json.Unmarshal(body, &v)
	}
	return v, err
}

// DowngradeEnabled tells if the cluster is being downgraded.
func (c *Client) DowngradeEnabled(ctx context.Context, urls []string) (bool, error) {
	body, _, err := c.ask(ctx, urls, question{method: http.MethodGet, path: "/downgrade/enabled", limit: maxAnswer})
	if err != nil {
		return false, err
	}
	return strconv.ParseBool(strings.TrimSpace(string(body)))
}

// Promote asks the leader to make a learner a voter in the name of the client's token, and returns the members after it.
func (c *Client) Promote(ctx context.Context, urls []string, id uint64, token string) (members []Member, err error) {
	q := question{method: http.MethodPost, path: "/members/promote/" + strconv.FormatUint(id, 10), limit: maxAnswer}
	if token != "" {
		q.headers = map[string]string{"Authorization": token}
	}
	body, _, err := c.ask(ctx, urls, q)
	if err == nil {
		err = json.Unmarshal(body, &members)
	}
	return members, err
}

// HashKV returns the member's hash of its keys at revision; 0 is its latest. It takes as long as reading the store does.
func (c *Client) HashKV(ctx context.Context, urls []string, revision int64) (HashKV, error) {
	body, err := json.Marshal(hashRequest{revision})
	if err != nil {
		return HashKV{}, err
	}
	q := question{method: http.MethodGet, path: "/members/hashkv", body: body, limit: maxAnswer, within: hashWithin,
		headers: map[string]string{"Content-Type": "application/json"}}
	if c.opts.ClusterID != 0 {
		q.headers[clusterHeader] = hexID(c.opts.ClusterID)
	}
	if body, _, err = c.ask(ctx, urls, q); err != nil {
		return HashKV{}, err
	}
	var a hashAnswer
	if err := json.Unmarshal(body, &a); err != nil {
		return HashKV{}, err
	}
	if a.Header == nil {
		return HashKV{}, errors.New("GET /members/hashkv: the answer has no header")
	}
	return HashKV{Revision: a.Header.Revision, Hash: a.Hash, CompactRevision: a.CompactRevision, HashRevision: a.HashRevision}, nil
}

// RenewLease keeps a lease alive at the leader and returns its time to live in seconds.
func (c *Client) RenewLease(ctx context.Context, urls []string, id int64) (ttl int64, err error) {
	body, err := proto.Marshal(&pb.LeaseKeepAliveRequest{ID: id})
	if err != nil {
		return 0, err
	}
	if body, err = c.askLeases(ctx, urls, "/leases", body); err != nil {
		return 0, err
	}
	a := &pb.LeaseKeepAliveResponse{}
	if err := proto.Unmarshal(body, a); err != nil {
		return 0, err
	}
	if a.GetID() != id {
		return 0, fmt.Errorf("POST /leases: asked for lease %x, the answer is for %x", id, a.GetID())
	}
	return a.GetTTL(), nil
}

// LeaseTimeToLive asks the leader for a lease, and for its keys if keys is set.
func (c *Client) LeaseTimeToLive(ctx context.Context, urls []string, id int64, keys bool) (LeaseTTL, error) {
	body, err := wrap(&pb.LeaseTimeToLiveRequest{ID: id, Keys: keys})
	if err != nil {
		return LeaseTTL{}, err
	}
	if body, err = c.askLeases(ctx, urls, "/leases/internal", body); err != nil {
		return LeaseTTL{}, err
	}
	a := &pb.LeaseTimeToLiveResponse{}
	if err := unwrap(body, a); err != nil {
		return LeaseTTL{}, fmt.Errorf("POST /leases/internal: %w", err)
	}
	if a.GetID() != id {
		return LeaseTTL{}, fmt.Errorf("POST /leases/internal: asked for lease %x, the answer is for %x", id, a.GetID())
	}
	return LeaseTTL{ID: id, TTL: a.GetTTL(), GrantedTTL: a.GetGrantedTTL(), Keys: a.GetKeys()}, nil
}

func (c *Client) askLeases(ctx context.Context, urls []string, path string, body []byte) ([]byte, error) {
	answer, _, err := c.ask(ctx, urls, question{method: http.MethodPost, path: path, body: body, limit: maxLeaseAnswer,
		headers: map[string]string{"Content-Type": "application/protobuf"}})
	return answer, err
}
