package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/compat/internal/wire"
)

// Pair is the reference (index 0) and the subject (index 1), started with equal flags.
type Pair [2]*Side

// Side is one server of a Pair and the words for what it may call its own.
type Side struct {
	*Server
	Names *wire.Names

	words []string // what Names.Strings replaces: old, new, old, new
}

// StartPair starts both programs, each in a directory of its own below dir.
func StartPair(reference, subject, dir string, flags ...string) (*Pair, error) {
	var p Pair
	err := p.Each(func(i int, _ *Side) error {
		program, name := reference, "reference"
		if i == 1 {
			program, name = subject, "subject"
		}
		own := filepath.Join(dir, name)
		if err := os.MkdirAll(own, 0o700); err != nil {
			return err
		}
		// Both members carry the same name, since it is part of answers.
		server, err := Start(Options{Program: program, Dir: own, Name: "m", Flags: flags})
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		p[i] = &Side{Server: server, Names: &wire.Names{Numbers: make(map[uint64]string)}}
		return p[i].identify()
	})
	if err != nil {
		p.Close()
		return nil, err
	}
	return &p, nil
}

// Each calls fn for both sides at once and waits for both.
func (p *Pair) Each(fn func(i int, s *Side) error) error {
	var wg sync.WaitGroup
	var errs [2]error
	for i, s := range p {
		wg.Go(func() { errs[i] = fn(i, s) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// Restart ends both members, gracefully or with SIGKILL, and starts them again.
func (p *Pair) Restart(kill bool) error {
	return p.Each(func(_ int, s *Side) error {
		end := s.Stop
		if kill {
			end = s.Kill
		}
		if err := end(); err != nil {
			return err
		}
		return s.Server.Restart()
	})
}

// Close ends both members.
func (p *Pair) Close() {
	p.Each(func(_ int, s *Side) error {
		if s != nil {
			s.Close()
		}
		return nil
	})
}

// Name makes text and numbers equal to value print as word from now on.
func (s *Side) Name(value any, word string) {
	switch v := value.(type) {
	case uint64:
		s.Names.Numbers[v] = word
	case string:
		s.words = append(s.words, v, word)
		s.Names.Strings = strings.NewReplacer(s.words...)
	}
}

func (s *Side) identify() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	answer, err := etcdserverpb.NewMaintenanceClient(s.Conn()).Status(ctx, &etcdserverpb.StatusRequest{})
	if err != nil {
		return err
	}
	s.Names.Cluster, s.Names.Member = answer.GetHeader().GetClusterId(), answer.GetHeader().GetMemberId()
	if s.Names.Cluster == 0 || s.Names.Member == 0 {
		return fmt.Errorf("%s: Status answers cluster %x, member %x: both must be set", s.ClientURL, s.Names.Cluster, s.Names.Member)
	}
	s.Name(s.ClientURL, "$client")
	s.Name(s.PeerURL, "$peer")
	s.Name(fmt.Sprint(s.Names.Member), "$member") // in alarm texts
	return nil
}
