package ctl

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

func (t *tool) lockCommand() *cobra.Command {
	var ttl int
	c := &cobra.Command{
		Use:   "lock <lockname> [exec-command arg1 arg2 ...]",
		Short: "Acquires a named lock",
		Long: `Acquires a lock and holds it until interrupted, or while a command runs.

The command finds the key of the lock in ETCD_LOCK_KEY and the revision at which it was acquired in ETCD_LOCK_REV.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return badArguments("lock takes a lock name argument and an optional command to execute")
			}
			client, p, err := t.connectLasting(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			return t.lock(client, p, ttl, args[0], args[1:])
		},
	}
	c.Flags().IntVar(&ttl, "ttl", defaultLockTTL, "seconds after which the lock is free if this command is gone")
	return c
}

const defaultLockTTL = 10

// errSessionExpired is the end of a lock or a leadership that was not given up.
var errSessionExpired = errors.New("session expired")

// interrupted is a context that also ends at a signal to end the process.
func (t *tool) interrupted() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(t.ctx, syscall.SIGINT, syscall.SIGTERM)
}

// release bounds giving up a lock or a leadership, when the command itself is already being ended.
func (t *tool) release() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(t.ctx), t.global.commandTimeout)
}

// awaitTurn waits for a lock or a leadership until the session ends.
func (t *tool) awaitTurn(ctx context.Context, session *concurrency.Session, wait func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	goesOn := context.AfterFunc(session.Ctx(), func() {
		if t.ctx.Err() != nil {
			return
		}
		cancel(errSessionExpired)
		closeClient(session.Client()) // else wait, ending, would try for ever to delete its key
	})
	err := wait(ctx)
	switch {
	case !goesOn() && t.ctx.Err() == nil:
		return errSessionExpired
	case err != nil && ctx.Err() != nil:
		return context.Canceled
	}
	return err
}

// endSession gives the lease of a session back, if there is one still. Otherwise it runs out.
func endSession(session *concurrency.Session) {
	select {
	case <-session.Done():
	default:
		_ = session.Close()
	}
}

func (t *tool) lock(client *clientv3.Client, p printer, ttl int, name string, command []string) (err error) {
	session, err := concurrency.NewSession(client, concurrency.WithTTL(ttl))
	if err != nil {
		return err
	}
	defer endSession(session)
	ctx, stop := t.interrupted()
	defer stop()
	mutex := concurrency.NewMutex(session, name)
	if err := t.awaitTurn(ctx, session, mutex.Lock); err != nil {
		return err
	}
	defer func() {
		ctx, cancel := t.release()
		defer cancel()
		if unlockErr := mutex.Unlock(ctx); err == nil {
			err = unlockErr
		}
	}()
	if len(command) > 0 {
		return t.runLocked(mutex, command)
	}
	get, cancel := t.commandContext()
	defer cancel()
	r, err := client.Get(get, mutex.Key())
	if err != nil {
		return err
	}
	if len(r.Kvs) == 0 {
		return errors.New("lock lost on init")
	}
	if err := p.get(r); err != nil {
		return err
	}
	if err := t.out.Flush(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-session.Done():
		return errSessionExpired
	}
}

// runLocked runs a command while the lock is held. Its exit code becomes ours. A signal to end us reaches it too, from the
// terminal, so it is waited for.
func (t *tool) runLocked(mutex *concurrency.Mutex, command []string) error {
	c := exec.Command(command[0], command[1:]...)
	c.Stdin, c.Stdout, c.Stderr = t.stdin, t.stdout, t.err
	c.Env = append(slices.Clone(t.env),
		"ETCD_LOCK_KEY="+mutex.Key(),
		"ETCD_LOCK_REV="+strconv.FormatInt(mutex.Header().GetRevision(), 10))
	err := c.Run()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		code := e.ExitCode()
		if code < 0 { // ended by a signal
			code = exitBySignal
		}
		return exit(code, err)
	}
	return err
}

const exitBySignal = 255

func (t *tool) electCommand() *cobra.Command {
	var listen bool
	c := &cobra.Command{
		Use:   "elect <election-name> [proposal]",
		Short: "Observes and participates in leader election",
		Long:  "Stands for election with a proposal and leads until interrupted; or, with -l, prints each leader.",
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case len(args) != 1 && len(args) != 2:
				return badArguments("elect takes one election name argument and an optional proposal argument")
			case listen && len(args) == 2:
				return badArguments("proposal given but -l is set")
			}
			if !listen && len(args) == 1 {
				return badArguments("no proposal argument but -l not set")
			}
			client, p, err := t.connectLasting(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			session, err := concurrency.NewSession(client)
			if err != nil {
				return err
			}
			defer endSession(session)
			election := concurrency.NewElection(session, args[0])
			if listen {
				return t.observe(session, election, p)
			}
			return t.campaign(session, election, p, args[1])
		},
	}
	c.Flags().BoolVarP(&listen, "listen", "l", false, "print each leader")
	return c
}

// observe prints leaders until interrupted.
func (t *tool) observe(session *concurrency.Session, election *concurrency.Election, p printer) error {
	ctx, stop := t.interrupted()
	defer stop()
	leaders := election.Observe(ctx)
	for {
		select {
		case r, ok := <-leaders:
			if !ok {
				if ctx.Err() != nil {
					return nil
				}
				return errors.New("the observation of the election ended; look at the server's log")
			}
			if err := p.get(r); err != nil {
				return err
			}
			if err := t.out.Flush(); err != nil {
				return err
			}
		case <-session.Done():
			if ctx.Err() != nil {
				return nil
			}
			return errSessionExpired
		}
	}
}

// campaign leads, once it is its turn, until interrupted.
func (t *tool) campaign(session *concurrency.Session, election *concurrency.Election, p printer, proposal string) (err error) {
	ctx, stop := t.interrupted()
	defer stop()
	campaign := func(ctx context.Context) error { return election.Campaign(ctx, proposal) }
	if err := t.awaitTurn(ctx, session, campaign); err != nil {
		return err
	}
	defer func() {
		ctx, cancel := t.release()
		defer cancel()
		if resignErr := election.Resign(ctx); err == nil {
			err = resignErr
		}
	}()
	get, cancel := t.commandContext()
	defer cancel()
	r, err := session.Client().Get(get, election.Key())
	if err != nil {
		return err
	}
	if len(r.Kvs) == 0 {
		return fmt.Errorf("leadership lost at once: key %q is gone", election.Key())
	}
	if err := p.get(r); err != nil {
		return err
	}
	if err := t.out.Flush(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-session.Done():
		return errSessionExpired
	}
}
