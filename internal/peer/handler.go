package peer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// maxRequestBody bounds what the paths other than raft's read.
const maxRequestBody = 64 << 10

// Handler answers every path of the peer protocol; the peer listener serves it over HTTP/1.1 and nothing else. It sets the deadlines of
// reading bodies and of answers itself, so the http.Server needs only a ReadHeaderTimeout and an IdleTimeout.
func (t *Transport) Handler() http.Handler { return http.HandlerFunc(t.serve) }

func (t *Transport) serve(w http.ResponseWriter, r *http.Request) {
	if !t.begin() { // Close waits for requests too
		answer(w, http.StatusServiceUnavailable, errStopping.Error())
		return
	}
	defer t.wg.Done()
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{})
	_ = control.SetWriteDeadline(time.Time{})
	var body *patientBody
	if r.Body != nil && r.Body != http.NoBody {
		body = &patientBody{ReadCloser: r.Body, control: control, patience: t.opts.ReadTimeout}
		r.Body = body
		defer context.AfterFunc(t.ctx, func() { body.end(errStopping) })()
	}
	w = &timedAnswer{ResponseWriter: w, control: control, patience: t.opts.WriteTimeout, body: body}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(t.ctx, cancel)()
	r = r.WithContext(ctx)
	t.announce(w.Header())
	switch path := r.URL.Path; {
	case path == "/raft":
		t.only(http.MethodPost, t.checked(t.serveMessage))(w, r)
	case strings.HasPrefix(path, "/raft/stream/"):
		t.only(http.MethodGet, t.routeStream)(w, r)
	case path == "/raft/snapshot":
		t.only(http.MethodPost, t.checked(t.serveSnapshot))(w, r)
	case path == "/raft/probing":
		t.serveProbe(w, r)
	case t.opts.Services == nil:
		http.NotFound(w, r)
	case path == "/members":
		t.only(http.MethodGet, t.serveMembers)(w, r)
	case strings.HasPrefix(path, "/members/promote/"):
		t.only(http.MethodPost, t.servePromote)(w, r)
	case path == "/members/hashkv":
		t.only(http.MethodGet, t.serveHashKV)(w, r)
	case path == "/leases":
		t.only(http.MethodPost, t.serveRenew)(w, r)
	case path == "/leases/internal":
		t.only(http.MethodPost, t.serveTimeToLive)(w, r)
	case path == "/downgrade/enabled":
		t.only(http.MethodGet, t.serveDowngrade)(w, r)
	case path == "/version":
		t.only(http.MethodGet, t.serveVersion)(w, r)
	default:
		http.NotFound(w, r)
	}
}

// answer sends an error as real members do. Some of them act on the very text.
func answer(w http.ResponseWriter, status int, text string) { http.Error(w, text, status) }

func (t *Transport) only(method string, next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != method {
			w.Header().Set("Allow", method)
			answer(w, http.StatusMethodNotAllowed, "Method Not Allowed")
			return
		}
		next(w, r)
	}
}

// checked lets through requests of this cluster and of a version that fits, and remembers who sent them.
func (t *Transport) checked(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(clusterHeader, hexID(t.opts.ClusterID))
		if err := t.checkVersions(r.Header); err != nil {
			t.opts.Logger.Debug("refused a peer", "from", r.Header.Get(fromHeader), "error", err)
			answer(w, http.StatusPreconditionFailed, ErrIncompatible.Error())
			return
		}
		if r.Header.Get(clusterHeader) != hexID(t.opts.ClusterID) {
			answer(w, http.StatusPreconditionFailed, ErrClusterMismatch.Error())
			return
		}
		if from, err := parseHex(r.Header.Get(fromHeader)); err == nil {
			t.remember(from, r.Header)
		}
		next(w, r)
	}
}

// remember makes a sender known enough to be answered, and notes what its headers say.
func (t *Transport) remember(id uint64, h http.Header) {
	if urls := h.Get(peerURLsHeader); urls != "" {
		t.AddRemote(id, strings.Split(urls, ","))
	}
	if p := t.receiver(id); p != nil {
		p.heard(h)
	}
}

