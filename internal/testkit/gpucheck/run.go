package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// outcome is the result of a program that has ended.
type outcome struct {
	status int // −1: it was not started, or was killed
	out    []byte
	err    []byte
	late   bool // it exceeded its time limit
	took   time.Duration
}

// ended returns a text that says how the program ended.
func (o *outcome) ended() string {
	if o.late {
		return fmt.Sprintf("did not end within %.0f s; its stacks are in the log", o.took.Seconds())
	}
	return fmt.Sprintf("ended with status %d: %s", o.status, o.last())
}

// last returns the last lines of the program's output, for a message.
func (o *outcome) last() string {
	text := strings.TrimSpace(string(o.err))
	if text == "" {
		text = strings.TrimSpace(string(o.out))
	}
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// stackGrace is how long a program may take to write its stacks after SIGQUIT.
const stackGrace = 5 * time.Second

// execute runs a program to its end and writes its output to logs/NAME.txt as it arrives. When the
// context ends, the program and its children get SIGQUIT, at which a Go program writes its
// goroutines' stacks and ends.
func (b *bundle) execute(ctx context.Context, name, dir string, env []string, program string, args ...string) *outcome {
	return b.executeTo(ctx, io.Discard, name, dir, env, program, args...)
}

// executeTo is execute, and also writes the program's standard output to also.
func (b *bundle) executeTo(ctx context.Context, also io.Writer, name, dir string, env []string, program string, args ...string) *outcome {
	cmd := exec.CommandContext(ctx, program, args...)
	// Compiled kernels are kept for the runs of this program only.
	cmd.Dir, cmd.Env = dir, append(append(os.Environ(), "XDG_CACHE_HOME="+filepath.Join(b.work, "cache"), "GOTRACEBACK=all"), env...)
	grouped(cmd)
	cmd.Cancel = func() error { return signalGroup(cmd, syscall.SIGQUIT) }
	cmd.WaitDelay = stackGrace
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&stdout, also), &stderr
	log, err := os.Create(filepath.Join(b.work, "logs", name+".txt"))
	if err == nil { // what was measured matters more than a log
		defer log.Close()
		fmt.Fprintf(log, "%s %s\n", program, strings.Join(args, " "))
		both := &inTurn{to: log}
		cmd.Stdout, cmd.Stderr = io.MultiWriter(&stdout, also, both), io.MultiWriter(&stderr, both)
	}
	start := time.Now()
	err = cmd.Run()
	if cmd.Process != nil {
		_ = signalGroup(cmd, syscall.SIGKILL) // what it left running; mostly nothing
	}
	o := &outcome{out: stdout.Bytes(), err: stderr.Bytes(), status: -1, late: ctx.Err() != nil, took: time.Since(start)}
	var exit *exec.ExitError
	switch {
	case err == nil:
		o.status = 0
	case errors.As(err, &exit):
		o.status = exit.ExitCode()
	default:
		o.err = append(o.err, err.Error()...)
	}
	if log != nil {
		fmt.Fprintf(log, "\nstatus %d after %.1f s\n", o.status, o.took.Seconds())
	}
	return o
}

// within is execute with a separate time limit.
func (b *bundle) within(ctx context.Context, limit time.Duration, name, dir string, env []string, program string, args ...string) *outcome {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return b.execute(ctx, name, dir, env, program, args...)
}

// inTurn lets two streams write to one file without mixing their writes.
type inTurn struct {
	mu sync.Mutex
	to io.Writer
}

func (w *inTurn) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}

// step is one line of a training run's metrics.
type step struct {
	Step          int     `json:"step"`
	Loss          float64 `json:"loss"`
	Seconds       float64 `json:"seconds"`
	Tokens        float64 `json:"tokens_per_s"`
	DevicePeak    []int64 `json:"device_peak_bytes"`
	DevicePlanned []int64 `json:"device_planned_bytes"`
	Outside       int64   `json:"device_outside_bytes"`
	HostPeak      []int64 `json:"host_peak_bytes"`
	HostPlanned   []int64 `json:"host_planned_bytes"`
	Event         string  `json:"event"`
	Params        string  `json:"params_sha256"`
}

// training is the result of a training run.
type training struct {
	steps  []step
	params string // hash of the final parameters
	end    *outcome
}

// runLimit is the time limit of a training run, so that one hang does not use up a part's time.
const runLimit = 40 * time.Second

// train runs `spillway train` on the bundle's device, the first GPU. Its error says how the run
// failed.
func (b *bundle) train(ctx context.Context, name string, args ...string) (*training, error) {
	return b.trainIn(ctx, oneGPU(), name, args...)
}

// trainIn is train with additional environment variables.
func (b *bundle) trainIn(ctx context.Context, env []string, name string, args ...string) (*training, error) {
	metrics := filepath.Join(b.work, name+".jsonl")
	all := append([]string{"train", "--device", b.device, "--metrics", metrics, "--timeout", "5s"}, args...)
	t := &training{end: b.within(ctx, runLimit, name, b.work, env, b.program("spillway"), all...)}
	if t.end.status != 0 {
		return t, fmt.Errorf("%s %s", name, t.end.ended())
	}
	text, err := os.ReadFile(metrics)
	if err != nil {
		return t, err
	}
	for line := range bytes.Lines(text) {
		var s step
		if err := json.Unmarshal(line, &s); err != nil {
			return t, fmt.Errorf("%s: metrics: %w", name, err)
		}
		switch s.Event {
		case "":
			t.steps = append(t.steps, s)
		case "done":
			t.params = s.Params
		}
	}
	if len(t.steps) == 0 {
		return t, fmt.Errorf("%s wrote no steps", name)
	}
	return t, nil
}

// peaks says where a run touched more or less memory than planned; it is empty if the run touched
// exactly that.
func (t *training) peaks() string {
	s := t.steps[len(t.steps)-1]
	if !slices.Equal(s.DevicePeak, s.DevicePlanned) {
		return fmt.Sprintf("device memory: touched %v, planned %v", s.DevicePeak, s.DevicePlanned)
	}
	if !slices.Equal(s.HostPeak, s.HostPlanned) {
		return fmt.Sprintf("host memory: touched %v, planned %v", s.HostPeak, s.HostPlanned)
	}
	return ""
}

// median returns the median seconds of the steps, without the first ones, which warm up.
func median(steps []step) float64 {
	var v []float64
	for _, s := range steps[min(len(steps)/3, len(steps)-1):] {
		v = append(v, s.Seconds)
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// runTorch runs the same steps in PyTorch.
func (b *bundle) runTorch(ctx context.Context, name string, args ...string) ([]step, error) {
	all := append([]string{b.program("torch_gpt2.py"), "--device", b.device}, args...)
	o := b.execute(ctx, name, b.work, nil, b.python, all...)
	if o.status != 0 {
		return nil, fmt.Errorf("%s %s", name, o.ended())
	}
	var steps []step
	sc := bufio.NewScanner(bytes.NewReader(o.out))
	for sc.Scan() {
		var s step
		if json.Unmarshal(sc.Bytes(), &s) == nil && s.Step > 0 {
			steps = append(steps, s)
		}
	}
	if len(steps) == 0 {
		return nil, fmt.Errorf("%s printed no steps: %s", name, o.last())
	}
	return steps, nil
}

func number(v int) string { return strconv.Itoa(v) }
