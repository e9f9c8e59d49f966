package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// Hash is what a member says of its keys and values at a revision.
type Hash struct {
	Hash                       uint32
	HashRevision, CompactedRev int64
}

// Settle waits until every running member has applied all that the others have. Nobody may write meanwhile.
func (c *Cluster) Settle(ctx context.Context) (revision int64, err error) {
	err = wait(ctx, "end of applying", func(ctx context.Context) error {
		var low, high uint64
		var said []string
		for i, m := range c.Running() {
			s, err := m.Status(ctx)
			if err != nil {
				return fmt.Errorf("status of %v: %w", m, err)
			}
			said = append(said, fmt.Sprintf("%v has applied %d of %d, revision %d", m, s.RaftAppliedIndex, s.RaftIndex, s.Header.Revision))
			if i == 0 {
				low = s.RaftAppliedIndex
			}
			low, high = min(low, s.RaftAppliedIndex), max(high, s.RaftAppliedIndex, s.RaftIndex)
			revision = s.Header.Revision
		}
		if low != high || low == 0 {
			return fmt.Errorf("%s", strings.Join(said, "; "))
		}
		return nil
	})
	return revision, err
}

// CheckHash waits until all members have applied the same and compares their hashes at the last revision, asked as clients
// and as members ask. It returns the hash.
func (c *Cluster) CheckHash(ctx context.Context) (Hash, error) {
	revision, err := c.Settle(ctx)
	if err != nil {
		return Hash{}, err
	}
	return c.CheckHashAt(ctx, revision)
}

// CheckHashAt compares the hashes of all running members at a revision.
func (c *Cluster) CheckHashAt(ctx context.Context, revision int64) (Hash, error) {
	var first Hash
	var said []string
	equal := true
	for i, m := range c.Running() {
		peer, err := m.PeerHashKV(ctx, revision)
		if err != nil {
			return Hash{}, fmt.Errorf("/members/hashkv of %v at %d: %w", m, revision, err)
		}
		rpc := peer
		if !m.isLearner() { // which answers only members
			if rpc, err = m.HashKV(ctx, revision); err != nil {
				return Hash{}, fmt.Errorf("HashKV of %v at %d: %w", m, revision, err)
			}
		}
		if i == 0 {
			first = rpc
		}
		equal = equal && rpc == first && peer == first
		said = append(said, fmt.Sprintf("%v: to clients %+v, to members %+v", m, rpc, peer))
	}
	if !equal {
		return Hash{}, fmt.Errorf("the hashes at revision %d differ:\n%s", revision, strings.Join(said, "\n"))
	}
	return first, nil
}

// HashKV asks as a client.
func (m *Member) HashKV(ctx context.Context, revision int64) (Hash, error) {
	client, err := m.Client()
	if err != nil {
		return Hash{}, err
	}
	r, err := client.HashKV(ctx, m.ClientURL, revision)
	if err != nil {
		return Hash{}, err
	}
	return Hash{r.Hash, r.HashRevision, r.CompactRevision}, nil
}

// PeerHashKV asks as another member, which needs no user.
func (m *Member) PeerHashKV(ctx context.Context, revision int64) (Hash, error) {
	body, err := json.Marshal(map[string]int64{"revision": revision})
	if err != nil {
		return Hash{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, m.PeerURL+"/members/hashkv", bytes.NewReader(body))
	if err != nil {
		return Hash{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return Hash{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return Hash{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return Hash{}, fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(text))
	}
	var a struct {
		Header          *struct{ Revision int64 }
		Hash            uint32 `json:"hash"`
		CompactRevision int64  `json:"compact_revision"`
		HashRevision    int64  `json:"hash_revision"`
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return Hash{}, fmt.Errorf("%s: %w", text, err)
	}
	if a.Header == nil {
		return Hash{}, fmt.Errorf("%s: without a header, which kills real members", text)
	}
	return Hash{a.Hash, a.HashRevision, a.CompactRevision}, nil
}
