//go:build linux

package processes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

func launched(ranks int, args ...string) []string {
	return append([]string{"launch", "-n", strconv.Itoa(ranks), "--"}, args...)
}

// outcome holds the numbers and memory in a run's metrics.
type outcome struct {
	losses  []string
	sha     string
	peaks   string
	planned string
}

func outcomeOf(t *testing.T, metrics string) (o outcome) {
	t.Helper()
	text, err := os.ReadFile(metrics)
	require.NoError(t, err)
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		var m map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		o.losses = append(o.losses, string(m["loss"]))
		if m["event"] == nil {
			o.peaks = fmt.Sprintf("%s %s %s", m["device_peak_bytes"], m["host_peak_bytes"], m["disk_peak_bytes"])
			o.planned = fmt.Sprintf("%s %s %s", m["device_planned_bytes"], m["host_planned_bytes"], m["disk_planned_bytes"])
		}
		o.sha = string(m["params_sha256"])
	}
	require.NotEmpty(t, o.sha)
	return o
}

// The same run in one process and in several has the same losses, parameters and lists by rank.
func TestLaunchGivesTheBitsOfOneProcess(t *testing.T) {
	t.Parallel()
	disk := t.TempDir()
	for i, c := range []struct {
		ranks int
		flags string
	}{
		{2, "--offload optimizer=disk,parameters=disk,activations=host --disk " + disk}, {4, "--shard-size 2 --ranks-per-process 2"},
		{3, "--zero 2 --accum 2 --recompute full"}, {3, "--zero 0 --reproducible --accum 2"}, {2, "--zero 3"}, {3, "--zero 0"}, {4, "--zero 1"}, {8, "--zero 2"},
	} {
		if i >= 4 && !long.On() {
			break
		}
		t.Run(fmt.Sprint(c.ranks, " ", c.flags), func(t *testing.T) {
			dir := t.TempDir()
			args := tinyWith(strings.Fields(c.flags)...)
			one, many := filepath.Join(dir, "one.jsonl"), filepath.Join(dir, "many.jsonl")
			p := start(t, append(tinyWith(strings.Fields(strings.TrimSuffix(c.flags, " --ranks-per-process 2"))...), "--ranks", strconv.Itoa(c.ranks), "--metrics", one)...)
			require.Zero(t, p.end(t), p.errs.String())
			processes := c.ranks
			if strings.Contains(c.flags, "--ranks-per-process") {
				processes /= 2
			}
			p = start(t, launched(processes, append(args, "--metrics", many)...)...)
			require.Zero(t, p.end(t), p.errs.String())
			require.NotContains(t, p.errs.String(), "[rank", "rank 0 speaks for all")
			got := outcomeOf(t, many)
			require.Equal(t, outcomeOf(t, one), got)
			require.Equal(t, got.planned, got.peaks)
		})
	}
	left, err := os.ReadDir(disk)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestLaunchRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		status int
		want   string
		args   []string
	}{
		{1, "at least 1 rank", []string{"launch", "--", "train"}},
		{1, "launch runs `train`, `finetune` or `bench comm`", []string{"launch", "-n", "2"}},
		{1, "launch runs `train`, `finetune` or `bench comm`", []string{"launch", "-n", "2", "--", "plan"}},
		{1, "finetune takes a model's folder and a data path", launched(2, "finetune", testdata+"/gpt2")},
		{1, "unknown flag --epoch; did you mean --epochs", launched(2, "finetune", testdata+"/gpt2", testdata+"/text.txt", "--epoch", "2")},
		{1, "--restarts needs train's --checkpoint", []string{"launch", "-n", "2", "--restarts", "1", "--", "train", "--model", "gpt2", "--data", "d"}},
		{1, "--restarts is for launch of train and finetune", []string{"launch", "-n", "2", "--restarts", "1", "--", "bench", "comm"}},
		{1, "--ranks 3: spillway launch has started 2 processes", launched(2, tinyWith("--ranks", "3")...)},
		{1, "--ranks 4: spillway launch has started 2 processes, one a rank; leave --ranks out, or add --ranks-per-process 2", launched(2, tinyWith("--ranks", "4")...)},
		{1, "and --ranks-per-process 2 makes that 4 ranks; leave --ranks out", launched(2, tinyWith("--ranks", "3", "--ranks-per-process", "2")...)},
		{1, "--ranks-per-process 0: 1 to", launched(2, tinyWith("--ranks-per-process", "0")...)},
		{1, "--ranks 3 with --ranks-per-process 2: one process runs all ranks here", tinyWith("--ranks", "3", "--ranks-per-process", "2")},
		{1, "--transport mpi joins processes that an MPI launcher has started", launched(2, tinyWith("--transport", "mpi")...)},
		{1, "--transport shm joins the processes that spillway launch", tinyWith("--transport", "shm")},
		{3, "is not finite", launched(2, tinyWith("--lr", "1e30", "--steps", "20")...)},
		{1, "--zero 4", launched(2, tinyWith("--zero", "4")...)},
		{2, "does not fit", launched(2, tinyWith("--device-memory", "1KiB")...)},
	} {
		p := start(t, c.args...)
		require.Equal(t, c.status, p.end(t), "%v: %s", c.args, p.errs.String())
		require.Contains(t, p.errs.String(), c.want)
		require.Equal(t, 1, strings.Count(p.errs.String(), c.want), "once: %s", p.errs.String())
	}
}

