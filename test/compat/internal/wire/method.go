// Package wire calls any of etcd's gRPC methods by name and turns answers into text that is equal on two servers if and
// only if the answers are.
//
// It uses the generated message types through reflection, so no client library hides or repairs anything. Method names
// one RPC; Names holds what differs between two clusters by right and the words that stand for it. Invariants:
//
//	T1: every field that is set is printed, in the order of field numbers; nothing is left out but what Names covers.
//	T2: a header whose cluster_id, member_id and raft_term are all as they should be prints as `id`; any other prints them.
package wire

import (
	"context"
	"fmt"
	"io"
	"strings"

	_ "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb" // this and the next two register services named below
	_ "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	_ "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

var services = []protoreflect.FullName{
	"etcdserverpb.KV", "etcdserverpb.Watch", "etcdserverpb.Lease", "etcdserverpb.Cluster", "etcdserverpb.Maintenance",
	"etcdserverpb.Auth", "v3lockpb.Lock", "v3electionpb.Election", "grpc.health.v1.Health",
}

// Method is one RPC.
type Method struct {
	Name     string // Range
	FullName string // /etcdserverpb.KV/Range

	request, response protoreflect.MessageType
	streams           bool // the server streams its answers
}

// Methods returns every RPC of etcd's services by its short name. The names are unique across the services, apart from
// Health's Watch, which is named HealthWatch here.
func Methods() (map[string]Method, error) {
	methods := make(map[string]Method)
	for _, name := range services {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", name, err)
		}
		service := d.(protoreflect.ServiceDescriptor)
		for i := range service.Methods().Len() {
			m := service.Methods().Get(i)
			request, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
			if err != nil {
				return nil, fmt.Errorf("request of %s: %w", m.FullName(), err)
			}
			response, err := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
			if err != nil {
				return nil, fmt.Errorf("response of %s: %w", m.FullName(), err)
			}
			short := string(m.Name())
			if service.Name() == "Health" {
				short = "Health" + short
			}
			if _, taken := methods[short]; taken {
				return nil, fmt.Errorf("two methods are named %s", short)
			}
			methods[short] = Method{
				Name: short, FullName: fmt.Sprintf("/%s/%s", service.FullName(), m.Name()),
				request: request, response: response, streams: m.IsStreamingServer(),
			}
		}
	}
	return methods, nil
}

// Parse reads a request in protobuf's text form.
func (m Method) Parse(text string) (proto.Message, error) {
	request := m.request.New().Interface()
	if err := prototext.Unmarshal([]byte(text), request); err != nil {
		return nil, fmt.Errorf("request of %s %q: %w", m.Name, text, err)
	}
	return request, nil
}

// Call sends one request and returns the answers: one of a unary method, all of a server stream up to its end. Answers that
// came before an error are returned with it.
func (m Method) Call(ctx context.Context, conn *grpc.ClientConn, request proto.Message) ([]proto.Message, error) {
	if !m.streams {
		response := m.response.New().Interface()
		if err := conn.Invoke(ctx, m.FullName, request, response); err != nil {
			return nil, err
		}
		return []proto.Message{response}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, m.FullName)
	if err != nil {
		return nil, err
	}
	if err := stream.SendMsg(request); err != nil && err != io.EOF { // on io.EOF the status comes from RecvMsg
		return nil, err
	}
	if err := stream.CloseSend(); err != nil {
		return nil, err
	}
	var answers []proto.Message
	for {
		response := m.response.New().Interface()
		if err := stream.RecvMsg(response); err == io.EOF {
			return answers, nil
		} else if err != nil {
			return answers, err
		}
		answers = append(answers, response)
	}
}

// ErrorText is the gRPC code and the message of an error, as a client sees both.
// The client's own deadline has several wordings, by which of two timers rings
// first; they count as one.
func ErrorText(err error) string {
	s := status.Convert(err)
	if s.Code() == codes.DeadlineExceeded && strings.HasPrefix(s.Message(), "stream terminated by RST_STREAM") {
		s = status.New(s.Code(), "context deadline exceeded")
	}
	text := fmt.Sprintf("error %s: %s", s.Code(), s.Message())
	if d := s.Proto().GetDetails(); len(d) > 0 {
		text += fmt.Sprintf(" (%d details)", len(d))
	}
	return text
}
