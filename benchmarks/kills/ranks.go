package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// launched are the configurations whose ranks run in processes of their own, each
// killed in turn.
var launched = []struct {
	name, flags string
	ranks       int
}{
	{"launch, 2 ranks, ZeRO-3", "--zero 3", 2},
	{"launch, 3 ranks, ZeRO-0", "--zero 0 --accum 2", 3},
	{"launch, 4 ranks, HSDP", "--zero 2 --shard-size 2", 4},
}

const (
	// lostStatus is what a job ends with that has lost a rank.
	lostStatus = 3
	// noHang is how long a job may take to end after it has lost a rank: a machine
	// that is busy with other things has time enough.
	noHang = 60 * time.Second
)

// ranksOf returns the processes of a launch's ranks, once all have started; nil where
// it has ended before. They are started, and so listed, in the order of their ranks.
func ranksOf(launch, n int) []int {
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
		var pids []int
		for _, f := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
		if len(pids) == n {
			return pids
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

// killRank kills one rank of a job, and sees the others end, and the launcher with
// them, in time.
func (j *job) killRank(ctx context.Context, cmd *exec.Cmd, out *strings.Builder, ended chan error, r *rand.Rand, dir string, aimed bool) (killed bool, err error) {
	pids := ranksOf(cmd.Process.Pid, j.ranks)
	if pids == nil {
		return false, <-ended
	}
	if aimed {
		waitForSave(dir, 1+r.IntN(steps/saveEvery), ended)
		time.Sleep(time.Duration(r.Int64N(int64(4 * time.Millisecond))))
	} else {
		time.Sleep(time.Duration(r.Int64N(int64(j.length))))
	}
	victim := j.count.kills % j.ranks
	p, err := os.FindProcess(pids[victim])
	if err != nil {
		return false, err
	}
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return false, err
	}
	select {
	case err = <-ended:
	case <-time.After(noHang):
		return false, fmt.Errorf("a hang: rank %d was killed %v ago", victim, noHang)
	case <-ctx.Done():
		return false, ctx.Err()
	}
	for _, pid := range pids {
		if !stopped(pid) {
			return false, fmt.Errorf("process %d is left after the loss of rank %d", pid, victim)
		}
	}
	switch code := cmd.ProcessState.ExitCode(); {
	case err == nil: // it was done by then
		return false, nil
	case code != lostStatus || !strings.Contains(out.String(), fmt.Sprintf("rank %d (process %d): signal: killed", victim, pids[victim])):
		return false, fmt.Errorf("status %d after the loss of rank %d, want %d and its name: %s", code, victim, lostStatus, out)
	}
	return true, nil
}
