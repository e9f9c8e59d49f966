package grpcserver

import (
	"bufio"
	"io"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
)

// This file serves HTTP requests that come over HTTP/2: a client that speaks TLS
// and is offered h2 takes it, for gRPC or not.

// beginHTTP serves a request that is no gRPC.
func (srv *Server) beginHTTP(s *stream, end bool) {
	s.inbox = newInbox(s)
	srv.goServe(s, func() { srv.serveOver(s) })
	if end {
		s.take(nil, true)
	}
}

func (srv *Server) serveOver(s *stream) {
	w := &webWriter{s: s, header: http.Header{}}
	w.buf = bufio.NewWriterSize(webBody{w}, 16<<10)
	r, err := s.httpRequest()
	if err != nil {
		http.Error(w, "malformed request: "+err.Error(), http.StatusBadRequest)
	} else {
		srv.o.HTTP.ServeHTTP(w, r)
	}
	w.finish()
	s.forgotten()
	s.release()
	s.Call.finish(endCanceled)
}

// httpRequest describes the request for package http.
func (s *stream) httpRequest() (*http.Request, error) {
	u, err := url.ParseRequestURI(s.req.path)
	if err != nil {
		return nil, err
	}
	h := http.Header{}
	for name, vs := range s.md.values {
		if name[0] != ':' && name != "host" {
			h[textproto.CanonicalMIMEHeaderKey(name)] = vs
		}
	}
	if c := h["Cookie"]; len(c) > 1 {
		h["Cookie"] = []string{strings.Join(c, "; ")}
	}
	r := &http.Request{
		Method: s.req.httpMethod, URL: u, RequestURI: s.req.path, Host: s.req.authority, Header: h,
		Proto: "HTTP/2.0", ProtoMajor: 2, RemoteAddr: s.conn.remote.String(), TLS: s.conn.tls,
		ContentLength: s.req.length, Body: s.inbox,
	}
	if s.remoteDone.Load() && s.received == 0 {
		r.Body, r.ContentLength = http.NoBody, 0
	}
	return r.WithContext(s.Context()), nil
}

// webWriter is http.ResponseWriter on a stream.
type webWriter struct {
	s      *stream
	header http.Header
	buf    *bufio.Writer
	begun  bool
	none   bool // the answer has no body
}

// Header implements http.ResponseWriter.
func (w *webWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *webWriter) WriteHeader(code int) {
	if w.begun || code < 200 {
		return
	}
	w.begun = true
	w.none = code == http.StatusNoContent || code == http.StatusNotModified || w.s.req.httpMethod == http.MethodHead
	var head []byte
	if code == http.StatusOK {
		head = []byte{statusOK200}
	} else {
		head = appendStatus(nil, code)
	}
	for name, vs := range w.header {
		name = strings.ToLower(name)
		if kinds[name] == kindInvalid && knownNames[name] != "" || !validName(name) {
			continue // of HTTP/1.1
		}
		for _, v := range vs {
			if f := kindOf(name, v); f != kindInvalid {
				head = appendField(head, name, v)
			}
		}
	}
	c := w.s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if !w.s.gone.Load() {
		w.s.head = head
		c.sendHead(w.s)
		c.kick()
	}
}

// Write implements http.ResponseWriter.
func (w *webWriter) Write(p []byte) (int, error) {
	if !w.begun {
		if w.header.Get("Content-Type") == "" && len(p) > 0 {
			w.header.Set("Content-Type", http.DetectContentType(p))
		}
		w.WriteHeader(http.StatusOK)
	}
	if w.none {
		return len(p), nil
	}
	return w.buf.Write(p)
}

// Flush implements http.Flusher.
func (w *webWriter) Flush() {
	if !w.begun {
		w.WriteHeader(http.StatusOK)
	}
	_ = w.buf.Flush()
}

// finish ends the answer.
func (w *webWriter) finish() {
	if !w.begun {
		if w.header.Get("Content-Length") == "" {
			w.header.Set("Content-Length", strconv.Itoa(0))
		}
		w.WriteHeader(http.StatusOK)
	}
	_ = w.buf.Flush()
	c := w.s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if !w.s.gone.Load() {
		c.conclude(w.s, nil)
		c.kick()
	}
}

// webBody sends what was gathered of a body.
type webBody struct{ w *webWriter }

// Write implements io.Writer.
func (b webBody) Write(p []byte) (int, error) {
	it := outItem{message: Message{Head: append([]byte(nil), p...)}, part: 1, left: len(p)}
	if !b.w.s.push(it) {
		return 0, b.w.s.callError(b.w.s.Err())
	}
	return len(p), nil
}

var (
	_ http.Flusher  = (*webWriter)(nil)
	_ io.ReadCloser = (*inbox)(nil)
)