// A signal to any rank acts as one to rank 0: the job saves, reports it and ends with 130.
func TestASignalToAnyRankSaves(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary, err := built()
	require.NoError(t, err)
	for _, under := range []string{"launch", "mpirun.openmpi"} {
		if under != "launch" && !long.On() {
			continue
		}
		t.Run(under, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			folder, metrics := filepath.Join(dir, "ck"), filepath.Join(dir, "m.jsonl")
			args := tinyWith("--steps", "1000000", "--checkpoint", folder, "--metrics", metrics)
			var p *process
			if under == "launch" {
				p = start(t, launched(2, args...)...)
			} else {
				script := `echo $$ >$0/$OMPI_COMM_WORLD_RANK; exec "$@"`
				p = mpirunProgram(t, under, 2, append([]string{"/bin/sh", "-c", script, dir, binary}, args...)...)
			}
			waitFor(t, "third step", func() bool { return len(readLines(t, metrics)) >= 3 })
			var rank int
			if under == "launch" {
				rank = ranksOf(t, p, 2)[1]
			} else {
				text, err := os.ReadFile(filepath.Join(dir, "1"))
				require.NoError(t, err)
				rank, err = strconv.Atoi(strings.TrimSpace(string(text)))
				require.NoError(t, err)
			}
			require.NoError(t, syscall.Kill(rank, syscall.SIGTERM))
			waitFor(t, "end of the rank", func() bool { return gone(rank) })
			require.Equal(t, cli.ExitInterrupted, p.end(t), p.errs.String())
			lines := readLines(t, metrics)
			step, _ := newest(t, folder)
			require.EqualValues(t, lines[len(lines)-1]["step"], step, "no step is lost")
			require.Contains(t, p.errs.String(), "the last complete step is saved in "+folder)
		})
	}
}

// launch runs finetune as the train command that it prints, with the bits of one process.
func TestLaunchFinetunes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	args := []string{"finetune", testdata + "/gpt2", testdata + "/text.txt", "--steps", "3", "--seq", "16", "--lora", "r=2"}
	one, many := filepath.Join(dir, "one.jsonl"), filepath.Join(dir, "many.jsonl")
	p := start(t, append(args, "--ranks", "2", "--fit=false", "--checkpoint", filepath.Join(dir, "one"), "--metrics", one)...)
	require.Zero(t, p.end(t), p.errs.String())
	p = start(t, launched(2, append(args, "--checkpoint", filepath.Join(dir, "many"), "--metrics", many)...)...)
	require.Zero(t, p.end(t), p.errs.String())
	require.Equal(t, 1, strings.Count(p.errs.String(), "the same: spillway train "), p.errs.String())
	got, want := outcomeOf(t, many), outcomeOf(t, one)
	require.Equal(t, want.losses, got.losses)
	require.Equal(t, want.sha, got.sha)
}

