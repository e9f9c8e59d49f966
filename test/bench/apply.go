package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"syscall"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/test/bench/internal/load"
)

const (
	applyBatch   = 64 // entries
	distinctKeys = 100_000
)

// apply is what the state machine and storage spend on a put, without network and consensus, flushes and compactions of
// the store included. It measures this process.
var apply = scenario{
	name:    "apply",
	about:   fmt.Sprintf("the state machine alone: batches of %d puts of %d bytes, the store's background work included", applyBatch, smallValue),
	alone:   true,
	figures: []figure{{name: "storage CPU per put", unit: "us", target: 4}, {name: "rate", unit: "puts/s", more: true}},
	measure: func(e *env) (out sample, err error) {
		a, err := openApplier(e.dir)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, a.close()) }()
		count := int(e.revisions)
		if err := a.apply(distinctKeys); err != nil { // the first put of each key makes it
			return nil, err
		}
		if e.b.profiles != "" {
			if err := os.MkdirAll(e.b.profiles, 0o700); err != nil {
				return nil, err
			}
			f, err := os.Create(filepath.Join(e.b.profiles, fmt.Sprintf("apply-%d.pprof", e.round)))
			if err != nil {
				return nil, err
			}
			defer f.Close()
			if err := pprof.StartCPUProfile(f); err != nil {
				return nil, err
			}
			defer pprof.StopCPUProfile()
		}
		began := time.Now()
		spent, err := ownCPU(func() error {
			if err := a.apply(count); err != nil {
				return err
			}
			return a.store.Flush()
		})
		return sample{"storage CPU per put": microsPer(spent, int64(count)), "rate": float64(count) / time.Since(began).Seconds()}, err
	},
}

// applier feeds a machine with puts.
type applier struct {
	dir     string
	store   *storage.Store
	machine *state.Machine
	data    [][]byte // an encoded put for each key
	index   uint64
	entries []*raftpb.Entry
}

func openApplier(parent string) (_ *applier, err error) {
	a := &applier{}
	if a.dir, err = os.MkdirTemp(parent, "apply-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if a.store, err = storage.Open(storage.Options{Dir: filepath.Join(a.dir, "store")}); err != nil {
		return nil, err
	}
	a.machine, err = state.Open(state.Options{
		Storage: a.store, MVCC: mvcc.Options{Dir: filepath.Join(a.dir, "index"), ValueBudgetBytes: 1 << 30}, Version: config.EtcdVersion,
		Wanted: func(uint64) bool { return false }, // as on a follower: nobody asks for previous values here
	})
	if err != nil {
		return nil, err
	}
	value := api.Value(smallValue)
	for i := range distinctKeys {
		binary.BigEndian.PutUint64(value, uint64(i))
		put := api.AppendPut(nil, load.Key(i), value, 0)
		data, err := command.AppendRequest(nil, command.KindPut, command.Header{ID: uint64(i)<<8 | 1}, put)
		if err != nil {
			return nil, err
		}
		a.data = append(a.data, data)
	}
	for range applyBatch {
		a.entries = append(a.entries, &raftpb.Entry{Index: new(uint64), Term: proto.Uint64(1), Type: raftpb.EntryNormal.Enum()})
	}
	return a, nil
}

// apply applies n puts of scattered keys.
func (a *applier) apply(n int) error {
	const step = 61_803 // prime to distinctKeys: every key comes once in a round
	for done := 0; done < n; {
		batch := a.entries[:min(applyBatch, n-done)]
		for _, e := range batch {
			a.index++
			*e.Index = a.index
			e.Data = a.data[a.index*step%distinctKeys]
		}
		results, err := a.machine.Apply(batch)
		if err != nil {
			return err
		}
		for i := range results {
			if results[i].Err != nil {
				return results[i].Err
			}
			results[i].Reply.Release()
		}
		done += len(results)
		// What compactions leave to do is a member's background work too; there is none here, as nothing is compacted.
	}
	return nil
}

func (a *applier) close() error {
	var errs []error
	if a.machine != nil {
		errs = append(errs, a.machine.Close())
	}
	if a.store != nil {
		errs = append(errs, a.store.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(a.dir))...)
}

// ownCPU is the CPU time that this process spends while f runs, on all its threads.
func ownCPU(f func() error) (time.Duration, error) {
	before, err := selfCPU()
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := selfCPU()
	return after - before, err
}

func selfCPU() (time.Duration, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, err
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
