package server

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A power cut right after a member began does not take its directory away, nor
// those above it.
func TestDataDirIsDurable(t *testing.T) {
	for _, path := range []string{"data", "a/b/data", "/x/y"} {
		fs := vfs.NewCrashableMem()
		d, err := openDataDir(fs, path)
		if err != nil {
			t.Fatal(err)
		}
		clone := fs.CrashClone(vfs.CrashCloneCfg{})
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := clone.Stat(path); err != nil {
			t.Errorf("%s after a power cut: %v", path, err)
		}
	}
}
