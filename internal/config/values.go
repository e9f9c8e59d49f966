package config

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
)

// value reads and prints one option. It has flag.Value's methods.
type value interface {
	Set(string) error
	String() string
}

type text struct{ p *string }

func (v text) Set(s string) error { *v.p = s; return nil }
func (v text) String() string     { return *v.p }

type boolean struct{ p *bool }

func (v boolean) Set(s string) error {
	b, err := strconv.ParseBool(s)
	if err != nil {
		return errors.New("want true or false")
	}
	*v.p = b
	return nil
}
func (v boolean) String() string   { return strconv.FormatBool(*v.p) }
func (v boolean) IsBoolFlag() bool { return true }

type integer interface {
	~int | ~int64 | ~uint | ~uint32 | ~uint64
}

type number[T integer] struct{ p *T }

func (v number[T]) Set(s string) error {
	var zero T
	if zero-1 < 0 {
		n, err := strconv.ParseInt(s, 0, 64)
		if err != nil {
			return errors.New("want a whole number")
		}
		*v.p = T(n)
		return nil
	}
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil || T(n) < 0 || uint64(T(n)) != n {
		return fmt.Errorf("want a whole number from 0 to %d", uint64(^zero))
	}
	*v.p = T(n)
	return nil
}
func (v number[T]) String() string {
	if n := uint64(*v.p); *v.p > 0 && n == math.MaxUint32 {
		return "math.MaxUint32"
	}
	return fmt.Sprint(*v.p)
}

type duration struct{ p *time.Duration }

func (v duration) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil {
		return errors.New("want a duration such as 100ms, 5s or 2h")
	}
	*v.p = d
	return nil
}
func (v duration) String() string { return v.p.String() }

type list struct{ p *[]string }

func (v list) Set(s string) error {
	*v.p = nil
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			*v.p = append(*v.p, part)
		}
	}
	return nil
}
func (v list) String() string { return strings.Join(*v.p, ",") }

type choice struct {
	p       *string
	allowed []string
}

func (v choice) Set(s string) error {
	if !slices.Contains(v.allowed, s) {
		return fmt.Errorf("want one of %s", strings.Join(v.allowed, ", "))
	}
	*v.p = s
	return nil
}
func (v choice) String() string { return *v.p }

// urls is a comma-separated list of URLs with scheme http, https, unix or unixs.
type urls struct{ p *[]url.URL }

func (v urls) Set(s string) error {
	var out []url.URL
	for part := range strings.SplitSeq(s, ",") {
		u, err := parseURL(strings.TrimSpace(part))
		if err != nil {
			return err
		}
		out = append(out, *u)
	}
	slices.SortFunc(out, func(a, b url.URL) int { return strings.Compare(a.String(), b.String()) })
	*v.p = out
	return nil
}

func (v urls) String() string { return JoinURLs(*v.p) }

// JoinURLs prints a list of URLs as options take it.
func JoinURLs(us []url.URL) string {
	parts := make([]string, len(us))
	for i := range us {
		parts[i] = us[i].String()
	}
	return strings.Join(parts, ",")
}

func parseURL(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil {
		return nil, err
	}
	switch u.Scheme {
	case "http", "https":
		if _, _, err := net.SplitHostPort(u.Host); err != nil {
			return nil, fmt.Errorf(`URL address does not have the form "host:port": %s`, s)
		}
		if u.Path != "" {
			return nil, fmt.Errorf("URL must not contain a path: %s", s)
		}
	case "unix", "unixs":
		if u.Host+u.Path == "" {
			return nil, fmt.Errorf("URL names no socket file: %s", s)
		}
	default:
		return nil, fmt.Errorf("URL scheme must be http, https, unix, or unixs: %s", s)
	}
	return u, nil
}

// Budget is a number of bytes, or a share of the memory this process may use.
type Budget struct {
	Bytes   int64
	Percent int64
}

// Of returns the budget in bytes when total bytes of memory may be used.
func (b Budget) Of(total int64) int64 {
	if b.Bytes > 0 {
		return b.Bytes
	}
	return total / 100 * b.Percent
}

