package processes

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
	"github.com/spillway-ml/spillway/internal/crash"
)

// startWith is start with other standard streams.
func startWith(t *testing.T, stdout, stderr *os.File, args ...string) *process {
	t.Helper()
	path, err := built()
	require.NoError(t, err)
	p := &process{Cmd: exec.Command(path, args...)}
	p.Stdout, p.Stderr = &p.out, &p.errs
	if stdout != nil {
		p.Stdout = stdout
	}
	if stderr != nil {
		p.Stderr = stderr
	}
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

func full(t *testing.T) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// Metrics and traces on a full disk are a warning; training and its checkpoints are complete.
func TestFullOutputsEndNoRun(t *testing.T) {
	full(t)
	for _, flag := range []string{"--metrics", "--trace"} {
		dir := filepath.Join(t.TempDir(), "ck")
		got := command(tinyWith("--steps", "3", flag, "/dev/full", "--checkpoint", dir)...)
		require.Equal(t, 0, got.status, got.stderr)
		require.Equal(t, 1, strings.Count(got.stderr, "no space left on device"), got.stderr)
		require.Contains(t, got.stderr, "warning: "+flag)
		step, _ := newest(t, dir)
		require.Equal(t, 3, step)
	}
}

// Output that nobody reads, or that has no space, ends no run.
func TestNobodyReads(t *testing.T) {
	t.Parallel()
	for name, streams := range map[string]func() (stdout, stderr *os.File){
		"full stdout": func() (*os.File, *os.File) { return full(t), nil },
		"full stderr": func() (*os.File, *os.File) { return nil, full(t) },
		"both full":   func() (*os.File, *os.File) { return full(t), full(t) },
		"a reader that left": func() (*os.File, *os.File) {
			r, w, err := os.Pipe()
			require.NoError(t, err)
			require.NoError(t, r.Close())
			t.Cleanup(func() { w.Close() })
			return w, w
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "ck")
			stdout, stderr := streams()
			p := startWith(t, stdout, stderr, tinyWith("--checkpoint", dir)...)
			require.Equal(t, 0, p.end(t), p.errs.String())
			step, _ := newest(t, dir)
			require.Equal(t, 2, step)
			if stdout != nil && stderr == nil {
				require.Equal(t, 1, strings.Count(p.errs.String(), "warning: stdout: "), p.errs.String())
			}
		})
	}
	for _, args := range [][]string{{"plan", "--model", testdata + "/gpt2", "--json", "-"}, {"plan", "--model", testdata + "/gpt2"}, {"--version"}} {
		p := startWith(t, full(t), nil, args...)
		require.Equal(t, 3, p.end(t), "what was asked for could not be had")
		require.Equal(t, 1, strings.Count(p.errs.String(), "no space left"), p.errs.String())
		r, w, err := os.Pipe()
		require.NoError(t, err)
		require.NoError(t, r.Close())
		p = startWith(t, w, nil, args...)
		require.Equal(t, 0, p.end(t), "its reader has had enough")
		require.Empty(t, progressLine.ReplaceAllString(p.errs.String(), ""))
		require.NoError(t, w.Close())
	}
}

// A pipe that nobody reads does not block a run.
func TestPipesWithoutReaders(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	got := command(tinyWith("--steps", "1", "--trace", pipe)...)
	require.Equal(t, 0, got.status, got.stderr)
	require.Contains(t, got.stderr, "that nobody reads")
	got = command(tinyWith("--steps", "1", "--metrics", pipe)...)
	require.Equal(t, 1, got.status, got.stderr)
	require.Contains(t, got.stderr, "that nobody reads")

	both, err := os.OpenFile(pipe, os.O_RDWR, 0) // so that opening the pipe does not block
	require.NoError(t, err)
	reader, err := os.Open(pipe)
	require.NoError(t, err)
	text := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(reader)
		text <- string(b)
	}()
	p := start(t, tinyWith("--steps", "1", "--trace", pipe)...)
	require.Equal(t, 0, p.end(t), p.errs.String())
	require.NoError(t, both.Close())
	require.Contains(t, <-text, "traceEvents")
	require.NoError(t, reader.Close())
}

