package config

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMemoryLimit(t *testing.T) {
	const meminfo = "MemTotal:       2048 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"nothing to read":       {nil, 4 << 30},
		"the machine":           {map[string]string{"proc/meminfo": meminfo}, 2 << 20},
		"no limit":              {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a\n", "cgroup/a/memory.max": "max\n"}, 2 << 20},
		"the group":             {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/memory.max": "1000000\n"}, 1000000},
		"a group above":         {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n", "cgroup/a/memory.max": "900000\n", "cgroup/a/b/memory.max": "1000000\n"}, 900000},
		"the root in container": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "0::/elsewhere\n", "cgroup/memory.max": "800000\n"}, 800000},
		"version 1": {map[string]string{"proc/meminfo": meminfo, "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a\n",
			"cgroup/memory/a/memory.limit_in_bytes": "700000\n", "cgroup/x/memory.max": "1\n"}, 700000},
		"no list of groups": {map[string]string{"proc/meminfo": meminfo, "cgroup/memory/memory.limit_in_bytes": "600000\n"}, 600000},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for path, text := range c.files {
				path = filepath.Join(dir, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := memoryLimit(filepath.Join(dir, "proc"), filepath.Join(dir, "cgroup")); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}
