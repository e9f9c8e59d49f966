package server

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/etcdimport"
	"github.com/engram-kv/engram/internal/state"
)

// importEtcd makes this directory's etcd member, if there is one, a member of
// Engram. Everything after it goes on as if Engram had stopped there.
func (m *Member) importEtcd(ctx context.Context) (err error) {
	fs, cfg := m.seams.FS, m.cfg
	if err := etcdimport.CheckWALDir(cfg.DataDir, cfg.WALDir); err != nil {
		return err
	}
	if cfg.WALDir != "" {
		// Two members may be given one --wal-dir by mistake.
		if err := makeDir(fs, cfg.WALDir); err != nil {
			return fmt.Errorf("--wal-dir=%s cannot be created: %w", cfg.WALDir, err)
		}
		lock, err := lockLogDir(fs, cfg.WALDir)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, lock.Close()) }()
	}
	_, err = etcdimport.Import(ctx, etcdimport.Options{
		FS: fs, Dir: cfg.DataDir, WALDir: cfg.WALDir,
		State: state.Options{
			MinLeaseTTL: minLeaseTTL(cfg), MaxLearners: cfg.MaxLearners, Version: config.EtcdVersion, QuotaBytes: cfg.Quota(),
		},
		ReserveBytes: uint64(max(cfg.DiskReserveBytes, 0)), Name: cfg.Name, PeerURLs: urlTexts(cfg.AdvertisePeer),
		Logger: m.log,
		OnFatal: func(err error) {
			m.log.Error("the import cannot go on, the process ends; the next start begins it anew", "error", err)
			os.Exit(1)
		},
	})
	if err != nil {
		return fmt.Errorf("etcd's data in --data-dir=%s: %w", cfg.DataDir, err)
	}
	return nil
}
