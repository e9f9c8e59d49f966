package config

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
)

// WriteHelp prints every option under its heading.
func WriteHelp(w io.Writer, calledAs string) {
	fmt.Fprintf(w, "Usage:\n\n  %s [flags]\n      Start a member.\n\n", calledAs)
	fmt.Fprintf(w, "  %s --version\n      Show the version.\n\n  %s -h | --help\n      Show this help.\n\n", calledAs, calledAs)
	if calledAs == "engram" {
		fmt.Fprint(w, "  engram ctl …\n      The client tool (also when called as etcdctl).\n\n")
		fmt.Fprint(w, "  engram util …\n      The offline tool, for backups and data directories (also when called as etcdutl).\n\n")
		fmt.Fprint(w, "  engram play\n      A cluster on this machine, with commands that stop, kill, pause, cut off, add and remove members.\n\n")
		fmt.Fprint(w, "  engram bench\n      A load generator for Engram and etcd.\n\n")
	}
	fmt.Fprintf(w, "  %s --config-file PATH\n      Path of a config file (YAML or JSON). It replaces all other options.\n\n", calledAs)
	fmt.Fprint(w, "Each option may also be given as environment variable ETCD_… or ENGRAM_… (upper case, - as _).\n")
	c := Default(calledAs)
	for _, g := range table {
		fmt.Fprintf(w, "\n%s:\n\n", g.title)
		for i := range g.options {
			o := &g.options[i]
			def := o.value(c).String()
			if strings.ContainsAny(def, " {") || def == "" {
				def = "'" + def + "'"
			}
			fmt.Fprintf(w, "  --%s %s\n      %s.%s\n", o.flag, def, upperFirst(o.help), o.note())
		}
	}
}

func (o *option) note() string {
	switch o.support {
	case noEffect:
		return " Accepted, without effect."
	case refused:
		return " Not supported yet: a member does not start with it."
	case deprecated:
		return " Deprecated, without effect."
	}
	return ""
}

func upperFirst(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// WriteVersion prints the versions. Tools read the first line when the program
// is called as etcd (surface.md, section 8).
func WriteVersion(w io.Writer, calledAs string) {
	lines := []string{"etcd Version: " + EtcdVersion, "Engram Version: " + Version}
	if calledAs == "engram" {
		lines[0], lines[1] = lines[1], lines[0]
	}
	for _, l := range lines {
		fmt.Fprintln(w, l)
	}
	fmt.Fprintf(w, "Git SHA: %s\nGo Version: %s\nGo OS/Arch: %s/%s\n", commit(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// commit is what the build recorded of its source.
func commit() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				return s.Value
			}
		}
	}
	return "not recorded (built without version control)"
}

// WriteReference prints the options as the table of docs/options.md.
func WriteReference(w io.Writer) {
	c := Default("engram")
	fmt.Fprint(w, "# Options\n\nMade from the option table by `go test ./internal/config -rewrite`; do not edit.\n\n")
	fmt.Fprint(w, "Environment variables are the flag in upper case with `_` for `-`, behind `ETCD_` or `ENGRAM_`.\n")
	for _, g := range table {
		fmt.Fprintf(w, "\n## %s\n\n| flag | default | file key | meaning |\n|---|---|---|---|\n", g.title)
		for i := range g.options {
			o := &g.options[i]
			fmt.Fprintf(w, "| `--%s` | `%s` | %s | %s.%s |\n", o.flag, o.value(c), o.fileKey(), upperFirst(o.help), o.note())
		}
	}
}
