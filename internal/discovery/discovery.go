// Package discovery finds the members of a new cluster for those who do not know
// each other yet: in DNS SRV records (SRV), or in the registry of another etcd
// cluster where they meet (Join).
//
// It knows names and URLs, and nothing of logs or identities beyond the number
// under which a member registers. Both functions return the cluster in the form
// of --initial-cluster. Invariant: of all that meet in a registry, those whose
// Join returns get the same cluster, the first ones that registered.
package discovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/engram-kv/engram/internal/clock"
)

// Why a member cannot join by the registry. Trying again does not help.
var (
	ErrSizeNotFound = errors.New("discovery: size key not found")
	ErrBadSizeKey   = errors.New("discovery: size key is bad")
	ErrFullCluster  = errors.New("discovery: cluster is full")
	ErrSameName     = errors.New("discovery: two members have one name")
)

// Options say where the registry is. Token and Endpoints are needed.
type Options struct {
	Token                       string
	Endpoints                   []string
	DialTimeout, RequestTimeout time.Duration // default 2s and 5s
	KeepaliveTime               time.Duration
	KeepaliveTimeout            time.Duration
	Insecure, SkipVerify        bool
	CertFile, KeyFile, CAFile   string
	User, Password              string
	Clock                       clock.Clock
	Logger                      *slog.Logger
}

const (
	registry = "/_etcd/registry/"
	// maxBackoff bounds the exponent of the pause between two tries, in seconds.
	maxBackoff = 8
)

// Join registers a member and waits for the others. self is this member as
// name=url,name=url. What may pass (a registry that cannot be reached) is tried
// again until ctx ends.
func Join(ctx context.Context, o Options, id uint64, self string) (cluster string, err error) {
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.RequestTimeout == 0 {
		o.RequestTimeout = 5 * time.Second
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = 2 * time.Second
	}
	config, err := o.clientConfig()
	if err != nil {
		return "", fmt.Errorf("--discovery-cert=%s, --discovery-key=%s, --discovery-cacert=%s: %w", o.CertFile, o.KeyFile, o.CAFile, err)
	}
	for try := 1; ; try++ {
		cluster, err := o.join(ctx, config, id, self)
		if err == nil {
			return cluster, nil
		}
		for _, final := range []error{ErrSizeNotFound, ErrBadSizeKey, ErrFullCluster, ErrSameName} {
			if errors.Is(err, final) {
				return "", err
			}
		}
		wait := time.Duration(1<<min(try, maxBackoff)) * time.Second
		o.Logger.Warn("discovery failed, trying again", "endpoints", o.Endpoints, "error", err, "pause", wait)
		t := o.Clock.NewTimer(wait)
		select {
		case <-t.C():
		case <-ctx.Done():
			t.Stop()
			return "", fmt.Errorf("--discovery-endpoints=%s: %w: %w", strings.Join(o.Endpoints, ","), ctx.Err(), err)
		}
	}
}

func (o *Options) clientConfig() (clientv3.Config, error) {
	spec := &clientv3.ConfigSpec{
		Endpoints: o.Endpoints, DialTimeout: o.DialTimeout, KeepAliveTime: o.KeepaliveTime, KeepAliveTimeout: o.KeepaliveTimeout,
		Secure: &clientv3.SecureConfig{
			Cert: o.CertFile, Key: o.KeyFile, Cacert: o.CAFile, InsecureTransport: o.Insecure, InsecureSkipVerify: o.SkipVerify,
		},
	}
	if o.User != "" {
		spec.Auth = &clientv3.AuthConfig{Username: o.User, Password: o.Password}
	}
	config, err := clientv3.NewClientConfig(spec, zap.NewNop())
	if err != nil {
		return clientv3.Config{}, err
	}
	config.Logger = zap.NewNop() // failures come back as errors
	return *config, nil
}

