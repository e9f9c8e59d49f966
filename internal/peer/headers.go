package peer

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-semver/semver"
)

// Headers of the protocol. Those that begin with X-Engram are ours; etcd members do not look at them.
const (
	fromHeader       = "X-Server-From"
	versionHeader    = "X-Server-Version"
	minVersionHeader = "X-Min-Cluster-Version"
	clusterHeader    = "X-Etcd-Cluster-ID"
	peerURLsHeader   = "X-PeerURLs"
	toHeader         = "X-Raft-To"
	engramHeader     = "X-Engram-Version"
	snapshotHeader   = "X-Engram-Snapshot"         // "native" for Engram's own form
	formHeader       = "X-Engram-Snapshot-Version" // of Engram's own form, as the sender of the header reads and writes it
)

// minClusterVersion is the oldest cluster that this member talks to. etcd 3.6 and 3.7 say the same.
const minClusterVersion = "3.0.0"

func hexID(id uint64) string { return strconv.FormatUint(id, 16) }

func parseHex(s string) (uint64, error) { return strconv.ParseUint(s, 16, 64) }

// requestHeaders are on all requests that carry raft's business.
func (t *Transport) requestHeaders() http.Header {
	h := http.Header{}
	h.Set(fromHeader, hexID(t.opts.MemberID))
	h.Set(versionHeader, t.opts.Version)
	h.Set(minVersionHeader, minClusterVersion)
	h.Set(clusterHeader, hexID(t.opts.ClusterID))
	t.announce(h)
	if len(t.opts.PeerURLs) > 0 {
		h.Set(peerURLsHeader, strings.Join(t.opts.PeerURLs, ","))
	}
	return h
}

// announce says that this member is an Engram, and which form of snapshots it knows beside etcd's.
func (t *Transport) announce(h http.Header) {
	if t.opts.Engram == "" {
		return
	}
	h.Set(engramHeader, t.opts.Engram)
	if t.opts.SnapshotVersion > 0 {
		h.Set(formHeader, strconv.Itoa(t.opts.SnapshotVersion))
	}
}

// version reads a version header; a missing one means the last etcd that had none.
func version(h http.Header, name string) (*semver.Version, error) {
	s := h.Get(name)
	if s == "" {
		s = "2.0.0"
	}
	return semver.NewVersion(s)
}

// compareMinor compares major and minor versions.
func compareMinor(a, b *semver.Version) int {
	if a.Major != b.Major {
		return int(max(-1, min(1, a.Major-b.Major)))
	}
	return int(max(-1, min(1, a.Minor-b.Minor)))
}

// checkVersions judges the versions that a peer's request names: each side must be new enough for the other.
func (t *Transport) checkVersions(h http.Header) error {
	theirs, err := version(h, versionHeader)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrIncompatible, versionHeader, err)
	}
	theirMin, err := version(h, minVersionHeader)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrIncompatible, minVersionHeader, err)
	}
	if compareMinor(theirs, semver.New(minClusterVersion)) < 0 || compareMinor(theirMin, t.version) > 0 {
		return fmt.Errorf("%w: peer has %v and needs %v, this member has %v and needs %v",
			ErrIncompatible, theirs, theirMin, t.version, minClusterVersion)
	}
	return nil
}

// checkStreamVersion judges the version in the answer to a stream request. An older server has streams of both kinds from 2.1 on.
func (t *Transport) checkStreamVersion(h http.Header) error {
	theirs, err := version(h, versionHeader)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrIncompatible, versionHeader, err)
	}
	if compareMinor(theirs, t.version) < 0 && compareMinor(theirs, semver.New("2.1.0")) < 0 {
		return fmt.Errorf("%w: peer has %v, which has no streams", ErrIncompatible, theirs)
	}
	return nil
}

// checkURLs returns the usable ones of urls in the order given, and what is wrong with the others.
func checkURLs(urls []string) (good []string, err error) {
	for _, s := range urls {
		s = strings.TrimSpace(s)
		u, parseErr := url.Parse(s)
		switch {
		case parseErr != nil:
			err = parseErr
		case !slices.Contains([]string{"http", "https", "unix", "unixs"}, u.Scheme):
			err = fmt.Errorf("peer URL %q: the scheme must be http, https, unix or unixs", s)
		case strings.HasPrefix(u.Scheme, "unix"): // host and path together name the socket
			good = append(good, s)
		case u.Hostname() == "" || u.Port() == "" || u.Path != "" || u.RawQuery != "" || u.User != nil:
			err = fmt.Errorf("peer URL %q must be scheme://host:port", s)
		default:
			good = append(good, s)
		}
	}
	return good, err
}
