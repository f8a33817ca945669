package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// afterSteps starts a run that saves when it is told to end, and waits for its first steps.
func afterSteps(t *testing.T, with func(args ...string) []string) (p *process, folder string) {
	t.Helper()
	folder, metrics := filepath.Join(t.TempDir(), "ck"), filepath.Join(t.TempDir(), "m.jsonl")
	p = start(t, with(tinyWith("--steps", "1000000", "--checkpoint", folder, "--metrics", metrics)...)...)
	waitFor(t, "second step", func() bool { return len(readLines(t, metrics)) >= 2 })
	return p, folder
}

func alone(args ...string) []string { return args }

func inTwo(args ...string) []string { return launched(2, args...) }

// Signals of one burst count once: the run saves, and says so at once.
func TestSignalsOfABurstCountOnce(t *testing.T) {
	t.Parallel()
	for name, with := range map[string]func(args ...string) []string{"train": alone, "launch": inTwo} {
		for _, gap := range []time.Duration{0, 500 * time.Microsecond, 20 * time.Millisecond, 300 * time.Millisecond} {
			p, folder := afterSteps(t, with)
			require.NoError(t, p.Process.Signal(syscall.SIGINT))
			time.Sleep(gap) // what is tested
			for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
				if err := p.Process.Signal(s); err != nil { // it may have ended
					require.ErrorIs(t, err, os.ErrProcessDone)
				}
			}
			require.Equal(t, exitInterrupted, p.end(t), "%s, %v: %s", name, gap, p.errs.String())
			step, _ := newest(t, folder)
			require.Positive(t, step, "%s, %v", name, gap)
			require.Regexp(t, `interrupted after step \d+: the last complete step is saved in .*ck \([0-9.]+ .*B\).* interrupt again after 2s`, p.errs.String())
		}
	}
}

// A run that does not come to its end is ended by a later signal, at once.
func TestALaterSignalAborts(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	raw, err := w.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		require.NoError(t, syscall.SetNonblock(int(fd), true))
		for err == nil { // until it takes no more: the run waits for a reader at its first line
			_, err = syscall.Write(int(fd), make([]byte, 4096))
		}
		require.NoError(t, syscall.SetNonblock(int(fd), false))
	}))
	require.ErrorIs(t, err, syscall.EAGAIN)
	for name, with := range map[string]func(args ...string) []string{"train": alone, "launch": inTwo} {
		t.Run(name, func(t *testing.T) {
			metrics := filepath.Join(t.TempDir(), "m.jsonl")
			p := startWith(t, nil, w, with(tinyWith("--steps", "1000000", "--metrics", metrics)...)...)
			waitFor(t, "metrics file", func() bool { _, err := os.Stat(metrics); return err == nil })
			pids := []int{p.Process.Pid}
			if name == "launch" {
				pids = append(pids, ranksOf(t, p, 2)...)
			}
			began := time.Now()
			for range 5 {
				require.NoError(t, p.Process.Signal(syscall.SIGTERM))
				time.Sleep(300 * time.Millisecond) // a burst: within 2 s of the first
			}
			require.False(t, gone(p.Process.Pid))
			time.Sleep(time.Until(began.Add(burst + 100*time.Millisecond)))
			require.NoError(t, p.Process.Signal(syscall.SIGTERM))
			require.Equal(t, -1, p.end(t))
			for _, pid := range pids {
				waitFor(t, "end of every process", func() bool { return gone(pid) })
			}
		})
	}
}

