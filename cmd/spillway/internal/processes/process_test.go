package processes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

// built builds the command once: what a signal does is a process's matter.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "spillway-binary-")
	if err != nil {
		return "", err
	}
	buildFolder = dir
	path := filepath.Join(dir, "spillway")
	if out, err := exec.Command("go", "build", "-ldflags=-w", "-o", path, "github.com/spillway-ml/spillway/cmd/spillway").CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

var buildFolder string

func TestMain(m *testing.M) {
	if os.Getenv("SPILLWAY_TEST_PANIC") != "" && panicInTest != nil {
		panicInTest()
	}
	if os.Getenv(doublesEnv) != "" && onDoubles != nil {
		os.Exit(onDoubles())
	}
	// Started with & by a script, or by nohup, this process ignores interrupts or
	// hangups, and so would those that it starts. What it catches they don't ignore.
	caught := make(chan os.Signal, 1)
	for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGHUP} {
		if signal.Ignored(s) {
			signal.Notify(caught, s)
		}
	}
	if endOrphans != nil {
		if err := endOrphans(); err != nil {
			fmt.Fprintln(os.Stderr, "watching over the tests' processes:", err)
			os.Exit(1)
		}
	}
	ownworld.ManyAtOnce()
	code := ownworld.Run(m)
	if buildFolder != "" {
		_ = os.RemoveAll(buildFolder)
	}
	os.Exit(code)
}

// process is a started binary.
type process struct {
	*exec.Cmd
	out, errs heard
}

// heard is what a process has written so far.
type heard struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (h *heard) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.Write(b)
}

func (h *heard) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.String()
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startIn(t, "", args...)
}

// startIn starts the program in a folder.
func startIn(t *testing.T, dir string, args ...string) *process {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := built()
	require.NoError(t, err)
	p := &process{Cmd: exec.Command(path, args...)}
	p.Dir, p.Stdout, p.Stderr = dir, &p.out, &p.errs
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

// end waits for the process and returns its exit status, −1 for a signal.
func (p *process) end(t *testing.T) int {
	t.Helper()
	err := p.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	require.NotContains(t, p.errs.String(), "goroutine ")
	return p.ProcessState.ExitCode()
}

// waitFor polls for what the process is going to write. Where a look takes long, such as one
// over all processes of the machine, it rests the longer: the process needs the processor.
func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(300 * time.Second); ; {
		began := time.Now()
		if done() {
			return
		}
		require.True(t, began.Before(deadline), "no %s in time", what)
		time.Sleep(max(2*time.Millisecond, min(9*time.Since(began), 50*time.Millisecond)))
	}
}

// waitForSignals waits until a process deals with signals itself, where the system shows
// it: before, one ends it as if it were any program.
func waitForSignals(t *testing.T, p *process) {
	t.Helper()
	path := fmt.Sprintf("/proc/%d/status", p.Process.Pid)
	if _, err := os.Stat(path); err != nil {
		time.Sleep(300 * time.Millisecond) // no Linux
		return
	}
	mask := func(text, name string, s syscall.Signal) bool {
		_, rest, found := strings.Cut(text, "\n"+name+":\t")
		line, _, _ := strings.Cut(rest, "\n")
		bits, err := strconv.ParseUint(line, 16, 64)
		return found && err == nil && bits>>(s-1)&1 == 1
	}
	waitFor(t, "process that deals with signals", func() bool {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		if strings.Contains(string(text), "\nState:\tZ") {
			return true // it was quick
		}
		// Go's runtime catches SIGURG from its start on; execute ignores SIGPIPE last.
		return mask(string(text), "SigCgt", syscall.SIGURG) && mask(string(text), "SigIgn", syscall.SIGPIPE)
	})
}

func newest(t *testing.T, dir string) (step int, folder string) {
	t.Helper()
	list, err := checkpoint.List(dir)
	require.NoError(t, err)
	if len(list) == 0 {
		return 0, ""
	}
	folder = list[len(list)-1]
	m, err := checkpoint.Verify(context.Background(), folder)
	require.NoError(t, err, "the newest checkpoint is whole")
	return m.Step, folder
}

