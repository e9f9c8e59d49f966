module go.etcd.io/etcd/server/v3

go 1.26.8

require (
	github.com/engram-kv/engram/test/kube v0.0.0
	go.etcd.io/etcd/client/pkg/v3 v3.7.0
	go.uber.org/zap v1.27.1
)

replace github.com/engram-kv/engram/test/kube => ../
