//go:build !unix

package main

import (
	"os/exec"
	"syscall"
)

// A bundle is for Linux; elsewhere a program is signalled alone.
func grouped(*exec.Cmd) {}

func signalGroup(cmd *exec.Cmd, s syscall.Signal) error { return cmd.Process.Signal(s) }