func (t *Transport) routeStream(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(versionHeader, t.opts.Version)
	t.checked(func(w http.ResponseWriter, r *http.Request) {
		name, from, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/raft/stream/"), "/")
		k := kind(0)
		for k < kinds && k.String() != name {
			k++
		}
		if k == kinds {
			answer(w, http.StatusNotFound, "invalid path")
			return
		}
		id, err := parseHex(from)
		if err != nil {
			answer(w, http.StatusNotFound, "invalid from")
			return
		}
		if t.isRemoved(id) {
			answer(w, http.StatusGone, "removed member")
			return
		}
		p := t.peer(id)
		if p == nil {
			t.remember(id, r.Header)
			answer(w, http.StatusNotFound, "error sender not found")
			return
		}
		if r.Header.Get(toHeader) != hexID(t.opts.MemberID) {
			answer(w, http.StatusPreconditionFailed, "to field mismatch")
			return
		}
		p.heard(r.Header)
		p.serveStream(k, w, r)
	})(w, r)
}

// serveMessage is POST /raft: one message, not framed.
func (t *Transport) serveMessage(w http.ResponseWriter, r *http.Request) {
	share := t.bodies.share()
	defer share.release()
	m, failed := &raftpb.Message{}, "error reading raft message"
	body, err := share.read(r.Body, r.ContentLength)
	if err == nil {
		failed, err = "error unmarshalling raft message", share.unmarshal(body, m)
	}
	switch {
	case errors.Is(err, errBodies):
		t.answerBusy(w, r)
		return
	case err != nil:
		answer(w, http.StatusBadRequest, failed)
		return
	}
	err = errors.New("a snapshot comes by /raft/snapshot only")
	if m.GetType() != raftpb.MsgSnap {
		err = t.receive(m)
	}
	if err != nil {
		t.opts.Logger.Debug("dropped a message", "from", r.Header.Get(fromHeader), "type", m.GetType(), "error", err)
		w.Header().Set("Connection", "close")
		answer(w, http.StatusInternalServerError, "error processing raft message")
		return
	}
	if p := t.receiver(m.GetFrom()); p != nil {
		p.receivedBytes.Add(float64(len(body)))
	}
	w.WriteHeader(http.StatusNoContent)
}

// answerBusy refuses a message that there is no memory for.
func (t *Transport) answerBusy(w http.ResponseWriter, r *http.Request) {
	t.opts.Logger.Debug("dropped a message", "from", r.Header.Get(fromHeader), "error", errBodies)
	w.Header().Set("Connection", "close")
	answer(w, http.StatusServiceUnavailable, errBodies.Error())
}

func (t *Transport) serveProbe(w http.ResponseWriter, _ *http.Request) {
	b, _ := json.Marshal(health{OK: true, Now: time.Now()})
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write(append(b, '\n'))
}

func (t *Transport) serveMembers(w http.ResponseWriter, _ *http.Request) {
	t.answerMembers(w, t.opts.Services.Members())
}

func (t *Transport) answerMembers(w http.ResponseWriter, members []Member) {
	w.Header().Set(clusterHeader, hexID(t.opts.ClusterID))
	members = append([]Member{}, members...) // never null
	slices.SortFunc(members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	b, _ := json.Marshal(members)
	answerJSON(w, append(b, '\n'))
}

func answerJSON(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
}

func (t *Transport) servePromote(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(clusterHeader, hexID(t.opts.ClusterID))
	text := strings.TrimPrefix(r.URL.Path, "/members/promote/")
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		answer(w, http.StatusNotFound, fmt.Sprintf("member %s not found in cluster", text))
		return
	}
	members, err := t.opts.Services.Promote(r.Context(), id, r.Header.Get("Authorization"))
	switch {
	case err == nil:
		t.answerMembers(w, members)
	case errors.Is(err, ErrMemberNotFound):
		answer(w, http.StatusNotFound, ErrMemberNotFound.Error())
	case errors.Is(err, ErrNotLearner):
		answer(w, http.StatusPreconditionFailed, ErrNotLearner.Error())
	case errors.Is(err, ErrLearnerNotReady):
		answer(w, http.StatusPreconditionFailed, ErrLearnerNotReady.Error())
	default:
		t.opts.Logger.Warn("could not promote a member", "member", hexID(id), "error", err)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = io.WriteString(w, `{"message":"Internal Server Error"}`)
	}
}

