package config

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// MemoryLimit is how many bytes of memory this process may use: the least limit of
// its control group and of all groups above it, or else the machine's memory.
func MemoryLimit() int64 { return memoryLimit("/proc", "/sys/fs/cgroup") }

// memoryLimit reads a limit below the two directories.
func memoryLimit(proc, groups string) int64 {
	limit := int64(4 << 30) // if nothing can be read
	if b, err := os.ReadFile(filepath.Join(proc, "meminfo")); err == nil {
		var kib int64
		if _, err := fmt.Sscanf(string(b), "MemTotal: %d kB", &kib); err == nil {
			limit = kib << 10
		}
	}
	b, err := os.ReadFile(filepath.Join(proc, "self", "cgroup"))
	if err != nil {
		b = []byte("0::/\n1:memory:/\n")
	}
	for line := range strings.Lines(string(b)) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		switch {
		case controllers == "": // of version 2
			limit = min(limit, groupLimit(groups, path, "memory.max"))
		case strings.Contains(","+controllers+",", ",memory,"):
			limit = min(limit, groupLimit(filepath.Join(groups, "memory"), path, "memory.limit_in_bytes"))
		}
	}
	return limit
}

// groupLimit is the least limit of a group and those above it. What cannot be
// read limits nothing: inside a container the group may have another path.
func groupLimit(root, path, file string) int64 {
	limit := int64(math.MaxInt64)
	for path = filepath.Clean("/" + path); ; path = filepath.Dir(path) {
		if b, err := os.ReadFile(filepath.Join(root, path, file)); err == nil {
			if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 {
				limit = min(limit, n)
			}
		}
		if path == "/" {
			return limit
		}
	}
}
