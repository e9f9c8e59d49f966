package web

import "net/http"

// PeerHandler serves a peer listener of a member that is alone: its version.
func PeerHandler(o Options) http.Handler {
	o.setDefaults()
	mux := http.NewServeMux()
	mux.Handle("/version", onlyGet(o.version))
	return mux
}
