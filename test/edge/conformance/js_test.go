package conformance

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/versionpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/engram-kv/engram/test/edge/member"
)

const jsWithin = 2 * time.Minute

// jsCases is what js/client.mjs says that it has done.
var jsCases = []string{
	"unary", "errors", "unimplemented method", "watch stream", "deadline of a unary call", "deadline of a stream", "cancel of a stream",
	"cancel of unary calls", "large messages", "too large messages", "metadata", "gzip", "deflate", "keep a lease alive", "very many at once",
	"pings of a quiet stream",
}

// TestJavaScript runs the gRPC library of another language, which shares no code with grpc-go: in cleartext, over TLS, and
// with a certificate of the client.
func TestJavaScript(t *testing.T) {
	for _, program := range []string{"node", "npm"} {
		if _, err := exec.LookPath(program); err != nil {
			member.Missing(t, "%v: install Node.js and npm", err)
		}
	}
	dir := t.TempDir()
	for _, name := range []string{"package.json", "package-lock.json", ".npmrc", "client.mjs"} {
		text, err := os.ReadFile(filepath.Join("js", name))
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	install := exec.CommandContext(t.Context(), "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	install.Dir = dir
	if text, err := install.CombinedOutput(); err != nil {
		member.Missing(t, "npm ci: %v\n%s", err, text)
	}
	descriptors := filepath.Join(dir, "descriptors")
	must(t, os.WriteFile(descriptors, descriptorSet(t, mvccpb.File_kv_proto, authpb.File_auth_proto, versionpb.File_version_proto, pb.File_rpc_proto), 0o600))

	m := member.Start(t, 0, "--grpc-keepalive-min-time=500ms")
	mutual := member.Start(t, 0, "--grpc-keepalive-min-time=500ms", member.ClientCertAuth)
	certFile, keyFile, err := mutual.Authority.Issue("somebody")
	must(t, err)
	mib := "20"
	if member.Long() {
		mib = "100"
	}
	for _, c := range []struct {
		name string
		env  []string
	}{
		{"cleartext", []string{"TARGET=" + m.Clear}},
		{"TLS", []string{"TARGET=" + m.TLS, "AUTHORITY=" + m.Authority.File}},
		{"TLS with certificates", []string{"TARGET=" + mutual.TLS, "AUTHORITY=" + mutual.Authority.File, "CERTIFICATE=" + certFile, "KEY=" + keyFile}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), jsWithin)
			defer cancel()
			cmd := exec.CommandContext(ctx, "node", "client.mjs")
			cmd.Dir = dir
			cmd.Env = append(append(os.Environ(), "DESCRIPTORS="+descriptors, "MIB="+mib), c.env...)
			text, err := cmd.CombinedOutput()
			done := map[string]bool{}
			for line := range strings.Lines(string(text)) {
				if name, ok := strings.CutPrefix(strings.TrimSpace(line), "ok "); ok {
					done[name] = true
				}
			}
			for _, name := range jsCases {
				if !done[name] {
					t.Errorf("%q is not ok", name)
				}
			}
			if err != nil || len(done) != len(jsCases) {
				t.Errorf("%d of %d cases are ok, %v:\n%s", len(done), len(jsCases), err, text)
			}
		})
	}
}

// descriptorSet is files and all that they import, in an order in which each comes after what it imports. Etcd's files import
// one another by other names than those that they are registered by, so all of them are roots.
func descriptorSet(t *testing.T, roots ...protoreflect.FileDescriptor) []byte {
	t.Helper()
	var set descriptorpb.FileDescriptorSet
	seen := map[string]bool{}
	var add func(f protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if seen[f.Path()] || f.IsPlaceholder() {
			return
		}
		seen[f.Path()] = true
		for i := range f.Imports().Len() {
			add(f.Imports().Get(i).FileDescriptor)
		}
		set.File = append(set.File, protodesc.ToFileDescriptorProto(f))
	}
	for _, f := range roots {
		add(f)
	}
	text, err := proto.Marshal(&set)
	must(t, err)
	return text
}
