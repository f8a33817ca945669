//go:build !unix

package main

import (
	"os/exec"
	"syscall"
)

// A bundle runs on Linux. Elsewhere only the program itself gets signals.
func grouped(*exec.Cmd) {}

func signalGroup(cmd *exec.Cmd, s syscall.Signal) error { return cmd.Process.Signal(s) }
