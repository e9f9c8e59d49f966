// Command compat35 is the real etcd server of the oldest release whose data Engram imports.
//
// It has a go.mod of its own, since one module cannot hold several releases of etcd.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
