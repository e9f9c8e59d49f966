package ctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/inspectpb"
)

// topFlags are the flags of top.
type topFlags struct {
	once     bool
	cluster  bool
	interval time.Duration
	depth    int
	limit    int
}

// minTopInterval is how often members are asked at most.
const minTopInterval = 200 * time.Millisecond

func (t *tool) topCommand() *cobra.Command {
	var f topFlags
	c := &cobra.Command{
		Use:   "top [options]",
		Short: "Shows which prefixes, keys and clients the members are busiest with",
		Long: `Shows which prefixes, keys and clients the members named by --endpoints are busiest with, summed up: reads, writes, events sent to
watchers and bytes, a second, over some ten seconds. On a terminal it goes on until it is stopped by Ctrl-C.

Members look at all requests while there are few, and at one of some when there are many: then the figures are estimates. A line
marked with ~ has come up lately, in place of others, and may be counted too high in its rank. A range is counted as its first
key, a transaction as its first operation. A prefix ends with a slash. While authentication is on, only root may ask.

Only Engram answers this. The name of a client is that of its user, or else of its certificate.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if f.interval < minTopInterval {
				return badArguments("--interval is %v: give %v or more", f.interval, minTopInterval)
			}
			if f.limit < 1 || f.depth < 1 {
				return badArguments("--limit is %d and --depth %d: give 1 or more", f.limit, f.depth)
			}
			if _, err := t.setup(c); err != nil {
				return err
			}
			if err := t.simpleOrJSON(); err != nil {
				return err
			}
			cfg, err := t.clientConfig(c)
			if err != nil {
				return err
			}
			client, err := dial(cfg)
			if err != nil {
				return err
			}
			defer closeClient(client)
			endpoints, err := t.chosenEndpoints(client, f.cluster)
			if err != nil {
				return err
			}
			members, err := dialEach(cfg, endpoints)
			if err != nil {
				return err
			}
			defer members.close()
			return t.top(members, f)
		},
	}
	fs := c.Flags()
	fs.BoolVar(&f.once, "once", false, "ask once")
	fs.BoolVar(&f.cluster, "cluster", false, "all members of the cluster, instead of --endpoints")
	fs.DurationVar(&f.interval, "interval", 2*time.Second, "how often to ask")
	fs.IntVar(&f.depth, "depth", 2, "segments of a prefix, up to 4")
	fs.IntVar(&f.limit, "limit", 10, "most lines of each list")
	return c
}

// memberClients are clients of one member each.
type memberClients struct {
	endpoints []string
	clients   []*clientv3.Client
}

func dialEach(cfg clientv3.Config, endpoints []string) (*memberClients, error) {
	m := &memberClients{}
	for _, endpoint := range endpoints {
		cfg.Endpoints = []string{endpoint}
		client, err := dial(cfg)
		if err != nil {
			m.close()
			return nil, err
		}
		m.endpoints, m.clients = append(m.endpoints, endpoint), append(m.clients, client)
	}
	return m, nil
}

func (m *memberClients) close() {
	for _, c := range m.clients {
		closeClient(c)
	}
}

// topAnswer is what the members answered, as it is printed in JSON.
type topAnswer struct {
	Members []topMember `json:"members"`
}

type topMember struct {
	Endpoint string  `json:"endpoint"`
	Error    string  `json:"error,omitempty"`
	Member   uint64  `json:"member_id,omitempty"`
	Window   float64 `json:"window_seconds"`
	Sampling int64   `json:"sampling"`
	topLists
}

type topLists struct {
	Total    topRow   `json:"total"`
	Prefixes []topRow `json:"prefixes"`
	Keys     []topRow `json:"keys"`
	Clients  []topRow `json:"clients"`
}

type topRow struct {
	Name   string  `json:"name,omitempty"`
	Reads  float64 `json:"reads"`
	Writes float64 `json:"writes"`
	Events float64 `json:"events"`
	Bytes  float64 `json:"bytes"`
	Doubt  float64 `json:"doubt,omitempty"`
}

// top asks and prints until it is told to stop.
func (t *tool) top(members *memberClients, f topFlags) error {
	ctx, stop := signal.NotifyContext(t.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	out, ok := t.stdout.(*os.File)
	screen := ok && isTerminal(out) && !f.once && t.global.writeOut == "simple"
	ticker := time.NewTicker(f.interval)
	defer ticker.Stop()
	for {
		answer, err := t.askTop(ctx, members, f)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if screen {
			fmt.Fprint(t.out, "\x1b[H\x1b[2J") // to the upper left corner, and clear all
		}
		if t.global.writeOut == "json" {
			err = (&jsonPrinter{out: t.out}).print(answer)
		} else {
			answer.print(t, f.limit)
		}
		if err = errors.Join(err, t.out.Flush()); err != nil || f.once {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// askTop asks all members at once. It fails if none answers.
func (t *tool) askTop(ctx context.Context, members *memberClients, f topFlags) (*topAnswer, error) {
	answer := &topAnswer{Members: make([]topMember, len(members.clients))}
	errs := make([]error, len(members.clients))
	var asking sync.WaitGroup
	for i, client := range members.clients {
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, t.global.commandTimeout)
			defer cancel()
			// Lists are summed up over members, so each tells some more than are printed.
			r, err := inspectpb.NewInspectClient(client.ActiveConnection()).Top(ctx, &inspectpb.TopRequest{
				Depth: int32(min(f.depth, 1<<20)), Limit: int32(min(3*f.limit, 256)),
			})
			m := &answer.Members[i]
			if m.Endpoint, errs[i] = members.endpoints[i], err; err != nil {
				m.Error = err.Error()
				return
			}
			m.Member, m.Window, m.Sampling = r.MemberId, r.WindowSeconds, r.Sampling
			m.topLists = topLists{Total: newTopRow(r.Total, ""), Prefixes: topRows(r.Prefixes), Keys: topRows(r.Keys), Clients: topRows(r.Clients)}
		})
	}
	asking.Wait()
	for i := range errs {
		if status.Code(errs[i]) == codes.Unimplemented {
			errs[i] = fmt.Errorf("%s is no Engram and does not count what it is busy with: %w", members.endpoints[i], errs[i])
		}
		if errs[i] == nil {
			return answer, nil
		}
	}
	return nil, errors.Join(errs...)
}

func newTopRow(r *inspectpb.TopRow, name string) topRow {
	return topRow{name, r.GetReads(), r.GetWrites(), r.GetEvents(), r.GetBytes(), r.GetDoubt()}
}

func topRows(rows []*inspectpb.TopRow) []topRow {
	out := []topRow{}
	for _, r := range rows {
		name := shown(r.Name)
		if len(r.Name) == 0 {
			name = "(all keys)"
		}
		out = append(out, newTopRow(r, name))
	}
	return out
}

// sum is all members' lists in one.
func (a *topAnswer) sum() topLists {
	var s topLists
	for i := range a.Members {
		m := &a.Members[i]
		s.Total.add(m.Total)
		s.Prefixes, s.Keys, s.Clients = sumRows(s.Prefixes, m.Prefixes), sumRows(s.Keys, m.Keys), sumRows(s.Clients, m.Clients)
	}
	return s
}

func (r *topRow) add(o topRow) {
	r.Reads += o.Reads
	r.Writes += o.Writes
	r.Events += o.Events
	r.Bytes += o.Bytes
	r.Doubt = max(r.Doubt, o.Doubt)
}

// weight ranks rows as members do: a request counts like 4 KiB.
func (r *topRow) weight() float64 { return r.Reads + r.Writes + r.Events + r.Bytes/4096 }

func sumRows(a, b []topRow) []topRow {
	for _, row := range b {
		if i := slices.IndexFunc(a, func(have topRow) bool { return have.Name == row.Name }); i >= 0 {
			a[i].add(row)
		} else {
			a = append(a, row)
		}
	}
	return a
}

// doubtful is the part of a row's rank from which on it is marked.
const doubtful = 0.5

// print writes the lists for people.
func (a *topAnswer) print(t *tool, limit int) {
	s := a.sum()
	window, sampling, silent := 0.0, int64(1), 0
	for _, m := range a.Members {
		window, sampling = max(window, m.Window), max(sampling, m.Sampling)
		if m.Error != "" {
			silent++
			fmt.Fprintf(t.err, "%s does not answer: %s\n", m.Endpoint, m.Error)
		}
	}
	fmt.Fprintf(t.out, "%s: %.0f reads, %.0f writes, %.0f events, %s a second, over %.0f s", plural(len(a.Members)-silent, "member"),
		s.Total.Reads, s.Total.Writes, s.Total.Events, bytesText(int64(s.Total.Bytes)), window)
	if sampling > 1 {
		fmt.Fprintf(t.out, " (estimated from one of %d)", sampling)
	}
	fmt.Fprintln(t.out)
	for _, list := range []struct {
		title string
		rows  []topRow
	}{{"PREFIX", s.Prefixes}, {"KEY", s.Keys}, {"CLIENT", s.Clients}} {
		slices.SortStableFunc(list.rows, func(a, b topRow) int { return cmp.Compare(b.weight(), a.weight()) })
		c := newColumns("READS/s", "WRITES/s", "EVENTS/s", "BYTES/s", list.title)
		for _, r := range list.rows[:min(limit, len(list.rows))] {
			name := r.Name
			if r.Doubt > doubtful {
				name = "~" + name
			}
			c.add(rate(r.Reads), rate(r.Writes), rate(r.Events), bytesText(int64(r.Bytes)), name)
		}
		fmt.Fprintln(t.out)
		c.write(t.out)
	}
}

// rate writes a rate with a digit behind the point where it is low.
func rate(r float64) string {
	if r < 9.95 {
		return fmt.Sprintf("%.1f", r)
	}
	return fmt.Sprintf("%.0f", r)
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
