package processes

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// diesEnv gives a command on doubles an NCCL that can shrink, and sets when the process dies. Its
// value is "how path". "kill" and "stop" send SIGKILL or SIGSTOP at the first all-gather after path
// exists. "soon" kills as soon as path exists, "shrink" during ncclCommShrink, and "met" at the
// first send after that. "lives" does nothing.
const diesEnv = "SPILLWAY_TEST_DIES"

// doomed is a library whose process ends before the job does.
type doomed struct {
	nccl.API
	how, path string
	once      sync.Once
	shrunk    atomic.Bool
}

func dying(library nccl.API) nccl.API {
	how, path, _ := strings.Cut(os.Getenv(diesEnv), " ")
	if how == "soon" {
		go func() {
			for {
				if _, err := os.Stat(path); err == nil {
					_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				}
				time.Sleep(time.Millisecond)
			}
		}()
	}
	return &doomed{API: library, how: how, path: path}
}

func (d *doomed) AllGather(send, recv driver.Address, n int64, c nccl.Comm, s driver.Stream) error {
	if _, err := os.Stat(d.path); d.path != "" && err == nil {
		end := map[string]syscall.Signal{"kill": syscall.SIGKILL, "stop": syscall.SIGSTOP}[d.how]
		if end != 0 {
			d.once.Do(func() { _ = syscall.Kill(os.Getpid(), end) })
		}
	}
	return d.API.AllGather(send, recv, n, c, s)
}

func (d *doomed) Shrink(c nccl.Comm, without []int, into *nccl.Comm, o nccl.Config) error {
	if d.how == "shrink" {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	d.shrunk.Store(true)
	return d.API.Shrink(c, without, into, o)
}

func (d *doomed) Send(at driver.Address, n int64, peer int, c nccl.Comm, s driver.Stream) error {
	if d.how == "met" && d.shrunk.Load() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	return d.API.Send(at, n, peer, c, s)
}

// outlived returns the arguments of a job of 4 steps that loses ranks.
func outlived(t *testing.T, rows string, more ...string) []string {
	return onGPUs(t, 4, tinyWith(append([]string{"--device", "cuda", "--seq", "8", "--steps", "4", "--batch", "1", "--reproducible", "--zero", "3", "--global-batch", rows}, more...)...)...)
}

// outlivedSums holds the parameters of that job without losses, by its rows.
var outlivedSums sync.Map

func outlivedSum(t *testing.T, rows string) string {
	t.Helper()
	once, _ := outlivedSums.LoadOrStore(rows, sync.OnceValue(func() string {
		p := startProgram(t, nil, outlived(t, rows, "--ranks", "1")...)
		require.Zero(t, p.end(t), p.errs.String())
		return shaOf(t, p.out.String())
	}))
	return once.(func() string)()
}

// Processes with NCCL as the only transport continue when some are lost during a run. The bits are
// those of a run without losses. If they cannot continue, they end with status 3 and the reason.
func TestSurvivorsGoOn(t *testing.T) {
	t.Parallel()
	const saved = "step-00000002" // each step is saved before the next begins
	for i, c := range []struct {
		name, rows string
		min        int
		ends       []string // per process: see diesEnv
		status     []int    // −1: killed
		says       string   // rank 0, where it lives; %d: the process of rank 1
		others     string   // the last process
	}{
		// The default suite has the first two, and TestSurvivorsGoOnTwice.
		{"rank 0 is killed", "6", 1, []string{"kill", "lives", "lives"}, []int{-1, 3, 3}, "", "rank 0 has not said who goes on"},
		{"one is stopped", "6", 2, []string{"lives", "stop", "lives"}, []int{0, 3, 0}, `lost rank 1 \(host .*, process %d\); going on with 2 ranks`, ""},
		{"three go on", "4", 1, []string{"lives", "kill", "lives", "lives"}, []int{0, -1, 0, 0}, `lost rank 1 .*; going on with 3 ranks from the checkpoint of step 2`, ""},
		{"two at once", "6", 1, []string{"lives", "soon", "soon"}, []int{0, -1, -1}, `lost rank 1 \(host .*, process %d\) and rank 2 \(host .*\); going on with 1 rank from the checkpoint of step 2`, ""},
		{"one is killed", "6", 2, []string{"lives", "kill", "lives"}, []int{0, -1, 0}, `lost rank 1 \(host .*, process %d\); going on with 2 ranks from the checkpoint of step 2: 0 steps are run again`, ""},
		{"too few are left", "6", 3, []string{"lives", "kill", "lives"}, []int{3, -1, 3}, `there are 2 left, fewer than --min-ranks 3`, "fewer than --min-ranks 3"},
		{"one is killed as ranks are opened", "6", 2, []string{"lives", "open", "lives"}, []int{0, -1, 0}, `lost rank 1 \(host .*, process %d\); going on with 2 ranks from step 1: 0 steps are run again`, ""},
		{"another one before the run begins again", "6", 1, []string{"lives", "kill", "met"}, []int{3, -1, -1}, `going on with 2 ranks`, ""},
		{"another one as they meet", "6", 1, []string{"lives", "kill", "shrink"}, []int{3, -1, -1}, `going on with 2 ranks.* but the remaining ranks do not connect: `, ""},
	} {
		if i >= 2 && !long.On() {
			break
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			ck := filepath.Join(dir, "ck")
			line := outlived(t, c.rows, "--checkpoint", ck, "--save-every", "1", "--async-save", "off", "--timeout", "5s", "--min-ranks", strconv.Itoa(c.min))
			ends := make([][]string, len(c.ends))
			for i, how := range c.ends {
				at := filepath.Join(ck, saved)
				if how == "open" {
					how, at = "kill", dir
				}
				ends[i] = []string{diesEnv + "=" + how + " " + at}
			}
			list := torchrunEach(t, ends, line...)
			if c.ends[1] == "stop" {
				// The double of rank 0 waits at its end for all its connections.
				waitFor(t, "end of the run", func() bool { return shaLine.MatchString(list[0].out.String()) })
				require.NoError(t, syscall.Kill(list[1].Process.Pid, syscall.SIGCONT))
			}
			for i, p := range list {
				require.Equal(t, c.status[i], p.end(t), "rank %d: %s", i, &p.errs)
			}
			first, last := list[0].errs.String(), list[len(list)-1].errs.String()
			if c.says != "" {
				says := c.says
				if strings.Contains(says, "%d") {
					says = fmt.Sprintf(says, list[1].Process.Pid)
				}
				require.Regexp(t, says, first)
			}
			require.Contains(t, last, c.others)
			require.LessOrEqual(t, strings.Count(first, "run again"), 1, first)
			if c.ends[1] == "stop" {
				require.Regexp(t, `the job goes on without this process, rank 1|answer the roll call: .*verdict`, list[1].errs.String()) // kept until the run has ended
			}
			if c.status[0] == 0 {
				require.Equal(t, outlivedSum(t, c.rows), shaOf(t, list[0].out.String()))
			}
			if c.status[0] >= 0 { // if rank 0 lives, it removes the roll
				left, err := filepath.Glob(filepath.Join(ck, ".spillway-roll-*"))
				require.NoError(t, err)
				require.Empty(t, left)
			}
		})
	}
}

