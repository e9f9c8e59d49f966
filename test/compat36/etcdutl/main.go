// Command etcdutl is the real etcdutl: that of the release before, which restores what Engram saves.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdutl/v3/etcdutl"
)

func main() {
	root := &cobra.Command{Use: "etcdutl", SilenceUsage: true}
	root.PersistentFlags().StringVarP(&etcdutl.OutputFormat, "write-out", "w", "simple", "output format")
	root.AddCommand(
		etcdutl.NewDefragCommand(),
		etcdutl.NewHashKVCommand(),
		etcdutl.NewMigrateCommand(),
		etcdutl.NewSnapshotCommand(),
		etcdutl.NewVersionCommand(),
	)
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
