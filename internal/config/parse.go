package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// ErrHelp and ErrVersion say that the arguments asked for a text rather than a
// member.
var (
	ErrHelp    = errors.New("help requested")
	ErrVersion = errors.New("version requested")
	// ErrUsage marks arguments that make no sense: the caller prints the usage
	// and exits with status 2. Every other error exits with 1.
	ErrUsage = errors.New("bad usage")
)

// Default returns the configuration of a member started without options.
func Default(calledAs string) *Config {
	c := &Config{CalledAs: calledAs, set: map[string]bool{}}
	for o := range options() {
		if o.def == "" {
			continue
		}
		if err := o.value(c).Set(o.def); err != nil {
			panic(fmt.Sprintf("config: default of --%s: %v", o.flag, err))
		}
	}
	return c
}

func options() func(yield func(*option) bool) {
	return func(yield func(*option) bool) {
		for g := range table {
			for i := range table[g].options {
				if !yield(&table[g].options[i]) {
					return
				}
			}
		}
	}
}

// Parse reads arguments (without the program's name) and environment (as
// os.Environ has it). A config file replaces all other options, as in etcd.
// The result is complete but not yet checked: see Validate.
func Parse(calledAs string, args, environ []string) (*Config, error) {
	c := Default(calledAs)
	byFlag, err := c.parseFlags(args)
	if err != nil {
		return nil, err
	}
	if c.ConfigFile == "" {
		c.ConfigFile = lookup(environ, "ETCD_CONFIG_FILE", "ENGRAM_CONFIG_FILE")
	}
	if c.ConfigFile != "" {
		file := c.ConfigFile
		if len(byFlag) > 0 {
			c.Warnings = append(c.Warnings, "a config file is given: all other flags and environment variables are ignored")
		}
		warnings := c.Warnings
		c = Default(calledAs)
		c.ConfigFile, c.Warnings = file, warnings
		if err := c.readFile(file); err != nil {
			return nil, err
		}
	} else if err := c.readEnvironment(environ, byFlag); err != nil {
		return nil, err
	}
	c.fillIn()
	return c, nil
}

func (c *Config) parseFlags(args []string) (map[string]string, error) {
	fs := flag.NewFlagSet(c.CalledAs, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	for o := range options() {
		fs.Var(o.value(c), o.flag, o.help)
	}
	fs.StringVar(&c.ConfigFile, "config-file", "", "path of a config file (YAML or JSON); it replaces all other options")
	version := fs.Bool("version", false, "print the version and exit")
	for _, name := range ignoredFlags {
		fs.Var(ignored{}, name, "")
	}
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return nil, ErrHelp
	case err != nil:
		return nil, fmt.Errorf("%w: %w", err, ErrUsage)
	case *version:
		return nil, ErrVersion
	case fs.NArg() > 0:
		return nil, fmt.Errorf("%q is not a valid flag", fs.Arg(0))
	}
	given := map[string]string{}
	fs.Visit(func(f *flag.Flag) {
		given[f.Name] = f.Value.String()
		c.set[f.Name] = true
		if slices.Contains(ignoredFlags, f.Name) {
			c.Warnings = append(c.Warnings, fmt.Sprintf("--%s is a flag of an old release and has no effect", f.Name))
		}
	})
	return given, nil
}

type ignored struct{}

func (ignored) Set(string) error { return nil }
func (ignored) String() string   { return "" }

// IsBoolFlag lets an ignored flag stand bare.
func (ignored) IsBoolFlag() bool { return true }

func lookup(environ []string, names ...string) string {
	for _, kv := range environ {
		name, val, _ := strings.Cut(kv, "=")
		if slices.Contains(names, name) && val != "" {
			return val
		}
	}
	return ""
}

// toleratedEnv are variables of etcd that are no options.
var toleratedEnv = []string{"CONFIG_FILE", "UNSUPPORTED_ARCH", "VERIFY"}

