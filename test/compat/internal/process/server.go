package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	readyWithin = time.Minute
	stopWithin  = time.Minute
	logTail     = 4 << 10
	maxMessage  = 64 << 20
)

// Options describe one member.
type Options struct {
	Program string   // path of the server program
	Dir     string   // holds the data directory and the log; must exist
	Name    string   // the member's name, also the prefix of files in Dir
	Flags   []string // added to the command line after the flags every member gets
	Secure  bool     // listen for clients on an https URL as well
}

// Server is one running member and a connection to it. It is for one goroutine, apart from Conn, which any may use.
type Server struct {
	Name      string
	ClientURL string // http://127.0.0.1:port
	PeerURL   string
	SecureURL string // https://127.0.0.1:port, if Options.Secure
	DataDir   string

	options Options
	log     *os.File
	cmd     *exec.Cmd
	exited  chan struct{} // closed when the process has ended and exitErr is set
	exitErr error
	conn    *grpc.ClientConn
}

// Start runs a new member of a cluster of one and waits until it answers.
func Start(o Options) (*Server, error) {
	s := &Server{Name: o.Name, options: o, DataDir: filepath.Join(o.Dir, o.Name+".data")}
	addresses, err := freeAddresses(3)
	if err != nil {
		return nil, err
	}
	s.ClientURL, s.PeerURL = "http://"+addresses[0], "http://"+addresses[1]
	if o.Secure {
		s.SecureURL = "https://" + addresses[2]
	}
	if s.log, err = os.Create(filepath.Join(o.Dir, o.Name+".log")); err != nil {
		return nil, err
	}
	if err := s.run(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Conn is the connection to the running member. It is replaced by Restart.
func (s *Server) Conn() *grpc.ClientConn { return s.conn }

// Endpoint is the member's client address without a scheme.
func (s *Server) Endpoint() string { return strings.TrimPrefix(s.ClientURL, "http://") }

// Stop ends the member with SIGTERM and waits for it. A member that does not end by itself is an error.
func (s *Server) Stop() error { return s.end(syscall.SIGTERM) }

// Kill ends the member with SIGKILL and waits for it.
func (s *Server) Kill() error { return s.end(syscall.SIGKILL) }

// Restart runs the stopped or killed member again on the same data and addresses.
func (s *Server) Restart() error { return s.run() }

// Close ends the member however it can be ended. It is safe on a member that is not running.
func (s *Server) Close() {
	if s.cmd != nil && s.running() {
		if err := s.Stop(); err != nil && s.running() {
			s.Kill()
		}
	}
	s.log.Close()
}

// LogTail returns the last lines the member logged.
func (s *Server) LogTail() string {
	f, err := os.Open(s.log.Name())
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		f.Seek(max(0, end-logTail), io.SeekStart)
	}
	var b bytes.Buffer
	io.Copy(&b, f)
	return b.String()
}

func (s *Server) run() error {
	listen := s.ClientURL
	if s.SecureURL != "" {
		listen += "," + s.SecureURL
	}
	args := append([]string{
		"--name=" + s.Name,
		"--data-dir=" + s.DataDir,
		"--listen-client-urls=" + listen,
		"--advertise-client-urls=" + s.ClientURL,
		"--listen-peer-urls=" + s.PeerURL,
		"--initial-advertise-peer-urls=" + s.PeerURL,
		"--initial-cluster=" + s.Name + "=" + s.PeerURL,
		"--log-level=warn",
	}, s.options.Flags...)
	s.cmd = exec.Command(s.options.Program, args...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ETCD") })
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.exited = make(chan struct{})
	go func(cmd *exec.Cmd, exited chan struct{}) {
		s.exitErr = cmd.Wait()
		close(exited)
	}(s.cmd, s.exited)
	if err := s.ready(); err != nil {
		return fmt.Errorf("%s (%s) did not become ready: %w; its log ends:\n%s", s.Name, s.options.Program, err, s.LogTail())
	}
	return nil
}

// ready connects and waits for a leader, for the member to have published its own name (until then MemberList answers an
// unnamed member), and for its store to have taken on the version of the cluster.
func (s *Server) ready() error {
	conn, err := dial(s.Endpoint())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	go func(exited chan struct{}) { // a member that dies early need not be waited for
		select {
		case <-exited:
			cancel()
		case <-ctx.Done():
		}
	}(s.exited)
	cluster, maintenance := etcdserverpb.NewClusterClient(conn), etcdserverpb.NewMaintenanceClient(conn)
	for {
		list, err := cluster.MemberList(ctx, &etcdserverpb.MemberListRequest{Linearizable: true}, grpc.WaitForReady(true))
		if err == nil && len(list.Members) > 0 && list.Members[0].Name != "" && len(list.Members[0].ClientURLs) > 0 {
			var answer *etcdserverpb.StatusResponse
			if answer, err = maintenance.Status(ctx, &etcdserverpb.StatusRequest{}); err == nil && upToDate(answer) {
				s.conn = conn
				return nil
			}
		}
		if status.Code(err) == codes.InvalidArgument { // authentication is on: nothing else may be asked
			s.conn = conn
			return nil
		}
		select {
		case <-ctx.Done():
			conn.Close()
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond): // polling another process: there is no event to wait for
		}
	}
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)))
}

// Dial replaces the connection to the member by one to another address, for a proxy before it.
func (s *Server) Dial(address string) error {
	conn, err := dial(address)
	if err != nil {
		return err
	}
	s.conn.Close()
	s.conn = conn
	return nil
}

// upToDate tells if the storage version is the server's, but for the patch.
func upToDate(a *etcdserverpb.StatusResponse) bool {
	minor := func(version string) string { return version[:max(0, strings.LastIndexByte(version, '.'))] }
	return a.StorageVersion != "" && minor(a.StorageVersion) == minor(a.Version)
}

// Died says whether the process ends by itself within seconds, saying what: its connections break before it is gone.
func (s *Server) Died(saying string) bool {
	select {
	case <-s.exited:
		return strings.Contains(s.LogTail(), saying)
	case <-time.After(5 * time.Second):
		return false
	}
}

func (s *Server) running() bool {
	select {
	case <-s.exited:
		return false
	default:
		return true
	}
}

func (s *Server) end(sig syscall.Signal) error {
	if s.conn != nil {
		s.conn.Close()
		s.conn = nil
	}
	if !s.running() {
		return fmt.Errorf("%s had already ended: %v; its log ends:\n%s", s.Name, s.exitErr, s.LogTail())
	}
	if err := s.cmd.Process.Signal(sig); err != nil {
		return err
	}
	select {
	case <-s.exited:
		return nil
	case <-time.After(stopWithin):
		return fmt.Errorf("%s still runs %s after %v", s.Name, stopWithin, sig)
	}
}

// freeAddresses returns addresses on loopback that nobody else gets, also while the member is down.
func freeAddresses(n int) ([]string, error) {
	free := make([]string, n)
	for i := range free {
		port, err := cluster.FreePort()
		if err != nil {
			return nil, err
		}
		free[i] = net.JoinHostPort("127.0.0.1", port)
	}
	return free, nil
}

// Reset ends the member and starts it again without data, on the same addresses: it has the same IDs as before.
func (s *Server) Reset() error {
	if err := s.Stop(); err != nil {
		return err
	}
	if err := os.RemoveAll(s.DataDir); err != nil {
		return err
	}
	return s.run()
}
