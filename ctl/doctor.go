package ctl

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
)

// doctorFlags are the flags of doctor.
type doctorFlags struct {
	deep   bool
	places []string // of metrics
}

func (t *tool) doctorCommand() *cobra.Command {
	var f doctorFlags
	c := &cobra.Command{
		Use:   "doctor [options]",
		Short: "Examines the cluster, and tells what is wrong and what to do",
		Long: `Examines the members that --endpoints names and all others of their cluster, or tells why they cannot be reached. Findings come the
worst first, each with its cause and its cure. Nothing is changed. It works with etcd too; what only Engram tells is left out then,
and named at the end.

It looks at: how the endpoints are written, names, ports, TLS and certificates (also those that expire within 30 days); quorum,
leader, cluster ID, versions, learners, lag, alarms, quota, hashes of all members' data; clocks; times that disks and network took
since the members' start, leader changes, open files; large values, crowded and busy prefixes, history, leases, authentication.

A clock is told as exactly as the answer was quick; etcd's has only seconds. With authentication, the user root sees most.

Exit code: 0 nothing is wrong (there may be notes), 1 warnings, 2 errors, 3 no member could be examined.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if _, err := t.setup(c); err != nil {
				return err
			}
			if err := t.simpleOrJSON(); err != nil {
				return err
			}
			return t.doctor(c, f)
		},
	}
	c.Flags().BoolVar(&f.deep, "deep", false, "compare hashes of stores of any size")
	c.Flags().StringSliceVar(&f.places, "metrics-urls", nil, "where members serve metrics that do not so at their client URLs; http at port 2381 of their hosts is tried anyway")
	return c
}

// doctorAnswer is what doctor prints in JSON.
type doctorAnswer struct {
	Severity severity       `json:"severity"`
	Findings []finding      `json:"findings"`
	Skipped  []string       `json:"skipped"`
	Members  []doctorMember `json:"members"`
}

type doctorMember struct {
	ID       uint64 `json:"id"`
	Name     string `json:"name"`
	Endpoint string `json:"endpoint"`
	Version  string `json:"version,omitempty"`
	Engram   string `json:"engram,omitempty"`
	Leader   bool   `json:"leader"`
	Learner  bool   `json:"learner"`
	Answers  bool   `json:"answers"`
	// How far its clock is ahead of this machine's, in seconds, and how exact that is.
	ClockAhead     *float64 `json:"clock_ahead_seconds,omitempty"`
	ClockPrecision *float64 `json:"clock_precision_seconds,omitempty"`
}

func (t *tool) doctor(c *cobra.Command, f doctorFlags) error {
	cfg, err := t.clientConfig(c)
	if err != nil {
		return err
	}
	p, err := t.newProber()
	if err != nil {
		return exit(exitArguments, err)
	}
	// A connection that fails is told as a finding.
	cfg.Logger = zap.NewNop()
	ctx, stop := signal.NotifyContext(t.ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	began := time.Now()
	s := &surveyor{survey: &survey{now: p.now(), tool: t.name}, t: t, p: p, cfg: cfg, doctorFlags: f}
	defer s.close()
	s.gather(ctx)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	findings := s.findings()
	w := worst(findings)
	if t.global.writeOut == "json" {
		a := doctorAnswer{Severity: w, Findings: append([]finding{}, findings...), Skipped: append([]string{}, s.skipped...), Members: []doctorMember{}}
		for _, m := range s.members {
			a.Members = append(a.Members, m.summary())
		}
		err = (&jsonPrinter{out: t.out}).print(a)
	} else {
		for _, f := range findings {
			fmt.Fprint(t.out, f.text())
		}
		for _, text := range s.skipped {
			fmt.Fprintln(t.out, "not looked at:", text)
		}
		counts := [unreachable + 1]int{}
		for _, f := range findings {
			counts[f.Severity]++
		}
		fmt.Fprintf(t.out, "%s examined in %s: %s, %s, %s\n", plural(answering(s.members), "member"), short(time.Since(began)),
			plural(counts[failure], "error"), plural(counts[warning], "warning"), plural(counts[note], "note"))
	}
	if err == nil && w > note {
		err = exit(int(w), nil)
	}
	return err
}

func answering(members []*memberReport) (n int) {
	for _, m := range members {
		if m.status != nil {
			n++
		}
	}
	return n
}

func (m *memberReport) summary() doctorMember {
	d := doctorMember{ID: m.id, Name: m.name, Endpoint: m.endpoint, Learner: m.member.GetIsLearner(), Answers: m.status != nil}
	if m.status != nil {
		d.Version, d.Leader = m.status.Version, m.status.Leader == m.id
	}
	if m.reach != nil {
		d.Engram = m.reach.versions.Engram
	}
	if m.clock != nil {
		ahead, precision := m.clock.ahead.Seconds(), m.clock.precision.Seconds()
		d.ClockAhead, d.ClockPrecision = &ahead, &precision
	}
	return d
}
