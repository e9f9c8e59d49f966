// Command etcdctl is the real etcdctl: the reference for `engram ctl`.
package main

import "go.etcd.io/etcd/etcdctl/v3/ctlv3"

func main() { ctlv3.MustStart() }
