package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/engram-kv/engram/test/internal/broken"
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

// CheckHashBefore compares the hashes of all running members, while clients write, at a revision that one of them was at a moment ago. A member that is
// not so far yet, or a compaction that not all have come to, has it begin anew at a later one; hashes that differ do not.
func (c *Cluster) CheckHashBefore(ctx context.Context) (h Hash, err error) {
	var differ error
	err = wait(ctx, "hash while clients write", func(ctx context.Context) error {
		s, err := c.Running()[0].Status(ctx)
		if err != nil {
			return err
		}
		if h, err = c.CheckHashAt(ctx, s.Header.Revision); broken.Is(err) {
			differ, err = err, nil
		}
		return err
	})
	return h, errors.Join(err, differ)
}

// CheckHashAt compares the hashes of all running members at a revision.
func (c *Cluster) CheckHashAt(ctx context.Context, revision int64) (Hash, error) {
	members := c.Running()
	hashes, errs := make([][2]Hash, len(members)), make([]error, len(members))
	var asking sync.WaitGroup
	for i, m := range members {
		asking.Go(func() { hashes[i], errs[i] = m.hashes(ctx, revision) })
	}
	asking.Wait()
	if err := errors.Join(errs...); err != nil {
		return Hash{}, err
	}
	first := hashes[0][0]
	var said []string
	equal, comparable := true, true // those of two compact revisions are of other things
	for i, m := range members {
		for _, h := range hashes[i] {
			equal = equal && h == first
			comparable = comparable && h.CompactedRev == first.CompactedRev
		}
		said = append(said, fmt.Sprintf("%v: to clients %+v, to members %+v", m, hashes[i][0], hashes[i][1]))
	}
	switch {
	case !comparable:
		return Hash{}, fmt.Errorf("not all members have compacted as far, at revision %d:\n%s", revision, strings.Join(said, "\n"))
	case !equal:
		return Hash{}, broken.Errorf("the hashes at revision %d differ:\n%s", revision, strings.Join(said, "\n"))
	}
	return first, nil
}

// hashes asks as a client and as a member; of a learner, which answers only members, both are what members are told.
func (m *Member) hashes(ctx context.Context, revision int64) (both [2]Hash, err error) {
	if both[1], err = m.PeerHashKV(ctx, revision); err != nil {
		return both, fmt.Errorf("/members/hashkv of %v at %d: %w", m, revision, err)
	}
	if both[0] = both[1]; m.isLearner() {
		return both, nil
	}
	if both[0], err = m.HashKV(ctx, revision); err != nil {
		return both, fmt.Errorf("HashKV of %v at %d: %w", m, revision, err)
	}
	return both, nil
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
