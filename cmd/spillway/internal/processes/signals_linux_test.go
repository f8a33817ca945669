package processes

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/launching"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

func alone(args ...string) []string { return args }

func inTwo(args ...string) []string { return launched(2, args...) }

// A run that is signalled twice within 500 ms loses no step: of train, of launch and under each
// mpirun, 200 runs with SPILLWAY_LONG=1, by a seed. Half of them run under timeout(1), which relays
// the first signal to the run and again to its group, and ignores the second.
func TestDoubledSignalsLoseNothing(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	ways := [][]string{{binary}, append([]string{binary}, launched(2)...)}
	if _, err := exec.LookPath("mpirun.openmpi"); err == nil {
		ways = append(ways, []string{"mpirun.openmpi", "--mca", "odls_base_sigkill_timeout", "6", "--oversubscribe", "--allow-run-as-root", "-np", "2", binary})
	}
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 2))
	t.Logf("SPILLWAY_TEST_SEED=%d", seed)
	if _, err := exec.LookPath("mpirun.mpich"); err == nil {
		ways = append(ways, []string{"mpirun.mpich", "-np", "2", binary})
	}
	for i := range long.Or(2*len(ways), 200) {
		way, sig, gap := ways[i%len(ways)], []syscall.Signal{syscall.SIGINT, syscall.SIGTERM}[rng.IntN(2)], time.Duration(rng.IntN(501))*time.Millisecond
		t.Run(fmt.Sprint(i, " ", filepath.Base(way[0]), " ", len(way), " ", sig, " ", gap, " ", i/len(ways)%2), func(t *testing.T) {
			t.Parallel()
			folder, metrics := filepath.Join(t.TempDir(), "ck"), filepath.Join(t.TempDir(), "m.jsonl")
			var under []string
			if i/len(ways)%2 == 0 {
				under = []string{"timeout", "1000"}
			}
			line := slices.Concat(under, way, tinyWith("--steps", "1000000", "--checkpoint", folder, "--metrics", metrics))
			p := &process{Cmd: exec.Command(line[0], line[1:]...)}
			p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // timeout signals this process group
			p.Stdout, p.Stderr = &p.out, &p.errs
			require.NoError(t, p.Start())
			t.Cleanup(func() { _ = p.Process.Kill() })
			waitFor(t, "second step", func() bool { return len(readLines(t, metrics)) >= 2 })
			require.NoError(t, p.Process.Signal(sig))
			time.Sleep(gap)           // the tested gap
			_ = p.Process.Signal(sig) // it may have ended
			status := p.end(t)
			if way[0] == binary {
				require.Equal(t, cli.ExitInterrupted, status, p.errs.String())
			}
			waitFor(t, "end of the run", func() bool { // mpirun may end before it
				_, err := os.Stat(filepath.Join(folder, ".spillway-lock"))
				return errors.Is(err, os.ErrNotExist)
			})
			lines := readLines(t, metrics)
			step, _ := newest(t, folder)
			require.EqualValues(t, lines[len(lines)-1]["step"], step, "no step is lost: %s", p.errs.String())
		})
	}
}

// A run that does not end is ended at once by a later signal.
func TestALaterSignalAborts(t *testing.T) {
	t.Parallel()
	for name, with := range map[string]func(args ...string) []string{"train": alone, "launch": inTwo} {
		t.Run(name, func(t *testing.T) {
			r, w, err := os.Pipe()
			require.NoError(t, err)
			defer r.Close()
			defer w.Close()
			metrics := filepath.Join(t.TempDir(), "m.jsonl")
			p := startWith(t, nil, w, with(tinyWith("--steps", "1000000", "--metrics", metrics)...)...)
			waitFor(t, "metrics file", func() bool { _, err := os.Stat(metrics); return err == nil })
			fill(t, w) // not earlier, because a slow start prints a line
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
			time.Sleep(time.Until(began.Add(cli.Burst + 100*time.Millisecond)))
			require.NoError(t, p.Process.Signal(syscall.SIGTERM))
			require.Equal(t, -1, p.end(t))
			for _, pid := range pids {
				waitFor(t, "end of every process", func() bool { return gone(pid) })
			}
		})
	}
}

// fill writes into a pipe until it is full: a run then blocks at its first line.
func fill(t *testing.T, w *os.File) {
	t.Helper()
	raw, err := w.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		require.NoError(t, syscall.SetNonblock(int(fd), true))
		for err == nil {
			_, err = syscall.Write(int(fd), make([]byte, 4096))
		}
		require.NoError(t, syscall.SetNonblock(int(fd), false))
	}))
	require.ErrorIs(t, err, syscall.EAGAIN)
}

// Also under mpirun two signals in a burst do not end a run that waits; a later one does, at once,
// with every process. Open MPI's launcher ends at the second, so the later one goes to rank 0.
func TestALaterSignalAbortsUnderMPI(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		t.Run(launcher, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			pipe, metrics := filepath.Join(dir, "0.said"), filepath.Join(dir, "m.jsonl")
			require.NoError(t, syscall.Mkfifo(pipe, 0o600))
			full, err := os.OpenFile(pipe, os.O_RDWR, 0)
			require.NoError(t, err)
			defer full.Close()
			script := `to=$0/$OMPI_COMM_WORLD_RANK$PMI_RANK; echo $$ >$to.pid; exec "$@" 2>$to.said`
			p := mpirunProgram(t, launcher, 2, append([]string{"/bin/sh", "-c", script, dir, binary}, tinyWith("--steps", "1000000", "--timeout", "5s", "--metrics", metrics)...)...)
			waitFor(t, "metrics file", func() bool { _, err := os.Stat(metrics); return err == nil })
			fill(t, full)
			var all []int
			for rank := range 2 {
				text, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(rank, ".pid")))
				require.NoError(t, err)
				pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
				require.NoError(t, err)
				all = append(all, append([]int{pid}, childrenOf(pid)...)...) // a relay under MPICH
			}
			began := time.Now()
			for range 2 {
				_ = p.Process.Signal(syscall.SIGTERM)
				time.Sleep(300 * time.Millisecond) // a burst: within 2 s of the first
			}
			require.False(t, gone(all[0]))
			time.Sleep(time.Until(began.Add(cli.Burst + 500*time.Millisecond)))
			require.False(t, gone(all[0]))
			if _ = p.Process.Signal(syscall.SIGTERM); launcher == "mpirun.openmpi" {
				_ = syscall.Kill(all[0], syscall.SIGTERM)
			}
			for _, pid := range all {
				waitFor(t, "end of every process", func() bool { return gone(pid) })
			}
			p.end(t)
		})
	}
}

// A job whose ranks die without progress waits longer each time, and is not restarted forever. Each
// attempt continues the receipt of the previous one.
func TestRestartsEndWithoutProgress(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, append([]string{"launch", "-n", "2", "--restarts", "9", "--"}, tinyWith("--steps", "1000000",
		"--checkpoint", filepath.Join(dir, "ck"), "--receipt", filepath.Join(dir, "receipt.jsonl"))...)...)
	for attempt := 1; attempt <= launching.IdleRestarts; attempt++ {
		waitFor(t, "attempt", func() bool { return strings.Count(p.errs.String(), "step 1/") == attempt })
		require.NoError(t, syscall.Kill(ranksOf(t, p, 2)[1], syscall.SIGKILL))
	}
	require.Equal(t, cli.ExitFault, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "starting again from step 1; 8 restarts left; waiting 1s")
	require.Contains(t, p.errs.String(), "not starting again: 2 attempts in a row have left no checkpoint newer than step 1")
}

// A run without --checkpoint warns that its model is not kept, at the start and at the end.
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
