package ctl

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// fakeMember answers like a member what it is told to. It serves gRPC and HTTP on one port, as members do.
type fakeMember struct {
	pb.UnimplementedMaintenanceServer
	pb.UnimplementedClusterServer
	pb.UnimplementedKVServer
	pb.UnimplementedLeaseServer
	pb.UnimplementedAuthServer

	status  *pb.StatusResponse
	hash    *pb.HashKVResponse
	members []*pb.Member
	alarms  []*pb.AlarmMember
	refuse  error // what reads and the list of members fail with
	metrics string
}

func (f *fakeMember) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	return proto.Clone(f.status).(*pb.StatusResponse), nil
}

func (f *fakeMember) HashKV(context.Context, *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	return f.hash, nil
}

func (f *fakeMember) Alarm(context.Context, *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	return &pb.AlarmResponse{Header: f.status.Header, Alarms: f.alarms}, nil
}

func (f *fakeMember) MemberList(context.Context, *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	return &pb.MemberListResponse{Header: f.status.Header, Members: f.members}, nil
}

func (f *fakeMember) Range(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error) {
	if f.refuse != nil {
		return nil, f.refuse
	}
	return &pb.RangeResponse{Header: f.status.Header, Count: 7}, nil
}

func (f *fakeMember) LeaseLeases(context.Context, *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	return &pb.LeaseLeasesResponse{Header: f.status.Header}, nil
}

func (f *fakeMember) AuthStatus(context.Context, *pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	return &pb.AuthStatusResponse{Header: f.status.Header}, nil
}

// newFake is a member of an etcd cluster that leads and is well.
func newFake() *fakeMember {
	return &fakeMember{
		status: &pb.StatusResponse{
			Header: &pb.ResponseHeader{ClusterId: 0xc1, MemberId: 0x11, Revision: 9, RaftTerm: 2}, Version: "3.6.5", Leader: 0x11,
			DbSize: 1 << 20, DbSizeInUse: 1 << 19, DbSizeQuota: 2 << 30, RaftIndex: 100, RaftAppliedIndex: 100,
		},
		hash: &pb.HashKVResponse{Hash: 0xabc, CompactRevision: -1, HashRevision: 9},
	}
}

// serveHTTP answers what etcd's client port answers.
func (f *fakeMember) serveHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/version":
		fmt.Fprint(w, `{"etcdserver":"3.6.5","etcdcluster":"3.6.0","storage":"3.6.0"}`)
	case "/metrics":
		fmt.Fprint(w, f.metrics)
	default:
		http.NotFound(w, r)
	}
}

// serve serves f on a port of its own until the test ends and returns the address.
func (f *fakeMember) serve(t *testing.T, config *tls.Config) string {
	t.Helper()
	g := grpc.NewServer()
	pb.RegisterMaintenanceServer(g, f)
	pb.RegisterClusterServer(g, f)
	pb.RegisterKVServer(g, f)
	pb.RegisterLeaseServer(g, f)
	pb.RegisterAuthServer(g, f)
	return serveHTTP(t, config, func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			g.ServeHTTP(w, r)
			return
		}
		f.serveHTTP(w, r)
	})
}

// serveHTTP serves HTTP/1.1 and HTTP/2, under TLS if config says so.
func serveHTTP(t *testing.T, config *tls.Config, h http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, TLSConfig: config, Protocols: new(http.Protocols), ErrorLog: nil}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(config == nil)
	s.ErrorLog = discardLog
	done := make(chan struct{})
	go func() {
		defer close(done)
		if config != nil {
			_ = s.ServeTLS(l, "", "")
		} else {
			_ = s.Serve(l)
		}
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-done
	})
	return l.Addr().String()
}

// deadAddress is an address at which nobody listens.
func deadAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// authority signs certificates.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err == nil {
		a.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.file = a.write("ca.crt", "CERTIFICATE", der)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *authority) write(name, kind string, der []byte) string {
	a.t.Helper()
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// issued is a certificate and where its files are.
type issued struct {
	tls.Certificate
	certFile, keyFile string
}

// issue makes a certificate, which change may alter before it is signed.
func (a *authority) issue(name string, change func(*x509.Certificate)) issued {
	a.t.Helper()
	key := newKey(a.t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(100 * 24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	i := issued{certFile: a.write(name+".crt", "CERTIFICATE", der), keyFile: a.write(name+".key", "EC PRIVATE KEY", keyDER)}
	if i.Certificate, err = tls.LoadX509KeyPair(i.certFile, i.keyFile); err != nil {
		a.t.Fatal(err)
	}
	return i
}

// config is a server's that shows i, and asks clients for a certificate of clients if that is not nil.
func (i issued) config(clients *authority) *tls.Config {
	c := &tls.Config{Certificates: []tls.Certificate{i.Certificate}}
	if clients != nil {
		c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		c.ClientCAs.AddCert(clients.cert)
	}
	return c
}
