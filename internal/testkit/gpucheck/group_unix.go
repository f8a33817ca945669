//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// grouped gives a program a group of its own with all that it starts: a profiler's or a
// shell's child must not hold the GPU when its parent is gone.
func grouped(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signalGroup sends a signal to a started program and all that it started.
func signalGroup(cmd *exec.Cmd, s syscall.Signal) error { return syscall.Kill(-cmd.Process.Pid, s) }
