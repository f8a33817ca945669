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

// built builds the command once, for tests of signals to a process.
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
	// If a script with & or nohup started this process, it ignores interrupts or hangups, and its
	// children would too. They do not ignore a signal that it catches.
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

// heard is the output of a process so far.
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

// end waits for the process and returns its exit status, −1 after a signal.
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

// waitFor polls for an event. After a slow check, such as of all processes of the machine, it waits
// longer, since the process needs the processor.
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

// waitForSignals waits until a process handles signals, if the system shows it: an earlier signal
// has its default effect.
func waitForSignals(t *testing.T, p *process) {
	t.Helper()
	path := fmt.Sprintf("/proc/%d/status", p.Process.Pid)
	if _, err := os.Stat(path); err != nil {
		time.Sleep(300 * time.Millisecond) // not Linux
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
			return true // it has already ended
		}
		// Go's runtime catches SIGURG from its start; Execute ignores SIGPIPE last.
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

// Ctrl-C ends a run after a step, with a checkpoint and status 130.
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

// Statuses of the built binary for damaged files.
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

// Late ranks are a run-time fault with status 3, and the line names them. A test of the root
// package checks the operation and the step.
func TestTimeoutExits3(t *testing.T) {
	p := start(t, tinyWith("--ranks", "4", "--timeout", "1ns")...)
	require.Equal(t, 3, p.end(t), p.errs.String())
	require.Regexp(t, `spillway: .*timeout.*ranks? \d.*`, p.errs.String())
}

// Ctrl-C before the first step ends the run just as cleanly.
func TestInterruptWhileInitializing(t *testing.T) {
	t.Parallel()
	p := start(t, "train", "--model", "gpt2", "--data", testdata+"/text.bin", "--steps", "1000000", "--batch", "1", "--seq", "8")
	waitForSignals(t, p)
	time.Sleep(300 * time.Millisecond) // usually during the initialization
	require.NoError(t, p.Process.Signal(syscall.SIGINT))
	require.Equal(t, 130, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "interrupted")
}

// doublesEnv makes this test's binary the command, on a machine with a number of GPUs. onDoubles,
// if the platform has it, runs it and returns its exit status.
const doublesEnv = "SPILLWAY_TEST_GPUS"

var onDoubles func() int

// endOrphans, if the platform has it, ends processes that outlive this one.
var endOrphans func() error

// panicInTest, if the platform has it, is run by a child process of a test.
var panicInTest func()