// Ctrl-C ends a run at a step's end with a checkpoint and status 130.
func TestInterruptSavesAndExits130(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		dir, metrics := t.TempDir(), filepath.Join(t.TempDir(), "m.jsonl")
		p := start(t, tinyWith("--ranks", "2", "--checkpoint", dir, "--metrics", metrics, "--steps", "1000000")...)
		waitFor(t, "third step", func() bool { return len(readLines(t, metrics)) >= 3 })
		require.NoError(t, p.Process.Signal(sig))
		require.Equal(t, 130, p.end(t), p.errs.String())
		lines := readLines(t, metrics)
		done := lines[len(lines)-1]
		require.NotContains(t, done, "event", "an interrupted run is not done")
		step, _ := newest(t, dir)
		require.EqualValues(t, done["step"], step, "no step is lost")
		require.Contains(t, p.errs.String(), fmt.Sprintf("interrupted after step %d", step))

		again := start(t, tinyWith("--ranks", "2", "--checkpoint", dir, "--resume", "--metrics", metrics, "--steps", strconv.Itoa(step+2))...)
		require.Equal(t, 0, again.end(t), again.errs.String())
		lines = readLines(t, metrics)
		require.EqualValues(t, step+2, lines[len(lines)-1]["step"])
		for i := range step + 2 {
			require.EqualValues(t, i+1, lines[i]["step"], "--resume appends")
		}
	}
	p := start(t, tinyWith("--steps", "1000000")...)
	waitFor(t, "first step", func() bool { return strings.Contains(p.errs.String(), "step ") })
	require.NoError(t, p.Process.Signal(syscall.SIGINT))
	require.Equal(t, 130, p.end(t), "without a folder there is nothing to save")
}

// Statuses of the built binary for what only files can do wrong.
func TestDamagedFiles(t *testing.T) {
	dir := t.TempDir()
	p := start(t, tinyWith("--checkpoint", dir)...)
	require.Equal(t, 0, p.end(t), p.errs.String())
	_, folder := newest(t, dir)
	path := filepath.Join(folder, clitest.RankFile)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	text[len(text)/2]++
	require.NoError(t, os.WriteFile(path, text, 0o644))
	p = start(t, tinyWith("--checkpoint", dir, "--resume")...)
	require.Equal(t, 2, p.end(t))
	require.Contains(t, p.errs.String(), path)

	weights := t.TempDir()
	require.NoError(t, os.CopyFS(weights, os.DirFS(testdata+"/gpt2")))
	require.NoError(t, os.Truncate(filepath.Join(weights, "model.safetensors"), 5000))
	p = start(t, tinyWith("--init", weights)...)
	require.Equal(t, 1, p.end(t))
	require.Contains(t, p.errs.String(), filepath.Join(weights, "model.safetensors"))
}

// Ranks that are late are a run-time fault: status 3, and the line names them
// (which operation and step, where they fail in one: the root package's test).
func TestTimeoutExits3(t *testing.T) {
	p := start(t, tinyWith("--ranks", "4", "--timeout", "1ns")...)
	require.Equal(t, 3, p.end(t), p.errs.String())
	require.Regexp(t, `spillway: .*timeout.*ranks? \d.*`, p.errs.String())
}

// Ctrl-C before the first step ends the run as cleanly.
func TestInterruptWhileInitializing(t *testing.T) {
	t.Parallel()
	p := start(t, "train", "--model", "gpt2", "--data", testdata+"/text.bin", "--steps", "1000000", "--batch", "1", "--seq", "8")
	waitForSignals(t, p)
	time.Sleep(300 * time.Millisecond) // in the middle, as a rule
	require.NoError(t, p.Process.Signal(syscall.SIGINT))
	require.Equal(t, 130, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "interrupted")
}

// doublesEnv makes this test's binary the command, on a machine of so many GPUs: onDoubles,
// where a platform has it, runs it and returns its exit status.
const doublesEnv = "SPILLWAY_TEST_GPUS"

var onDoubles func() int

// endOrphans, where a platform has it, ends the processes that outlive this one.
var endOrphans func() error

// panicInTest, where a platform has it, is what a child process of a test does.
var panicInTest func()
