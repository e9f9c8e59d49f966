// Command compat36 is the real etcd server of the release before: a member that mixed clusters of test/compat also run.
//
// It has a go.mod of its own, since one module cannot hold two releases of etcd.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
