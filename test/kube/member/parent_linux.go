package member

import (
	"os/exec"
	"syscall"
)

// endWithParent has the kernel kill the child when this process ends, however it ends.
func endWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
