// Package ctl is the client tool: engram ctl, also called etcdctl. It speaks
// only gRPC.
package ctl

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/config"
)

// Main runs the tool and returns the exit status. name is how it was called.
func Main(name string, args []string) int {
	root := &cobra.Command{Use: name, SilenceUsage: true}
	root.AddCommand(&cobra.Command{Use: "version", Run: func(*cobra.Command, []string) {
		fmt.Printf("etcdctl version: %s\nAPI version: 3.7\n", config.EtcdVersion)
	}})
	root.SetArgs(args)
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		return 1
	}
	return 0
}