func (c *Config) readEnvironment(environ []string, byFlag map[string]string) error {
	known := map[string]*option{}
	for o := range options() {
		known[o.env()] = o
	}
	from := map[string]string{} // option → the variable that set it
	for _, kv := range environ {
		name, val, _ := strings.Cut(kv, "=")
		bare, ok := strings.CutPrefix(name, "ETCD_")
		if !ok {
			bare, ok = strings.CutPrefix(name, "ENGRAM_")
		}
		if !ok || slices.Contains(toleratedEnv, bare) {
			continue
		}
		o := known[bare]
		if o == nil {
			c.Warnings = append(c.Warnings, fmt.Sprintf("unrecognized environment variable %s=%s", name, val))
			continue
		}
		if val == "" {
			continue
		}
		if _, both := byFlag[o.flag]; both {
			return fmt.Errorf("conflicting environment variable is shadowed by corresponding command-line flag (either unset environment variable or disable flag): environment variable %s, flag --%s", name, o.flag)
		}
		if other, twice := from[o.flag]; twice {
			return fmt.Errorf("environment variables %s and %s set the same option; unset one of them", other, name)
		}
		from[o.flag] = name
		if err := o.value(c).Set(val); err != nil {
			return fmt.Errorf("invalid value %q for %s: %w", val, name, err)
		}
		c.set[o.flag] = true
	}
	return nil
}

func (c *Config) readFile(path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("config file: %w", err)
	}
	var tree map[string]any
	if err := yaml.Unmarshal(raw, &tree); err != nil {
		return fmt.Errorf("config file %s: %w", path, err)
	}
	known := map[string]*option{}
	for o := range options() {
		if o.fileKey() != "-" {
			known[o.fileKey()] = o
		}
	}
	flat := map[string]any{}
	flatten("", tree, known, flat)
	for _, key := range slices.Sorted(mapKeys(flat)) {
		o := known[key]
		if o == nil {
			c.Warnings = append(c.Warnings, fmt.Sprintf("config file %s: unknown key %s is ignored", path, key))
			continue
		}
		v := o.value(c)
		text, err := fileText(v, flat[key])
		if err == nil && text != "" {
			err = v.Set(text)
		}
		if err != nil {
			return fmt.Errorf("config file %s: invalid value %v for %s: %w", path, flat[key], key, err)
		}
		c.set[o.flag] = true
	}
	return nil
}

func mapKeys(m map[string]any) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// flatten turns nested blocks into dotted keys. A map that is an option's own
// value (feature-gates may be one) stays whole.
func flatten(prefix string, in map[string]any, known map[string]*option, out map[string]any) {
	for k, v := range in {
		key := prefix + k
		if m, ok := v.(map[string]any); ok && known[key] == nil {
			flatten(key+".", m, known, out)
			continue
		}
		out[key] = v
	}
}

// fileText turns a value of the file into the text that the option reads.
// Durations are whole nanoseconds there (surface.md, section 3).
func fileText(v value, in any) (string, error) {
	switch x := in.(type) {
	case nil:
		return "", nil
	case string:
		return x, nil
	case bool:
		return strconv.FormatBool(x), nil
	case float64:
		n := int64(x)
		if float64(n) != x {
			return "", errors.New("want a whole number")
		}
		if _, ok := v.(duration); ok {
			return time.Duration(n).String(), nil
		}
		return strconv.FormatInt(n, 10), nil
	case []any:
		parts := make([]string, len(x))
		for i := range x {
			parts[i] = fmt.Sprint(x[i])
		}
		return strings.Join(parts, ","), nil
	case map[string]any:
		var parts []string
		for _, k := range slices.Sorted(mapKeys(x)) {
			parts = append(parts, fmt.Sprintf("%s=%v", k, x[k]))
		}
		return strings.Join(parts, ","), nil
	}
	return "", fmt.Errorf("cannot read a %T", in)
}

// fillIn gives options that depend on others their defaults.
func (c *Config) fillIn() {
	if c.DataDir == "" {
		suffix := ".engram"
		if c.CalledAs == "etcd" {
			suffix = ".etcd"
		}
		c.DataDir = c.Name + suffix
	}
	if c.InitialCluster == "" {
		parts := make([]string, len(c.AdvertisePeer))
		for i := range c.AdvertisePeer {
			parts[i] = c.Name + "=" + c.AdvertisePeer[i].String()
		}
		c.InitialCluster = strings.Join(parts, ",")
	}
}
