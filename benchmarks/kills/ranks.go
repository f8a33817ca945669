package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// lostStatus is the exit status of a job that has lost a rank.
	lostStatus = 3
	// noHang is how long a job may take to end after it has lost a rank. It is long enough for a
	// machine that is busy with other work.
	noHang = 60 * time.Second
)

// ranksOf returns the processes of a launch's ranks, once all have started; nil if the launch has
// ended before. They are handles, since another process may have a number by the time of the kill.
func ranksOf(launch, n int) []*os.Process {
	for {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", launch, launch))
		if err != nil {
			return nil
		}
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", launch)) // any thread may have started them
		if err != nil {
			return nil
		}
		for _, t := range tasks {
			if more, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", launch, t.Name())); err == nil && t.Name() != strconv.Itoa(launch) {
				text = append(text, more...)
			}
		}
		var list []*os.Process
		for _, f := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(f); err == nil {
				if p, err := os.FindProcess(pid); err == nil {
					list = append(list, p)
				}
			}
		}
		if len(list) == n {
			return list
		}
		if stopped(launch) {
			return nil
		}
		time.Sleep(200 * time.Microsecond)
	}
}

// stopped tells whether a process has ended, waited for or not.
func stopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(text), ") Z ")
}

// sigkill kills a process, which may have ended.
func sigkill(p *os.Process) error {
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// gone waits for the end of processes that were killed, or whose launcher was.
func gone(ctx context.Context, list []*os.Process) error {
	for began := time.Now(); ; {
		left := slices.IndexFunc(list, func(p *os.Process) bool { return !stopped(p.Pid) })
		if left < 0 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if time.Since(began) > noHang {
			return fmt.Errorf("a hang: process %d is there %v after its job was killed", list[left].Pid, noHang)
		}
		time.Sleep(time.Millisecond)
	}
}

// lose kills the process of one rank of a job, and checks that the others and the launcher end in
// time.
func lose(ctx context.Context, cmd *exec.Cmd, out *strings.Builder, ended chan error, list []*os.Process, victim *os.Process) (killed bool, err error) {
	if err := sigkill(victim); err != nil {
		return false, err
	}
	select {
	case err = <-ended:
	case <-time.After(noHang):
		return false, fmt.Errorf("a hang: process %d was killed %v ago", victim.Pid, noHang)
	case <-ctx.Done():
		return false, ctx.Err()
	}
	for _, p := range list {
		if !stopped(p.Pid) {
			return false, fmt.Errorf("process %d is left after the loss of process %d", p.Pid, victim.Pid)
		}
	}
	switch code := cmd.ProcessState.ExitCode(); {
	case err == nil: // the job had ended before
		return false, nil
	case code != lostStatus || !strings.Contains(out.String(), fmt.Sprintf(" (process %d): signal: killed", victim.Pid)):
		return false, fmt.Errorf("status %d after the loss of process %d, want %d and its name: %s", code, victim.Pid, lostStatus, out)
	}
	return true, nil
}