// Signals that are ignored when the process starts stay ignored, also by the launcher of a
// job, however it goes on from losses.
func TestIgnoredSignalsStayIgnored(t *testing.T) {
	t.Parallel()
	path, err := built()
	require.NoError(t, err)
	for name, command := range map[string][]string{"train": nil, "launch": {"launch", "-n", "2", "--"}, "restarts": {"launch", "-n", "2", "--restarts", "1", "--"}, "min-ranks": {"launch", "-n", "2", "--min-ranks", "1", "--"}} {
		metrics, ck := filepath.Join(t.TempDir(), "m.jsonl"), filepath.Join(t.TempDir(), "ck")
		line := append(command, tinyWith("--steps", "1000000", "--metrics", metrics, "--checkpoint", ck)...)
		p := &process{Cmd: exec.Command("sh", append([]string{"-c", `trap "" HUP INT; exec "$0" "$@"`, path}, line...)...)}
		p.Stdout, p.Stderr = &p.out, &p.errs
		require.NoError(t, p.Start())
		t.Cleanup(func() { _ = p.Process.Kill() })
		steps := func() int { return len(readLines(t, metrics)) }
		waitFor(t, "step", func() bool { return steps() > 0 })
		for _, s := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT} {
			require.NoError(t, p.Process.Signal(s))
		}
		seen := steps()
		waitFor(t, "steps after the signals", func() bool { return steps() > seen+5 })
		require.NotContains(t, p.errs.String(), "interrupted", name)
		require.NoError(t, p.Process.Signal(syscall.SIGTERM))
		require.Equal(t, exitInterrupted, p.end(t), "%s: %s", name, p.errs.String())
	}
}

// A job whose ranks die without progress waits longer each time, and is not started for ever.
func TestRestartsEndWithoutProgress(t *testing.T) {
	t.Parallel()
	ck := filepath.Join(t.TempDir(), "ck")
	p := start(t, append([]string{"launch", "-n", "2", "--restarts", "9", "--"}, tinyWith("--steps", "1000000", "--checkpoint", ck)...)...)
	for attempt := 1; attempt <= idleRestarts; attempt++ {
		waitFor(t, "attempt", func() bool { return strings.Count(p.errs.String(), "step 1/") == attempt })
		require.NoError(t, syscall.Kill(ranksOf(t, p, 2)[1], syscall.SIGKILL))
	}
	require.Equal(t, exitFault, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "starting again from step 1; 8 restarts left; waiting 1s")
	require.Contains(t, p.errs.String(), "not starting again: 2 attempts in a row have left no checkpoint newer than step 1")
}

// The pauses between attempts grow; a newer checkpoint is progress.
func TestAttempts(t *testing.T) {
	a := attempts{saved: checkpointsOf(t.TempDir(), false), limit: 3}
	var pauses []time.Duration
	for range 8 {
		pauses = append(pauses, a.next())
	}
	require.Equal(t, []time.Duration{1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 60e9, 60e9}, pauses)
	var said strings.Builder
	idle, err := a.again(&said)
	require.NoError(t, err)
	require.True(t, idle)
	got := command(tinyWith("--checkpoint", a.saved.folder)...)
	require.Zero(t, got.status, got.stderr)
	idle, err = a.again(&said)
	require.NoError(t, err)
	require.False(t, idle, "step 2 was saved")
	for range 2 {
		_, err = a.again(&said)
		require.NoError(t, err)
	}
	_, err = a.again(&said)
	var status *statusError
	require.True(t, errors.As(err, &status))
	require.Equal(t, exitFault, status.status)
	require.Contains(t, said.String(), "newer than the checkpoint of step 2")
}

// A run without --checkpoint says that its model is not kept, at the start and at the end.
func TestAModelThatIsNotKept(t *testing.T) {
	got := command(tinyRun...)
	require.Zero(t, got.status, got.stderr)
	require.Equal(t, 1, strings.Count(got.stderr, "warning: the model will not be kept: give --checkpoint DIR"), got.stderr)
	require.Equal(t, 1, strings.Count(got.stderr, "warning: the model was not kept: --checkpoint DIR would have kept it"), got.stderr)
	for _, args := range [][]string{{"--checkpoint", "none"}, {"--checkpoint", "None"}, {"--checkpoint", filepath.Join(t.TempDir(), "none")}} {
		got := command(tinyWith(args...)...)
		require.Zero(t, got.status, got.stderr)
		require.NotContains(t, got.stderr, "kept")
	}
	_, err := os.Stat("none")
	require.ErrorIs(t, err, os.ErrNotExist)
	got = command(tinyWith("--checkpoint", "none", "--resume")...)
	require.Equal(t, 1, got.status)
	got = command("launch", "-n", "2", "--restarts", "1", "--", "train", "--model", "gpt2", "--data", "d", "--checkpoint", "none")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--restarts needs train's --checkpoint")
}
