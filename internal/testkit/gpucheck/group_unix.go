//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// grouped puts a program and its children into a new process group. A child of a profiler or shell
// must not hold the GPU after its parent has ended.
func grouped(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signalGroup sends a signal to a started program and all its children.
func signalGroup(cmd *exec.Cmd, s syscall.Signal) error { return syscall.Kill(-cmd.Process.Pid, s) }
