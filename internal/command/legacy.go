package command

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/encoding/protowire"
)

// legacyRequest is what matters of etcdserverpb.Request, with which etcd 3.5
// still publishes members and cluster versions through its v2 store.
type legacyRequest struct {
	id                uint64
	method, path, val string
}

// parseLegacy recognizes a v2 request: the entry itself, or in the field v2 of
// an InternalRaftRequest.
func parseLegacy(data []byte) (r legacyRequest, ok bool) {
	rest, outerID := data, uint64(0)
	for len(rest) > 0 {
		field, typ, body, after := nextField(rest)
		switch {
		case field == fieldID && typ == protowire.VarintType:
			_, _, n := protowire.ConsumeTag(rest)
			outerID, _ = protowire.ConsumeVarint(rest[n:])
		case field == fieldV2 && typ == protowire.BytesType:
			if r, ok = parseLegacyRequest(body); ok {
				if r.id == 0 {
					r.id = outerID
				}
				return r, true
			}
		}
		rest = after
	}
	return parseLegacyRequest(data)
}

func parseLegacyRequest(data []byte) (r legacyRequest, ok bool) {
	for len(data) > 0 {
		field, typ, n := protowire.ConsumeTag(data)
		if n < 0 {
			return r, false
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(field, typ, data); n < 0 {
			return r, false
		}
		switch {
		case field == 1 && typ == protowire.VarintType:
			r.id, _ = protowire.ConsumeVarint(data)
		case field == 2 && typ == protowire.BytesType:
			r.method = text(data)
		case field == 3 && typ == protowire.BytesType:
			r.path = text(data)
		case field == 4 && typ == protowire.BytesType:
			r.val = text(data)
		case field <= 4:
			return r, false
		}
		data = data[n:]
	}
	return r, r.method != ""
}

func text(data []byte) string {
	b, _ := protowire.ConsumeBytes(data)
	return string(b)
}

// fromLegacy translates the two v2 requests that etcd 3.5 writes; etcd 3.6 stops
// at any other.
func (c *Command) fromLegacy(r legacyRequest) error {
	c.Reset()
	c.ID, c.Header.ID = r.id, r.id
	switch {
	case r.method != "PUT":
	case r.path == "/0/version":
		c.Kind, c.Msg = KindClusterVersionSet, &membershippb.ClusterVersionSetRequest{Ver: r.val}
		return nil
	case strings.HasPrefix(r.path, "/0/members/"):
		hex, attributes := strings.CutSuffix(strings.TrimPrefix(r.path, "/0/members/"), "/attributes")
		id, err := strconv.ParseUint(hex, 16, 64)
		if !attributes || err != nil {
			break
		}
		var attr struct {
			Name       string   `json:"name"`
			ClientURLs []string `json:"clientURLs"`
		}
		if err := json.Unmarshal([]byte(r.val), &attr); err != nil {
			return fmt.Errorf("v2 attributes of member %x: %w: %w", id, ErrMalformed, err)
		}
		c.Kind, c.Msg = KindClusterMemberAttrSet, &membershippb.ClusterMemberAttrSetRequest{
			Member_ID:        id,
			MemberAttributes: &membershippb.Attributes{Name: attr.Name, ClientUrls: attr.ClientURLs},
		}
		return nil
	}
	return fmt.Errorf("request %q %q of the v2 store (remove v2 data with etcd 3.5 first): %w", r.method, r.path, ErrUnknown)
}
