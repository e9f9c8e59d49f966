package ctl

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/engram-kv/engram/internal/config"
)

func (t *tool) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Prints the version of etcdctl",
		Run: func(*cobra.Command, []string) {
			// Scripts parse the first line, so it names etcdctl whatever the tool is called.
			fmt.Fprintln(t.out, "etcdctl version:", config.EtcdVersion)
			fmt.Fprintln(t.out, "API version:", config.EtcdVersion[:strings.LastIndexByte(config.EtcdVersion, '.')])
		},
	}
}

func (t *tool) optionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "options",
		Short: "Show the global command-line flags",
		Run: func(c *cobra.Command, _ []string) {
			fmt.Fprintln(t.out, "The following options can be passed to any command:")
			fmt.Fprintln(t.out)
			shown := pflag.NewFlagSet("options", pflag.ContinueOnError)
			c.Root().PersistentFlags().VisitAll(func(f *pflag.Flag) { shown.AddFlag(f) })
			fmt.Fprint(t.out, shown.FlagUsages())
		},
	}
}

func (t *tool) completionCommand() *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:       "completion [bash|zsh|fish|powershell]",
		Short:     "Generate completion script",
		Long:      "Writes a script that completes this tool's command lines in a shell. For bash, in its start file:\n\n  source <(" + t.name + " completion bash)",
		ValidArgs: shells,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return &usageError{command: c, err: fmt.Errorf("accepts 1 arg(s), received %d", len(args))}
			}
			if !slices.Contains(shells, args[0]) {
				return &usageError{command: c, err: fmt.Errorf("invalid argument %q for %q", args[0], c.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			switch args[0] {
			case "bash":
				return c.Root().GenBashCompletionV2(t.out, true)
			case "zsh":
				return c.Root().GenZshCompletion(t.out)
			case "fish":
				return c.Root().GenFishCompletion(t.out, true)
			}
			return c.Root().GenPowerShellCompletionWithDesc(t.out)
		},
	}
}