// hashRequest and hashAnswer are the JSON of /members/hashkv.
type hashRequest struct {
	Revision int64 `json:"revision,omitempty"`
}

type hashAnswer struct {
	Header          *hashHeader `json:"header"` // always there: real members look into it unchecked
	Hash            uint32      `json:"hash,omitempty"`
	CompactRevision int64       `json:"compact_revision,omitempty"`
	HashRevision    int64       `json:"hash_revision,omitempty"`
}

type hashHeader struct {
	Revision int64 `json:"revision,omitempty"`
}

func (t *Transport) serveHashKV(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(clusterHeader, hexID(t.opts.ClusterID))
	if c := r.Header.Get(clusterHeader); c != "" && c != hexID(t.opts.ClusterID) {
		answer(w, http.StatusPreconditionFailed, ErrClusterMismatch.Error())
		return
	}
	body, ok := readBody(w, r, "error reading body")
	if !ok {
		return
	}
	var q hashRequest
	if err := json.Unmarshal(body, &q); err != nil {
		answer(w, http.StatusBadRequest, "error unmarshalling request")
		return
	}
	h, err := t.opts.Services.HashKV(r.Context(), q.Revision)
	switch {
	case errors.Is(err, ErrFutureRevision):
		answer(w, http.StatusBadRequest, ErrFutureRevision.Error())
	case errors.Is(err, ErrCompacted):
		answer(w, http.StatusBadRequest, ErrCompacted.Error())
	case err != nil:
		answer(w, http.StatusInternalServerError, err.Error())
	default:
		b, _ := json.Marshal(hashAnswer{&hashHeader{h.Revision}, h.Hash, h.CompactRevision, h.HashRevision})
		answerJSON(w, b)
	}
}

// readBody reads a small body, or answers why not.
func readBody(w http.ResponseWriter, r *http.Request, text string) ([]byte, bool) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxRequestBody+1))
	switch {
	case err != nil:
		answer(w, http.StatusBadRequest, text)
	case len(body) > maxRequestBody:
		w.Header().Set("Connection", "close")
		answer(w, http.StatusRequestEntityTooLarge, "request body too large")
	default:
		return body, true
	}
	return nil, false
}

func (t *Transport) serveRenew(w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r, "error reading body")
	if !ok {
		return
	}
	q := &pb.LeaseKeepAliveRequest{}
	if err := proto.Unmarshal(body, q); err != nil {
		answer(w, http.StatusBadRequest, "error unmarshalling request")
		return
	}
	ttl, err := t.opts.Services.RenewLease(r.Context(), q.GetID())
	if err != nil {
		answerLeaseError(w, err, http.StatusBadRequest)
		return
	}
	answerProto(w, &pb.LeaseKeepAliveResponse{ID: q.GetID(), TTL: ttl})
}

// answerLeaseError sends what a lease call failed of; primary is the status for the lack of leadership and anything unforeseen.
func answerLeaseError(w http.ResponseWriter, err error, primary int) {
	switch {
	case errors.Is(err, ErrLeaseNotFound):
		answer(w, http.StatusNotFound, ErrLeaseNotFound.Error())
	case errors.Is(err, ErrNotCaughtUp):
		answer(w, http.StatusRequestTimeout, ErrNotCaughtUp.Error())
	case errors.Is(err, ErrNotPrimary):
		answer(w, primary, ErrNotPrimary.Error())
	default:
		answer(w, primary, err.Error())
	}
}

