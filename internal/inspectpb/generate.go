// Package inspectpb is the gRPC service engram.v1.Inspect: what Engram tells about itself beyond etcd's API. The Go files are
// made from inspect.proto by `go generate ./internal/inspectpb`; CONTRIBUTING.md tells what that needs.
package inspectpb

//go:generate go run github.com/bufbuild/buf/cmd/buf@v1.50.0 generate --template buf.gen.yaml .