// If a process may open few files, the job is refused with advice, and no process remains.
func TestLaunchWithFewFiles(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := built()
	require.NoError(t, err)
	for _, limit := range []string{"14", "24"} {
		line := append([]string{"/bin/sh", "-c", `ulimit -n "$0"; exec "$@"`, limit, path}, launched(4, tinyWith("--steps", "1")...)...)
		p := startProgram(t, nil, line...)
		require.Equal(t, cli.ExitBadInput, p.end(t), p.errs.String())
		require.Contains(t, p.errs.String(), "too many open files: a process of a job has a file for each of its processes and more: raise ulimit -n")
	}
}

// childrenOf returns the processes that a launch started.
func childrenOf(launch int) (pids []int) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", launch))
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		for _, f := range strings.Fields(string(text)) {
			pid, _ := strconv.Atoi(f)
			pids = append(pids, pid)
		}
	}
	return pids
}

// ranksOf returns the processes of a launch in the order of their ranks.
func ranksOf(t *testing.T, p *process, n int) (pids []int) {
	waitFor(t, "rank", func() bool {
		pids = childrenOf(p.Process.Pid)
		return len(pids) == n
	})
	return pids
}

func gone(pid int) bool {
	return !inState(pid, func(state byte) bool { return state != 'Z' && state != 'X' })
}

// inState reports whether a thread of a process is in a given state: a letter of proc(5).
func inState(pid int, such func(state byte) bool) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid)) // its pattern is well formed
	return slices.ContainsFunc(threads, func(path string) bool {
		text, err := os.ReadFile(path)
		_, state, found := strings.Cut(string(text), ") ")
		return err == nil && found && such(state[0])
	})
}

// killAfter kills a process of a job once an event has happened, and returns its number. Until then
// the process runs in slices of 2 to 20 ms and is stopped while the test checks. So a short run
// does not end before the signal arrives, at any load of the machine: the others wait for the
// process in their next collective. A slice is as long as the check before it, which grows with the
// load. victim may return another process, or none (0), at each check.
func killAfter(t *testing.T, job *process, event string, victim func() int, happened func() bool) int {
	t.Helper()
	for deadline := time.Now().Add(300 * time.Second); ; {
		began := time.Now()
		require.True(t, began.Before(deadline), "no %s in time", event)
		if pid := victim(); pid == 0 || !stop(t, pid) {
			require.False(t, gone(job.Process.Pid), "the job ended before the event %q: %s", event, &job.errs)
		} else if happened() {
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			return pid
		} else {
			require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
		}
		time.Sleep(min(max(time.Since(began), 2*time.Millisecond), 20*time.Millisecond))
	}
}

// stop stops a process and waits until none of its threads runs; false: it has ended.
func stop(t *testing.T, pid int) bool {
	t.Helper()
	if syscall.Kill(pid, syscall.SIGSTOP) != nil {
		return false
	}
	for deadline := time.Now().Add(300 * time.Second); inState(pid, func(state byte) bool { return !strings.ContainsRune("TtZX", rune(state)) }); {
		require.True(t, time.Now().Before(deadline), "process %d does not stop", pid)
		time.Sleep(100 * time.Microsecond)
	}
	return !gone(pid)
}

// hasCheckpoint reports whether a folder has a checkpoint.
func hasCheckpoint(folder string) func() bool {
	return func() bool {
		steps, _ := filepath.Glob(filepath.Join(folder, "step-*")) // its pattern is well formed
		return len(steps) > 0
	}
}