// join is one try.
func (o *Options) join(ctx context.Context, config clientv3.Config, id uint64, self string) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	config.Context = ctx
	c, err := clientv3.New(config)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	r := meeting{o: o, c: c, prefix: registry + o.Token}
	if r.size, err = r.clusterSize(ctx); err != nil {
		return "", err
	}
	key := r.prefix + "/members/" + strconv.FormatUint(id, 16)
	members, revision, err := r.members(ctx)
	if err != nil {
		return "", err
	}
	if position(members, key) < 0 {
		if len(members) >= r.size {
			return "", r.full(key)
		}
		if err := r.register(ctx, key, self); err != nil {
			return "", err
		}
		if members, revision, err = r.members(ctx); err != nil {
			return "", err
		}
	} else if err := r.register(ctx, key, self); err != nil { // its URLs may be others than last time
		return "", err
	}
	watch := c.Watch(clientv3.WithRequireLeader(ctx), r.prefix+"/members/", clientv3.WithPrefix(), clientv3.WithRev(revision+1))
	for len(members) < r.size {
		o.Logger.Info("waiting for other members to register", "found", len(members), "size", r.size)
		w, open := <-watch
		if err := w.Err(); err != nil {
			return "", err
		}
		if !open {
			return "", errors.Join(errors.New("the watch of the registry ended"), ctx.Err())
		}
		if members, _, err = r.members(ctx); err != nil {
			return "", err
		}
	}
	// Whoever is told the cluster is told the same. Others may have been faster.
	if members, _, err = r.members(ctx); err != nil {
		return "", err
	}
	if at := position(members, key); at < 0 || at >= r.size {
		return "", r.full(key)
	}
	return r.cluster(members[:r.size])
}

// meeting is the registry of one new cluster.
type meeting struct {
	o      *Options
	c      *clientv3.Client
	prefix string
	size   int
}

func (r *meeting) timeout(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.o.RequestTimeout)
}

func (r *meeting) clusterSize(ctx context.Context) (int, error) {
	ctx, cancel := r.timeout(ctx)
	defer cancel()
	key := r.prefix + "/_config/size"
	got, err := r.c.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	if len(got.Kvs) == 0 {
		return 0, fmt.Errorf("%w: put the number of members under %s at the discovery endpoints", ErrSizeNotFound, key)
	}
	size, err := strconv.ParseInt(string(got.Kvs[0].Value), 10, 32)
	if err != nil || size <= 0 {
		return 0, fmt.Errorf("%w: %s is %q: put a number above 0 there", ErrBadSizeKey, key, got.Kvs[0].Value)
	}
	return int(size), nil
}

func (r *meeting) register(ctx context.Context, key, self string) error {
	ctx, cancel := r.timeout(ctx)
	defer cancel()
	_, err := r.c.Put(ctx, key, self)
	return err
}

// members are those that registered, in that order.
func (r *meeting) members(ctx context.Context) ([]*mvccpb.KeyValue, int64, error) {
	ctx, cancel := r.timeout(ctx)
	defer cancel()
	got, err := r.c.Get(ctx, r.prefix+"/members/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	if err != nil {
		return nil, 0, err
	}
	return got.Kvs, got.Header.Revision, nil
}

func (r *meeting) full(key string) error {
	return fmt.Errorf("%w: %d members registered under %s before %s: use another --discovery-token, or add this member to the cluster and start it with --initial-cluster-state=existing",
		ErrFullCluster, r.size, r.prefix, key)
}

// cluster is the members in the form of --initial-cluster.
func (r *meeting) cluster(members []*mvccpb.KeyValue) (string, error) {
	owner := map[string]string{}
	var parts []string
	for _, kv := range members {
		for part := range strings.SplitSeq(string(kv.Value), ",") {
			name, _, _ := strings.Cut(strings.TrimSpace(part), "=")
			if other, taken := owner[name]; taken && other != string(kv.Key) {
				return "", fmt.Errorf("%w: %q, under %s and %s: give each member a --name of its own and start anew with another --discovery-token", ErrSameName, name, other, kv.Key)
			}
			owner[name] = string(kv.Key)
		}
		parts = append(parts, string(kv.Value))
	}
	return strings.Join(parts, ","), nil
}

// position is where a key stands in the list, -1 if nowhere.
func position(members []*mvccpb.KeyValue, key string) int {
	for i, kv := range members {
		if bytes.Equal(kv.Key, []byte(key)) {
			return i
		}
	}
	return -1
}
