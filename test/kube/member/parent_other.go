//go:build !linux

package member

import "os/exec"

// endWithParent does nothing: only Linux can tie a child's life to its parent's.
func endWithParent(*exec.Cmd) {}