// A job continues after several losses, as long as ranks are left.
func TestSurvivorsGoOnTwice(t *testing.T) {
	t.Parallel()
	ck := filepath.Join(t.TempDir(), "ck")
	dies := func(step string) []string { return []string{diesEnv + "=kill " + filepath.Join(ck, step)} }
	list := torchrunEach(t, [][]string{{diesEnv + "=lives"}, dies("step-00000001"), dies("step-00000003")},
		outlived(t, "6", "--checkpoint", ck, "--save-every", "1", "--async-save", "off", "--timeout", "5s", "--min-ranks", "1", "--metrics", filepath.Join(ck, "..", "m.jsonl"))...)
	require.Zero(t, list[0].end(t), list[0].errs.String())
	require.Equal(t, -1, list[1].end(t))
	require.Equal(t, -1, list[2].end(t))
	said := list[0].errs.String()
	require.Regexp(t, `lost rank 1 .*; going on with 2 ranks from the checkpoint of step 1`, said)
	require.Regexp(t, `lost rank 1 .*; going on with 1 rank from the checkpoint of step 3`, said) // formerly rank 2
	require.Equal(t, outlivedSum(t, "6"), shaOf(t, list[0].out.String()))
}

// Every process rejects a library without the call, before the job begins.
func TestSurvivorsNeedALibraryThatShrinks(t *testing.T) {
	line := onGPUs(t, 2, tinyWith("--device", "cuda", "--checkpoint", filepath.Join(t.TempDir(), "ck"), "--min-ranks", "1")...)
	for _, p := range torchrun(t, 2, line...) {
		require.Equal(t, cli.ExitBadInput, p.end(t), p.errs.String())
		require.Contains(t, p.errs.String(), "NCCL 2.21.5, which has no ncclCommShrink: want 2.27.0 or later (with --min-ranks 1)")
	}
}
