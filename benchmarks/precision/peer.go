//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// peer is a program of another project that trains the same model on the same tokens:
// it takes --model, --data, --batch, --seq, --steps, --threads, --lr and --dtype f32 or
// bf16, and prints a JSON line with "loss" a step.
type peer struct {
	command     []string
	model, data string // a checkpoint in the Hugging Face layout, a file of uint16 tokens
	threads     int
	lr          float64
}

// lossBar is how far a bf16 loss may be from PyTorch's, as a share.
const lossBar = 5e-3

// losses compares steps of both programs in both precisions, from the same weights.
func (p *peer) losses(spillway string, batch, seq, steps int) error {
	curves := map[string][]float64{}
	for _, c := range []struct {
		name, command string
	}{
		{"our fp32", p.ours(spillway, "fp32", batch, seq, steps)},
		{"our bf16", p.ours(spillway, "bf16", batch, seq, steps)},
		{"PyTorch fp32", p.theirs("f32", batch, seq, steps)},
		{"PyTorch bf16", p.theirs("bf16", batch, seq, steps)},
	} {
		l, err := lossesOf(c.command)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		if len(l) != steps {
			return fmt.Errorf("%s: %d losses, want %d", c.name, len(l), steps)
		}
		curves[c.name] = l
	}
	fmt.Printf("\nlosses of %d steps, %d × %d tokens, lr %g: the largest relative difference, and the last losses\n", steps, batch, seq, p.lr)
	held := true
	for _, c := range []struct {
		a, b string
		bar  float64
	}{
		{"our bf16", "PyTorch bf16", lossBar},
		{"our bf16", "PyTorch fp32", lossBar},
		{"our bf16", "our fp32", lossBar},
		{"PyTorch bf16", "PyTorch fp32", math.Inf(1)},
		{"our fp32", "PyTorch fp32", 1e-4},
	} {
		a, b := curves[c.a], curves[c.b]
		worst, at := 0.0, 0
		for i := range a {
			if d := math.Abs(a[i]-b[i]) / b[i]; d > worst || d != d {
				worst, at = d, i
			}
		}
		word := fmt.Sprintf("bar %g", c.bar)
		switch {
		case math.IsInf(c.bar, 1):
			word = "no bar"
		case !(worst <= c.bar):
			word, held = word+": NOT HELD", false
		}
		fmt.Printf("%-12s against %-12s  %.2e at step %2d  (%s)  last %.5f, %.5f\n", c.a, c.b, worst, at+1, word, a[steps-1], b[steps-1])
	}
	if !held {
		return fmt.Errorf("losses: a bar is not held")
	}
	return nil
}

func (p *peer) ours(spillway, precision string, batch, seq, steps int) string {
	return fmt.Sprintf("%s train --model %s --init %s --data %s --order sequential --batch %d --seq %d --steps %d --threads %d --lr %g --metrics /dev/stdout --precision %s",
		spillway, p.model, p.model, p.data, batch, seq, steps, p.threads, p.lr, precision)
}

func (p *peer) theirs(dtype string, batch, seq, steps int) string {
	return strings.Join(append(p.command[:len(p.command):len(p.command)], "--model", p.model, "--data", p.data, "--batch", strconv.Itoa(batch), "--seq", strconv.Itoa(seq),
		"--steps", strconv.Itoa(steps), "--threads", strconv.Itoa(p.threads), "--lr", fmt.Sprint(p.lr), "--dtype", dtype), " ")
}

// lossesOf runs a command and returns the losses of its steps.
func lossesOf(command string) (losses []float64, err error) {
	words := strings.Fields(command)
	k := exec.Command(words[0], words[1:]...)
	k.Stderr = os.Stderr
	out, err := k.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := k.Start(); err != nil {
		return nil, err
	}
	for s := bufio.NewScanner(out); s.Scan(); {
		var line struct {
			Event string
			Step  int
			Loss  *float64
		}
		if !strings.HasPrefix(s.Text(), "{") {
			continue
		}
		if err := json.Unmarshal(s.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("%q: %w", s.Text(), err)
		}
		if line.Event == "" && line.Loss != nil {
			losses = append(losses, *line.Loss)
		}
	}
	return losses, k.Wait()
}

// speed times steps of both programs in turn: ours in bf16 against theirs under bf16
// autocast and in fp32, and fp32 against fp32.
func (p *peer) speed(spillway, step string, pairs, warm int) error {
	n := pairs + warm + 1
	for _, c := range []struct{ title, ours, theirs string }{
		{"PyTorch bf16 (b) over our bf16 (a): bar 2", "bf16", "bf16"},
		{"PyTorch fp32 (b) over our bf16 (a)", "bf16", "f32"},
		{"PyTorch fp32 (b) over our fp32 (a)", "fp32", "f32"},
	} {
		if err := timed(step, c.title, p.ours(spillway, c.ours, 4, 256, n), p.theirs(c.theirs, 4, 256, n), pairs, warm); err != nil {
			return err
		}
	}
	return nil
}

// newPeer reads the flags of a peer; nil: none was asked for.
func newPeer(command, model, data string, threads int, lr float64) (*peer, error) {
	if command == "" {
		return nil, nil
	}
	if model == "" || data == "" {
		return nil, fmt.Errorf("-peer %q: -model and -data are missing: what both programs train", command)
	}
	p := &peer{command: strings.Fields(command), threads: threads, lr: lr}
	for _, f := range []struct {
		to   *string
		from string
	}{{&p.model, model}, {&p.data, data}} {
		path, err := filepath.Abs(f.from)
		if err != nil {
			return nil, err
		}
		*f.to = path
	}
	return p, nil
}
