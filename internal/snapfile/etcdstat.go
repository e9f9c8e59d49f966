package snapfile

import (
	"context"
	"io"

	"github.com/coreos/go-semver/semver"
)

// EtcdInfo is what etcd's database file says of itself.
type EtcdInfo struct {
	// Applied and Term are those of the last entry whose effects it holds, 0 if
	// it holds none. Term is 0 in files of etcd 3.4 and before, too.
	Applied, Term uint64
	// StorageVersion is the release whose form the file has, as "3.7"; empty if
	// the file does not say, as those of 3.5.
	StorageVersion string
	// PageBytes is how much of the file its pages take, free ones included.
	PageBytes int64
}

// StatEtcd reads the few rows in which etcd's database file of size bytes tells
// of itself. It does not look at the others.
func StatEtcd(ctx context.Context, r io.ReaderAt, size int64) (info EtcdInfo, err error) {
	f, err := openBolt(r, size)
	if err != nil {
		return info, err
	}
	info.PageBytes = int64(f.meta.pageCount) * int64(f.meta.pageSize)
	buckets, err := f.buckets(ctx, func(name []byte) bool { return string(name) == bucketMeta })
	if err != nil {
		return info, err
	}
	meta, ok := buckets[bucketMeta]
	if !ok {
		return info, nil
	}
	err = f.rows(ctx, meta, func(key, value []byte) (err error) {
		switch string(key) {
		case metaConsistentIndex:
			info.Applied, err = be64(value)
		case metaTerm:
			info.Term, err = be64(value)
		case metaStorageVersion:
			if err = checkStorageVersion(string(value)); err == nil {
				v := semver.New(string(value))
				info.StorageVersion = semver.Version{Major: v.Major, Minor: v.Minor}.String()
				info.StorageVersion = info.StorageVersion[:len(info.StorageVersion)-len(".0")]
			}
		}
		return err
	})
	return info, err
}
