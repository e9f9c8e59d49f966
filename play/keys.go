package play

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	callWithin     = 10 * time.Second // of a put or get; an election fits in
	hopelessWithin = 3 * time.Second  // of one that cannot be answered, for want of a majority
)

// callOptions are the flags of put and get.
type callOptions struct {
	at           string
	serializable bool
}

// cutOptions takes the flags off the end or the front of what was typed after put or get.
func cutOptions(rest string) (o callOptions, left string, err error) {
	words := strings.Fields(rest)
	front := 0
	for front < len(words) && strings.HasPrefix(words[front], "--") {
		n, err := o.take(words[front:])
		if err != nil {
			return o, "", err
		}
		front += n
	}
	for range front {
		_, rest, _ = strings.Cut(strings.TrimSpace(rest), " ")
	}
	rest = strings.TrimSpace(rest)
	for { // at the end
		words = strings.Fields(rest)
		n := 0
		if len(words) > 1 && words[len(words)-1] == "--serializable" {
			n = 1
		} else if len(words) > 2 && words[len(words)-2] == "--at" {
			n = 2
		}
		if n == 0 {
			return o, rest, nil
		}
		if _, err := o.take(words[len(words)-n:]); err != nil {
			return o, "", err
		}
		for range n {
			rest = strings.TrimSpace(rest[:strings.LastIndexAny(rest, " \t")])
		}
	}
}

// take reads a flag and says how many words it had.
func (o *callOptions) take(words []string) (int, error) {
	switch {
	case words[0] == "--serializable":
		o.serializable = true
		return 1, nil
	case words[0] == "--at" && len(words) > 1:
		o.at = words[1]
		return 2, nil
	}
	return 0, fmt.Errorf("%s is no option here: there are --serializable and --at N", words[0])
}

func (p *player) put(ctx context.Context, args []string) error {
	o, rest, err := cutOptions(args[0])
	if err != nil {
		return err
	}
	key, value, ok := strings.Cut(rest, " ")
	if !ok || o.serializable {
		return errors.New("put is to be typed as: put K V [--at N]")
	}
	return p.call(ctx, "put", o, func(ctx context.Context, client *clientv3.Client) error {
		began := time.Now()
		r, err := client.Put(ctx, key, strings.TrimSpace(value))
		if err == nil {
			p.say("OK: revision %d, by %s in %s", r.Header.GetRevision(), p.nameOf(r.Header.GetMemberId()), millis(time.Since(began)))
		}
		return err
	})
}

func (p *player) get(ctx context.Context, args []string) error {
	o, key, err := cutOptions(args[0])
	if err != nil {
		return err
	}
	if key == "" || strings.Contains(key, " ") {
		return errors.New("get is to be typed as: get K [--serializable] [--at N]")
	}
	var options []clientv3.OpOption
	kind := "linearizable"
	if o.serializable {
		options, kind = append(options, clientv3.WithSerializable()), "serializable"
	}
	return p.call(ctx, "get", o, func(ctx context.Context, client *clientv3.Client) error {
		began := time.Now()
		r, err := client.Get(ctx, key, options...)
		if err != nil {
			return err
		}
		by := fmt.Sprintf("%s read by %s at revision %d in %s", kind, p.nameOf(r.Header.GetMemberId()), r.Header.GetRevision(), millis(time.Since(began)))
		if len(r.Kvs) == 0 {
			p.say("%s does not exist (%s)", key, by)
			return nil
		}
		p.say("%s = %s (revision %d; %s)", key, r.Kvs[0].Value, r.Kvs[0].ModRevision, by)
		return nil
	})
}

func millis(d time.Duration) string {
	if d >= time.Second {
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}

// call does f with a client of the members that are up, or of one, and explains its failure.
func (p *player) call(ctx context.Context, what string, o callOptions, f func(context.Context, *clientv3.Client) error) error {
	return p.callWithin(ctx, what, o, callWithin, f)
}

// callWithin is call with another limit, for when there is a majority.
func (p *player) callWithin(ctx context.Context, what string, o callOptions, within time.Duration, f func(context.Context, *clientv3.Client) error) error {
	endpoints := p.cluster.clientEndpoints()
	q := p.cluster.quorum()
	hopeless := !q.majority()
	if o.at != "" {
		m, err := p.cluster.find(o.at)
		if err != nil {
			return err
		}
		if s := p.state(m); !p.runs(m) || strings.HasPrefix(s, string(paused)) {
			return fmt.Errorf("%s cannot answer: it is %s. Type %s", m.name, s, p.cure(m))
		}
		endpoints = []string{p.clientURL(m)}
		hopeless = hopeless || p.cluster.isCut(m)
	}
	if len(endpoints) == 0 {
		return fmt.Errorf("%s failed: no member runs that could answer (%s). %s", what, q.missing(), upper(q.cures()))
	}
	if hopeless {
		within = hopelessWithin
	}
	client, err := newClient(endpoints...)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // the answer is there, or will not come
	began := time.Now()
	callCtx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := f(callCtx, client); err != nil {
		return p.explain(what, o, err, time.Since(began))
	}
	return nil
}

// explain says why a call failed, and what helps.
func (p *player) explain(what string, o callOptions, err error, took time.Duration) error {
	text := fmt.Sprintf("%s failed after %.1f s (%s)", what, took.Seconds(), plainError(err))
	needs := "a write needs"
	if what == "get" {
		needs = "a linearizable read needs"
	}
	unknown := ""
	if what == "put" && plainError(err) == noAnswer {
		unknown = ". A write without an answer may have been done, or be done later"
	}
	q := p.cluster.quorum()
	if o.at != "" {
		if m, ferr := p.cluster.find(o.at); ferr == nil && p.cluster.isCut(m) {
			return fmt.Errorf("%s: %s is cut off, and %s a majority of the voters. Type heal %s, or ask the others; get --serializable answers what it has%s",
				text, m.name, needs, m.name, unknown)
		}
	}
	if !o.serializable && !q.majority() {
		return fmt.Errorf("%s: no majority: %d of %s up, %s %d; missing: %s.\n%s. Meanwhile get --serializable answers%s",
			text, len(q.up), count(q.voters, "voter"), needs, q.needed(), q.missing(), upper(q.cures()), unknown)
	}
	return fmt.Errorf("%s: %s See status, and try again%s", text, q.words(), unknown)
}

const noAnswer = "no answer"

// plainError is what a client's error says, without the words around it.
func plainError(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return noAnswer
	}
	if s, ok := status.FromError(err); ok && s.Code() != codes.OK {
		if s.Code() == codes.DeadlineExceeded {
			return noAnswer
		}
		return s.Message()
	}
	return err.Error()
}

// nameOf is the name of a member by its ID.
func (p *player) nameOf(id uint64) string {
	members := p.cluster.which(func(m *member) bool { return m.id == id })
	if i := slices.IndexFunc(members, func(m *member) bool { return m.id == id }); i >= 0 {
		return members[i].name
	}
	return fmt.Sprintf("member %x", id)
}