// A signal ends commands other than training at once, at any point.
func TestASignalEndsWhatHasNothingToSave(t *testing.T) {
	for name, args := range map[string][]string{
		"fit":  tinyWith("--fit", "--global-batch", "1048576", "--ranks", "4", "--device-memory", "64KiB"),
		"plan": {"plan", "--model", "gpt2-xl", "--ranks", "512", "--gpu", "rtx-4090"},
	} {
		t.Run(name, func(t *testing.T) {
			p := start(t, args...)
			waitForSignals(t, p)
			time.Sleep(50 * time.Millisecond) // usually during the search
			require.NoError(t, p.Process.Signal(syscall.SIGTERM))
			began := time.Now()
			code := p.end(t)
			require.Contains(t, []int{130, 2, 1}, code, p.errs.String()) // it may have ended before the signal
			require.Less(t, time.Since(began), 30*time.Second)           // the complete search takes minutes
		})
	}
}

const panicHere = "SPILLWAY_TEST_PANIC"

func init() { panicInTest = panicInAGoroutine }

// panicInAGoroutine is the main function of a process of TestAPanicIsAFault.
func panicInAGoroutine() {
	crash.Handle(func(what string) { root.Die(&cli.Outlet{File: os.Stderr}, what) })
	go func() {
		defer crash.Guard()
		panic("a broken invariant")
	}()
	select {}
}

// A panic in any goroutine is status 3 and one line.
func TestAPanicIsAFault(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), panicHere+"=1")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, cli.ExitFault, exit.ExitCode())
	require.Regexp(t, `^spillway: internal error, please report it: panic at surroundings_linux_test.go:\d+: a broken invariant\n$`, string(out))
}

// A refused run does not change the previous trace.
func TestARefusedRunKeepsTheTrace(t *testing.T) {
	const last = `{"displayTimeUnit":"ms","traceEvents":[the last one`
	path := writeFile(t, "trace.json", last)
	got := command(tinyWith("--trace", path, "--init", t.TempDir())...)
	require.Equal(t, 1, got.status)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, last, string(text))
	list, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, list, 1)
}

// cpuTime returns the processor time of a process so far, in clock ticks of 10 ms.
func cpuTime(t *testing.T, pid int) (ticks int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), ") ")
	require.True(t, ok)
	fields := strings.Fields(rest) // from the third on: see proc(5)
	for _, k := range []int{14 - 3, 15 - 3} {
		n, err := strconv.Atoi(fields[k])
		require.NoError(t, err)
		ticks += n
	}
	return ticks
}

// A signal during a step of a million micro-steps abandons it, in one process and in several;
// --resume continues from the state of the previous step.
func TestASignalAmidALongStep(t *testing.T) {
	t.Parallel()
	want := command(tinyWith("--ranks", "2")...)
	require.Zero(t, want.status, want.stderr)
	for name, with := range map[string]func(args ...string) []string{
		"one process": func(args ...string) []string { return append(args, "--ranks", "2") },
		"two":         func(args ...string) []string { return launched(2, args...) },
	} {
		t.Run(name, func(t *testing.T) {
			ck, metrics := filepath.Join(t.TempDir(), "ck"), filepath.Join(t.TempDir(), "m.jsonl")
			first := command(tinyWith("--ranks", "2", "--steps", "1", "--checkpoint", ck)...)
			require.Zero(t, first.status, first.stderr)
			p := start(t, with(tinyWith("--checkpoint", ck, "--resume", "--accum", "1000000", "--metrics", metrics)...)...)
			waitFor(t, "start", func() bool { _, err := os.Stat(metrics); return err == nil })
			rank := p.Process.Pid
			if name != "one process" {
				rank = ranksOf(t, p, 2)[0]
			}
			before := cpuTime(t, rank)
			waitFor(t, "computing", func() bool { return cpuTime(t, rank) > before+20 })
			require.NoError(t, p.Process.Signal(syscall.SIGTERM))
			require.Equal(t, cli.ExitInterrupted, p.end(t), p.errs.String())
			require.Contains(t, p.errs.String(), "interrupted after step 1; the checkpoint in "+ck+" has it")
			require.Empty(t, readLines(t, metrics))
			again := command(tinyWith("--ranks", "2", "--checkpoint", ck, "--resume")...)
			require.Zero(t, again.status, again.stderr)
			require.Equal(t, shaOf(t, want.stdout), shaOf(t, again.stdout))
		})
	}
}
