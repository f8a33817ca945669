package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// outcome is a program that ended.
type outcome struct {
	status int // −1: it could not be started, or was killed
	out    []byte
	err    []byte
}

// last returns the last lines that it wrote, for a message.
func (o *outcome) last() string {
	text := strings.TrimSpace(string(o.err))
	if text == "" {
		text = strings.TrimSpace(string(o.out))
	}
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// execute runs a program to its end, or kills it at the context's. Its output is
// kept in logs/NAME.txt.
func (b *bundle) execute(ctx context.Context, name, dir string, env []string, program string, args ...string) *outcome {
	cmd := exec.CommandContext(ctx, program, args...)
	// Compiled kernels are kept for the runs of this program only.
	cmd.Dir, cmd.Env = dir, append(append(os.Environ(), "XDG_CACHE_HOME="+filepath.Join(b.work, "cache")), env...)
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	o := &outcome{out: stdout.Bytes(), err: stderr.Bytes(), status: -1}
	var exit *exec.ExitError
	switch {
	case err == nil:
		o.status = 0
	case errors.As(err, &exit):
		o.status = exit.ExitCode()
	default:
		o.err = append(o.err, err.Error()...)
	}
	log := fmt.Appendf(nil, "%s %s\nstatus %d\n\n", program, strings.Join(args, " "), o.status)
	log = append(append(append(log, o.out...), '\n'), o.err...)
	_ = os.WriteFile(filepath.Join(b.out, "logs", name+".txt"), log, 0o644) // what was measured matters more
	return o
}

// step is a line of a training run's metrics.
type step struct {
	Step          int     `json:"step"`
	Loss          float64 `json:"loss"`
	Seconds       float64 `json:"seconds"`
	Tokens        float64 `json:"tokens_per_s"`
	DevicePeak    []int64 `json:"device_peak_bytes"`
	DevicePlanned []int64 `json:"device_planned_bytes"`
	HostPeak      []int64 `json:"host_peak_bytes"`
	HostPlanned   []int64 `json:"host_planned_bytes"`
	Event         string  `json:"event"`
	Params        string  `json:"params_sha256"`
}

// training is what a run left behind.
type training struct {
	steps  []step
	params string // hash of the final parameters
	end    *outcome
}

// train runs `spillway train` on the bundle's device. Its error says how it
// failed.
func (b *bundle) train(ctx context.Context, name string, args ...string) (*training, error) {
	metrics := filepath.Join(b.work, name+".jsonl")
	all := append([]string{"train", "--device", b.device, "--metrics", metrics}, args...)
	t := &training{end: b.execute(ctx, name, b.work, nil, b.program("spillway"), all...)}
	if t.end.status != 0 {
		return t, fmt.Errorf("%s ended with status %d: %s", name, t.end.status, t.end.last())
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

// peaks says where a run touched more or less than its plan; empty: exactly that.
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

// median of the steps' seconds without the first ones, which warm up.
func median(steps []step) float64 {
	var v []float64
	for _, s := range steps[min(len(steps)/3, len(steps)-1):] {
		v = append(v, s.Seconds)
	}
	slices.Sort(v)
	return v[len(v)/2]
}

// torch runs PyTorch's side: the same steps.
func (b *bundle) runTorch(ctx context.Context, name string, args ...string) ([]step, error) {
	all := append([]string{b.program("torch_gpt2.py"), "--device", b.device}, args...)
	o := b.execute(ctx, name, b.work, nil, b.python, all...)
	if o.status != 0 {
		return nil, fmt.Errorf("%s ended with status %d: %s", name, o.status, o.last())
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
