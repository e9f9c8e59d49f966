package snapfile

import (
	"encoding/json"
	"fmt"
	"path"
	"strconv"

	"github.com/engram-kv/engram/internal/member"
)

// node is a file or directory of etcd's v2 store. Children is null for a file.
type node struct {
	Path          string
	CreatedIndex  uint64
	ModifiedIndex uint64
	ExpireTime    string
	Value         string
	Children      map[string]*node
}

// StoreV2 returns the JSON document that belongs into raftpb.Snapshot.Data: the
// membership, which must be exactly that of the snapshot's index, in the form of
// etcd's v2 store. Members of 3.6 take their membership from it; 3.7 ignores it.
//
// What real members add, counters and a history of events that nobody watches,
// is left out: the receiver keeps its own then.
func StoreV2(members *member.Root, index uint64) []byte {
	dir := func() *node { return &node{Children: map[string]*node{}} }
	file := func(v any) *node {
		text, ok := v.(string)
		if !ok {
			text = string(mustJSON(v))
		}
		return &node{Value: text}
	}
	list := dir()
	for _, m := range members.List() {
		d := dir()
		d.Children["raftAttributes"] = file(struct {
			PeerURLs  []string `json:"peerURLs"`
			IsLearner bool     `json:"isLearner,omitempty"`
		}{m.PeerURLs, m.IsLearner})
		if len(m.ClientURLs) > 0 {
			d.Children["attributes"] = file(struct {
				Name       string   `json:"name,omitempty"`
				ClientURLs []string `json:"clientURLs,omitempty"`
			}{m.Name, m.ClientURLs})
		}
		list.Children[hex(m.ID)] = d
	}
	cluster := dir()
	cluster.Children["members"] = list
	if removed := members.RemovedIDs(); len(removed) > 0 {
		d := dir()
		for _, id := range removed {
			d.Children[hex(id)] = file("")
		}
		cluster.Children["removed_members"] = d
	}
	if v := members.Version(); v != "" {
		cluster.Children["version"] = file(v)
	}
	root := dir()
	root.Children["0"], root.Children["1"] = cluster, dir()
	root.place("/", index)
	return mustJSON(struct {
		Root           *node
		CurrentIndex   uint64
		CurrentVersion int
	}{root, index, 2})
}

// place names a node and all below it.
func (n *node) place(at string, index uint64) {
	n.Path, n.CreatedIndex, n.ModifiedIndex, n.ExpireTime = at, index, index, "0001-01-01T00:00:00Z"
	for name, c := range n.Children {
		c.place(path.Join(at, name), index)
	}
}

func hex(id uint64) string { return strconv.FormatUint(id, 16) }

// mustJSON is for types that always marshal.
func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("snapfile: marshal %T: %v", v, err))
	}
	return b
}