// A demo that loses a rank before its first save begins again, even if an earlier demo left files
// in its folder.
func TestLaunchStartsTheDemoAgain(t *testing.T) {
	t.Parallel()
	work := t.TempDir()
	c := spillway.Default() // an earlier demo's, of a tiny model
	c.Model, c.Data, c.Steps, c.Batch, c.Seq, c.Checkpoint, c.CheckpointMark = testdata+"/gpt2", testdata+"/text.bin", 1, 1, 16, filepath.Join(work, "spillway-demo"), options.DemoMark
	tr, err := spillway.New(t.Context(), c)
	require.NoError(t, err)
	require.NoError(t, tr.Run(t.Context(), nil))
	require.NoError(t, tr.Close())

	p := startIn(t, work, "launch", "-n", "2", "--restarts", "1", "--", "train", "--data-glob", "doc.go", "--seq", "16", "--batch", "1", "--accum", "1")
	pids := ranksOf(t, p, 2)
	killAfter(t, p, "first step", func() int { return pids[1] }, func() bool { return strings.Contains(p.errs.String(), "step 1/") })
	waitFor(t, "second start", func() bool { return strings.Count(p.errs.String(), "step 1/") == 2 || gone(p.Process.Pid) })
	require.NoError(t, p.Process.Signal(syscall.SIGTERM))
	require.Equal(t, cli.ExitInterrupted, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "starting again from step 1; 0 restarts left")
	require.NotContains(t, p.errs.String(), "resumed after")
}

// Over processes a divergence is named as in one process: the tensor, its operation, rank and step.
func TestLaunchNamesADivergence(t *testing.T) {
	t.Parallel()
	named := regexp.MustCompile(`step 2 is not finite .*first the .+ ".+", by operation .+ on rank [01], is .+; nothing computed from it was saved`)
	diverging := tinyWith("--steps", "5", "--lr", "1e30", "--warmup", "0")
	one := start(t, append(diverging, "--ranks", "2")...)
	require.Equal(t, cli.ExitFault, one.end(t), one.errs.String())
	want := named.FindString(one.errs.String())
	require.NotEmpty(t, want, one.errs.String())
	two := start(t, launched(2, diverging...)...)
	require.Equal(t, cli.ExitFault, two.end(t), two.errs.String())
	require.Equal(t, want, named.FindString(two.errs.String()))
}

// If the launcher dies, its ranks end with it.
func TestLaunchLeavesNoOrphan(t *testing.T) {
	p := start(t, launched(2, tinyWith("--steps", "1000000")...)...)
	pids := ranksOf(t, p, 2)
	require.NoError(t, p.Process.Kill())
	_ = p.Wait()
	for _, pid := range pids {
		waitFor(t, "end of a rank", func() bool { return gone(pid) })
	}
}

func TestBenchComm(t *testing.T) {
	type row struct {
		Transport  string  `json:"transport"`
		Ranks      int     `json:"ranks"`
		Op         string  `json:"op"`
		Bytes      int64   `json:"bytes"`
		Seconds    float64 `json:"seconds"`
		Operations int     `json:"operations"`
	}
	for name, p := range map[string]*process{
		"inproc": start(t, "bench", "comm", "--ranks", "3", "--max-bytes", "4KiB", "--json", "-"),
		"shm":    start(t, launched(3, "bench", "comm", "--max-bytes", "4KiB", "--json", "-")...),
	} {
		require.Zero(t, p.end(t), p.errs.String())
		var rows []row
		require.NoError(t, json.Unmarshal([]byte(p.out.String()), &rows), "stdout holds nothing else")
		require.Len(t, rows, 2*5, "two sizes of five operations")
		for i, r := range rows {
			require.Equal(t, name, r.Transport)
			require.Equal(t, 3, r.Ranks)
			require.Equal(t, []int64{1020, 4092}[i/5], r.Bytes, "whole elements for each rank")
			require.Positive(t, r.Seconds)
			require.Positive(t, r.Operations)
		}
	}
	p := start(t, "bench", "comm", "--max-bytes", "8")
	require.Equal(t, cli.ExitBadInput, p.end(t))
	require.Contains(t, p.errs.String(), "--max-bytes 8: at least 1024")
}