type budget struct{ p *Budget }

func (v budget) Set(s string) error {
	if p, ok := strings.CutSuffix(s, "%"); ok {
		n, err := strconv.ParseInt(p, 10, 64)
		if err != nil || n < 1 || n > 90 {
			return errors.New("want a share from 1% to 90%")
		}
		*v.p = Budget{Percent: n}
		return nil
	}
	n, err := humanize.ParseBytes(s)
	if err != nil || n < 64<<20 || n > math.MaxInt64 {
		return errors.New("want a size of at least 64MiB such as 2GiB, or a share such as 50%")
	}
	*v.p = Budget{Bytes: int64(n)}
	return nil
}

func (v budget) String() string {
	if v.p.Percent != 0 {
		return fmt.Sprintf("%d%%", v.p.Percent)
	}
	return humanize.IBytes(uint64(v.p.Bytes))
}

type size struct{ p *int64 }

func (v size) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil || n > math.MaxInt64 || n != 0 && n < 1<<20 {
		return errors.New("want a size of at least 1MiB such as 256MiB, or 0")
	}
	*v.p = int64(n)
	return nil
}
func (v size) String() string { return strings.ReplaceAll(humanize.IBytes(uint64(*v.p)), " ", "") }

// Gates are feature gates by name. Only those that were set are present.
type Gates map[string]bool

// gateDefaults lists etcd's gates with their default and stage (surface.md, section
// 3.1). The two that compare hashes are off in etcd.
var gateDefaults = map[string]struct {
	on    bool
	stage string
}{
	"AllAlpha":                     {false, "ALPHA"},
	"AllBeta":                      {false, "BETA"},
	"CompactHashCheck":             {true, "ALPHA"},
	"FastLeaseKeepAlive":           {true, "BETA"},
	"InitialCorruptCheck":          {true, "ALPHA"},
	"LeaseCheckpoint":              {false, "ALPHA"},
	"LeaseCheckpointPersist":       {false, "ALPHA"},
	"PriorityRequest":              {false, "ALPHA"},
	"SetMemberLocalAddr":           {false, "ALPHA"},
	"StopGRPCServiceOnDefrag":      {false, "ALPHA"},
	"TxnModeWriteWithSharedBuffer": {true, "BETA"},
}

type gates struct{ p *Gates }

func (v gates) Set(s string) error {
	out := Gates{}
	for part := range strings.SplitSeq(s, ",") {
		if part == "" {
			continue
		}
		name, val, _ := strings.Cut(strings.TrimSpace(part), "=")
		if _, ok := gateDefaults[name]; !ok {
			return fmt.Errorf("unrecognized feature gate: %s", name)
		}
		on, err := strconv.ParseBool(val)
		if err != nil {
			return fmt.Errorf("invalid value of %s=%s, want true or false", name, val)
		}
		out[name] = on
	}
	*v.p = out
	return nil
}

func (v gates) String() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(*v.p)) {
		parts = append(parts, fmt.Sprintf("%s=%t", name, (*v.p)[name]))
	}
	return strings.Join(parts, ",")
}

// Gate is one feature gate as it stands.
type Gate struct {
	Name, Stage string
	On          bool
}

// List returns every gate with its effective state.
func (g Gates) List() []Gate {
	var out []Gate
	for _, name := range slices.Sorted(maps.Keys(gateDefaults)) {
		d := gateDefaults[name]
		on := d.on
		if d.stage == "ALPHA" && g["AllAlpha"] || d.stage == "BETA" && g["AllBeta"] {
			on = true
		}
		if set, ok := g[name]; ok {
			on = set
		}
		out = append(out, Gate{Name: name, Stage: d.stage, On: on})
	}
	return out
}

// On says whether a gate is on.
func (g Gates) On(name string) bool {
	return slices.ContainsFunc(g.List(), func(gate Gate) bool { return gate.Name == name && gate.On })
}