func answerProto(w http.ResponseWriter, m proto.Message) {
	b, err := proto.Marshal(m)
	if err != nil {
		answer(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/protobuf")
	_, _ = w.Write(b)
}

func (t *Transport) serveTimeToLive(w http.ResponseWriter, r *http.Request) {
	body, ok := readBody(w, r, "error reading body")
	if !ok {
		return
	}
	q := &pb.LeaseTimeToLiveRequest{}
	if err := unwrap(body, q); err != nil {
		answer(w, http.StatusBadRequest, "error unmarshalling request")
		return
	}
	l, err := t.opts.Services.LeaseTimeToLive(r.Context(), q.GetID(), q.GetKeys())
	if err != nil {
		answerLeaseError(w, err, http.StatusInternalServerError)
		return
	}
	b, err := wrap(&pb.LeaseTimeToLiveResponse{Header: &pb.ResponseHeader{}, ID: l.ID, TTL: l.TTL, GrantedTTL: l.GrantedTTL, Keys: l.Keys})
	if err != nil {
		answer(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/protobuf")
	_, _ = w.Write(b)
}

// wrap and unwrap are the messages of /leases/internal, which have the public message as their only field, number 1.
func wrap(m proto.Message) ([]byte, error) {
	b, err := proto.Marshal(m)
	return protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), b), err
}

func unwrap(b []byte, m proto.Message) error {
	found := false
	for len(b) > 0 {
		field, wire, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if field != 1 || wire != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(field, wire, b); n < 0 {
				return protowire.ParseError(n)
			}
			b = b[n:]
			continue
		}
		inner, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b, found = b[n:], true
		if err := (proto.UnmarshalOptions{Merge: true}).Unmarshal(inner, m); err != nil {
			return err
		}
	}
	if !found {
		return errors.New("field 1 is missing")
	}
	return nil
}

func (t *Transport) serveDowngrade(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(clusterHeader, hexID(t.opts.ClusterID))
	enabled, err := t.opts.Services.DowngradeEnabled(r.Context())
	if err != nil {
		answer(w, http.StatusInternalServerError, fmt.Sprintf("failed linearized read: %v", err))
		return
	}
	w.Header().Set("Content-Type", "text/plain")
	_, _ = io.WriteString(w, strconv.FormatBool(enabled))
}

func (t *Transport) serveVersion(w http.ResponseWriter, _ *http.Request) {
	b, _ := json.Marshal(t.opts.Services.Versions())
	answerJSON(w, b)
}

// patientBody gives each read of a request's body its time. Between reads, and when the body has ended, no deadline is left: the server
// would take one that passes for the peer's departure.
type patientBody struct {
	io.ReadCloser
	control  *http.ResponseController
	patience time.Duration

	mu    sync.Mutex
	ended error // why this member reads nothing any more; nil while it does
	err   error // of the last read; io.EOF when all was read
}

func (b *patientBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	if b.ended != nil {
		defer b.mu.Unlock()
		return 0, b.ended
	}
	_ = b.control.SetReadDeadline(time.Now().Add(b.patience))
	b.mu.Unlock()
	n, err := b.ReadCloser.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = err
	if b.ended != nil {
		return n, b.ended
	}
	_ = b.control.SetReadDeadline(time.Time{})
	return n, err
}

// answering prepares for an answer: the server reads some of what was not read before it sends one, and must not wait for it for ever.
func (b *patientBody) answering(h http.Header) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.err == io.EOF:
	case b.err != nil || b.ended != nil:
		h.Set("Connection", "close")
	default:
		_ = b.control.SetReadDeadline(time.Now().Add(b.patience))
	}
}

// end breaks off a read, and refuses those to come.
func (b *patientBody) end(why error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = why
	_ = b.control.SetReadDeadline(time.Unix(1, 0))
}

var errStopping = errors.New("this member is stopping")

// timedAnswer gives an answer its time from when it begins. Streams set their own.
type timedAnswer struct {
	http.ResponseWriter
	control  *http.ResponseController
	patience time.Duration
	body     *patientBody // nil if the request has none
	begun    bool
}

func (a *timedAnswer) WriteHeader(status int) {
	if !a.begun {
		if a.begun = true; a.body != nil {
			a.body.answering(a.Header())
		}
		_ = a.control.SetWriteDeadline(time.Now().Add(a.patience))
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a *timedAnswer) Write(b []byte) (int, error) {
	if !a.begun {
		a.WriteHeader(http.StatusOK)
	}
	return a.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController through.
func (a *timedAnswer) Unwrap() http.ResponseWriter { return a.ResponseWriter }
