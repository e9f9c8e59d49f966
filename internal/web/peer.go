package web

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// PeerHandler serves a peer listener of a member that is alone: its version, and
// the list of members that a starting member asks for.
func PeerHandler(o Options) http.Handler {
	o.setDefaults()
	mux := http.NewServeMux()
	mux.Handle("/version", onlyGet(o.version))
	mux.Handle("/members", onlyGet(o.members))
	return mux
}

// peerMember is a member as peers are told of it.
type peerMember struct {
	ID         uint64   `json:"id"` // a number, unlike everywhere else
	PeerURLs   []string `json:"peerURLs"`
	IsLearner  bool     `json:"isLearner,omitempty"`
	Name       string   `json:"name,omitempty"`
	ClientURLs []string `json:"clientURLs,omitempty"`
}

func (o *Options) members(w http.ResponseWriter, _ *http.Request) {
	all := []peerMember{}
	for _, m := range o.Member.Members() {
		all = append(all, peerMember{m.ID, m.PeerURLs, m.IsLearner, m.Name, m.ClientURLs})
	}
	w.Header().Set("X-Etcd-Cluster-ID", fmt.Sprintf("%x", o.ClusterID))
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(all); err != nil {
		o.Logger.Debug("HTTP client left", "error", err)
	}
}
