package member

import (
	"crypto/sha1"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrBadURL says that a URL cannot be a peer's.
var ErrBadURL = errors.New("member: bad peer URL")

// FoundingID is the ID of a member that founds a cluster with others, who all
// compute it from the initial cluster's URLs and token.
func FoundingID(peerURLs []string, token string) uint64 { return hashID(peerURLs, token) }

// NewID is the ID of a member that is added to a running cluster.
func NewID(peerURLs []string, now time.Time) uint64 {
	return hashID(peerURLs, strconv.FormatInt(now.Unix(), 10))
}

func hashID(peerURLs []string, salt string) uint64 {
	sum := sha1.Sum([]byte(strings.Join(slices.Sorted(slices.Values(peerURLs)), "") + salt))
	return binary.BigEndian.Uint64(sum[:8])
}

// ClusterID is the ID of the cluster that members of these IDs found.
func ClusterID(members []uint64) uint64 {
	var b []byte
	for _, id := range slices.Sorted(slices.Values(members)) {
		b = binary.BigEndian.AppendUint64(b, id)
	}
	sum := sha1.Sum(b)
	return binary.BigEndian.Uint64(sum[:8])
}

// CheckPeerURLs refuses with ErrBadURL what would stop etcd members if it were
// applied in a membership change: no URL at all, or one that is not scheme,
// host and port alone.
func CheckPeerURLs(urls []string) error {
	if len(urls) == 0 {
		return fmt.Errorf("no peer URL given: %w", ErrBadURL)
	}
	for _, text := range urls {
		if err := checkURL(text); err != nil {
			return fmt.Errorf("peer URL %q: %v: %w", text, err, ErrBadURL)
		}
	}
	return nil
}

func checkURL(text string) error {
	u, err := url.Parse(text)
	if err != nil {
		return err
	}
	switch u.Scheme {
	case "http", "https":
		if _, _, err := net.SplitHostPort(u.Host); err != nil {
			return err
		}
	case "unix", "unixs":
		if u.Host == "" {
			return errors.New("names no socket")
		}
	default:
		return fmt.Errorf("scheme is %q, want http, https, unix or unixs", u.Scheme)
	}
	if u.Path != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return errors.New("has more than scheme, host and port")
	}
	return nil
}
