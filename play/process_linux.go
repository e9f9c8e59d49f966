package play

import "syscall"

// processAttributes keep a member out of the terminal's process group, so that Ctrl-C reaches play alone, and end it with play.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
