package crash

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/server"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/test/internal/apart"
	"github.com/engram-kv/engram/test/internal/broken"
)

// mutant breaks a core in one way.
type mutant struct {
	name     string
	noSync   bool // syncs of the raft log do nothing
	apart    bool // the applied mark is committed after its batch
	cutEarly bool // the log is cut up to what is applied, durable or not
}

var mutants = []mutant{{name: "no sync", noSync: true}, {name: "applied mark apart", apart: true}, {name: "log cut early", cutEarly: true}}

// damage is what a member refuses to start or to go on for when its disk does not hold what it was promised to.
var damage = []error{
	raftlog.ErrDamaged, storage.ErrDamaged, consensus.ErrStoreAhead, consensus.ErrLogGap, consensus.ErrStoreMismatch, consensus.ErrLogLost,
	server.ErrNoLog,
}

// finds tells what a broken member is found by, an audit or its own refusal, from what may go wrong with a sound one too.
func finds(err error) bool {
	return broken.Is(err) || slices.ContainsFunc(damage, func(d error) bool { return errors.Is(err, d) })
}

// TestMutants shows that TestPowerCut fails when durability is broken.
func TestMutants(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			const tries = 10
			found := 0
			for seed := uint64(1); seed <= tries; seed++ {
				err := newWorld(seed, m, seed%2 == 0, map[string]int{}).run(12)
				if err == nil {
					continue
				}
				if !finds(err) {
					t.Fatalf("seed %d: that is no finding: %v", seed, err)
				}
				if found == 0 {
					t.Logf("seed %d: %.300v", seed, err)
				}
				found++
			}
			t.Logf("%d of %d runs found it", found, tries)
			if found < tries/3 {
				t.Errorf("only %d of %d runs found the mutant", found, tries)
			}
		})
	}
}

// TestMemberMutants shows the same of TestMemberPowerCut, and of the audit that
// it has in common with TestKill9. In a member that is not broken nothing is found.
func TestMemberMutants(t *testing.T) {
	sound := mutant{name: "none"}
	for _, m := range append([]mutant{sound}, mutants...) {
		t.Run(m.name, func(t *testing.T) {
			var flags []string
			if m.noSync {
				flags = append(flags, "--unsafe-no-fsync")
			}
			seeds := uint64(10)
			if m == sound {
				seeds = 2
			}
			for seed := uint64(1); seed <= seeds; seed++ {
				rnd := rand.New(rand.NewPCG(seed, 31))
				err := memberLives(t, seed, 10, func(s *server.Seams) {
					storageSeam, consensusSeam := s.Storage, s.Consensus
					s.Storage = func(o *storage.Options) {
						storageSeam(o)
						if m.apart {
							o.CommitVia = func(db *pebble.DB, b *pebble.Batch) error {
								return apart.Commit(db, b, func() bool { return rnd.IntN(8) == 0 })
							}
						}
					}
					s.Consensus = func(o *consensus.Options) {
						consensusSeam(o)
						if m.cutEarly {
							machine := o.Machine
							o.DurableApplied = func() uint64 { i, _ := machine.Applied(); return i }
						}
					}
				}, flags...)
				if err != nil && (!finds(err) || m == sound) {
					t.Fatalf("seed %d: that is no finding: %v", seed, err)
				}
				if err != nil {
					t.Logf("found: %.300v", err)
					return
				}
			}
			if m != sound {
				t.Error("no run found the mutant")
			}
		})
	}
}

// forgetful is a file system on which each file is synced once, so that it
// exists, and its later syncs do nothing.
type forgetful struct{ vfs.FS }

type forgetfulFile struct {
	vfs.File
	synced *bool
}

func (f forgetfulFile) once(sync func() error) error {
	if *f.synced {
		return nil
	}
	*f.synced = true
	return sync()
}

func (f forgetfulFile) Sync() error              { return f.once(f.File.Sync) }
func (f forgetfulFile) SyncData() error          { return f.once(f.File.SyncData) }
func (forgetfulFile) SyncTo(int64) (bool, error) { return true, nil }

func forget(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return forgetfulFile{f, new(bool)}, nil
}

func (f forgetful) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return forget(f.FS.Create(name, c))
}

func (f forgetful) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	return forget(f.FS.OpenReadWrite(name, c, o...))
}
