package launch

import (
	"context"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// launcher is the name of a variable. It makes a child of the test run as launcher; its value is the
// folder that the ranks share with the test.
const launcher = "SPILLWAY_TEST_LAUNCHER"

// TestAStopIsForAllRanks sends SIGTSTP (as Ctrl-Z does) to a launcher. All ranks must stop with it,
// and continue at SIGCONT.
func TestAStopIsForAllRanks(t *testing.T) {
	const ranks = 4
	if dir := os.Getenv(launcher); dir != "" {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, syscall.SIGTSTP)
		o := Options{Ranks: ranks, Program: "/bin/sh", Args: []string{"-c",
			`cd "$0" && echo $$ >$SPILLWAY_RANK.new && mv $SPILLWAY_RANK.new $SPILLWAY_RANK
			until [ -e end ]; do sleep 0.01; done`, dir},
			Stdout: io.Discard, Stderr: io.Discard}
		end, err := Run(context.Background(), o, signals)
		require.NoError(t, err)
		require.Equal(t, End{}, end)
		return
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), launcher+"="+dir)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	pids := make([]string, ranks)
	for i := range pids {
		require.Eventually(t, func() bool {
			text, err := os.ReadFile(filepath.Join(dir, strconv.Itoa(i)))
			pids[i] = strings.TrimSpace(string(text))
			return err == nil
		}, time.Minute, time.Millisecond)
	}
	for range 10 {
		require.NoError(t, cmd.Process.Signal(syscall.SIGTSTP))
		var s syscall.WaitStatus
		_, err := syscall.Wait4(cmd.Process.Pid, &s, syscall.WUNTRACED, nil)
		require.NoError(t, err)
		require.True(t, s.Stopped(), "%#x", s)
		for rank, pid := range pids {
			stops := func() bool { return stateOf(t, pid) == "T" }
			require.Eventually(t, stops, 5*time.Second, time.Millisecond, "rank %d is %s", rank, stateOf(t, pid))
		}
		require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
		for rank, pid := range pids {
			goesOn := func() bool { return stateOf(t, pid) != "T" }
			require.Eventually(t, goesOn, time.Minute, time.Millisecond, "rank %d", rank)
		}
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "end"), nil, 0o600))
	require.NoError(t, cmd.Wait())
}

// stateOf returns the state letter of a process from /proc, such as T for stopped.
func stateOf(t *testing.T, pid string) string {
	text, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	require.NoError(t, err)
	_, after, _ := strings.Cut(string(text), ") ")
	return after[:1]
}
