package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	streaming = "streaming"
	saving    = "saving"

	residentEvery = 10 * time.Millisecond
)

// backup is the p99 of puts while a backup is taken: by a client that drops it, so that only the server has work, and by one that
// saves and checks it on the server's own disk.
var backup = scenario{
	name: "backup",
	about: fmt.Sprintf("a backup of a store of twice -size bytes, beside puts at %d/s, open loop: for a client that drops it, and saved on the same disk by `engram ctl snapshot save`",
		steadyPuts),
	figures: append(backupFigures(streaming), backupFigures(saving)...),
	prepare: func(e *env) error {
		return e.with(4, func(c member.Conns) error {
			return load.FillDistinct(c, int(2*e.storeBytes)/e.valueBytes, e.valueBytes)
		})
	},
	measure: func(e *env) (sample, error) {
		out := sample{}
		for _, way := range []struct {
			doing string
			take  func(context.Context) error
		}{{streaming, e.streamBackup}, {saving, e.saveBackup}} {
			if err := settle([]*env{e}, e.settle); err != nil {
				return nil, err
			}
			var took time.Duration
			var grown int64
			got, err := e.besidePuts(way.doing, load.RandomPutFrom(load.MaxKeys-putsApart, putsApart, smallValue), func(ctx context.Context) (err error) {
				grown, err = e.residentMore(func() error {
					began := time.Now()
					err := way.take(ctx)
					took = time.Since(began)
					return err
				})
				return err
			})
			if err != nil {
				return nil, fmt.Errorf("%s a backup: %w", way.doing, err)
			}
			maps.Copy(out, got)
			out["backup, "+way.doing], out[moreMemory+way.doing] = millis(took), float64(grown)/bytesPerMB
		}
		return out, nil
	},
}

// dropFlag has the program take a backup and drop it, see run.
const dropFlag = "-drop-backup"

const moreMemory = "resident at most, more than before, "

func backupFigures(doing string) []figure {
	return append([]figure{{name: "backup, " + doing, unit: "ms"}, {name: moreMemory + doing, unit: "MB", target: 64}}, besideFigures(doing, true)...)
}

// residentMore is how much more memory the member has at any moment while f runs than before, in bytes.
func (e *env) residentMore(f func() error) (int64, error) {
	before, err := e.Resident()
	if err != nil {
		return 0, err
	}
	most, ended, looked := before, make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			now, err := e.Resident()
			if most = max(most, now); err != nil {
				looked <- err
				return
			}
			select {
			case <-ended:
				looked <- nil
				return
			case <-time.After(residentEvery): // another process: there is no event to wait for
			}
		}
	}()
	err = f()
	close(ended)
	err = errors.Join(err, <-looked)
	return most - before, err
}

// client is the official one.
func (e *env) client() (*clientv3.Client, error) { return clientAt(e.Address) }

func clientAt(address string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{address}})
}

// streamBackup takes a backup and drops it, in a process of its own: the generator of the puts is not to wait for its own process.
func (e *env) streamBackup(ctx context.Context) error {
	own, err := os.Executable()
	if err != nil {
		return err
	}
	text, err := exec.CommandContext(ctx, own, dropFlag, e.Address).Output()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	}
	size, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err == nil && size < 2*e.storeBytes {
		err = fmt.Errorf("the backup has %d bytes, the store %d", size, 2*e.storeBytes)
	}
	return err
}

// dropBackup takes a backup with the official client, drops it, and writes its size.
func dropBackup(address string, out io.Writer) error {
	c, err := clientAt(address)
	if err != nil {
		return err
	}
	defer c.Close()
	blobs, err := c.Snapshot(context.Background())
	if err != nil {
		return err
	}
	size, err := io.Copy(io.Discard, blobs)
	if err == nil {
		_, err = fmt.Fprintln(out, size)
	}
	return errors.Join(err, blobs.Close())
}

// saveBackup saves one, with our own client whichever the server is.
func (e *env) saveBackup(ctx context.Context) error {
	path := filepath.Join(e.dir, e.Name+"-backup.db")
	text, err := exec.CommandContext(ctx, e.b.client(), "ctl", "--endpoints=http://"+e.Address, "snapshot", "save", path).CombinedOutput()
	if err != nil {
		return fmt.Errorf("engram ctl snapshot save: %w\n%s", err, text)
	}
	return os.Remove(path)
}

// client is the program that has ours.
func (b *bench) client() string { return b.systems[len(b.systems)-1].program }
