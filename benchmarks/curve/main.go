//go:build unix

// Command curve measures what --reproducible costs: the step of the same run with and
// without it, on the demo and on GPT-2 (124M), at accumulation 8 and every stage. Both
// runs are alive at once and take steps in turn, so that what else the machine does
// falls on both; a line a stage has the medians, and the ratio of each pair of steps.
//
//	go run ./benchmarks/curve [-models demo,gpt2] [-stages 2,3,0,1] [-steps 5] [-ranks 4]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

func main() {
	models := flag.String("models", "demo,gpt2", "demo, a preset or the folder of a model, with commas between")
	stages := flag.String("stages", "2,3,0,1", "ZeRO stages, with commas between")
	steps := flag.Int("steps", 5, "pairs of timed steps, behind one that warms up")
	ranks := flag.Int("ranks", 4, "ranks, in one process")
	accum := flag.Int("accum", 8, "micro-batches of a step and rank")
	flag.Parse()
	if err := run(strings.Split(*models, ","), strings.Split(*stages, ","), *steps, *ranks, *accum); err != nil {
		fmt.Fprintln(os.Stderr, "curve:", err)
		os.Exit(1)
	}
}

func run(models, stages []string, steps, ranks, accum int) (err error) {
	dir, err := os.MkdirTemp("", "spillway-curve-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fmt.Printf("%-10s %5s %9s %9s %6s %6s %6s %8s %13s %12s %13s %12s\n", "model", "stage", "without", "with", "ratio", "least", "most", "CPU time", "sent without", "with", "peak without", "with")
	for _, model := range models {
		c, err := config(dir, model)
		if err != nil {
			return err
		}
		c.Ranks, c.Accum = ranks, accum
		for _, text := range stages {
			if c.Zero, err = strconv.Atoi(text); err != nil {
				return fmt.Errorf("-stages %.80q: %w", text, err)
			}
			r, err := compare(c, steps)
			if err != nil {
				return fmt.Errorf("%s, stage %d: %w", model, c.Zero, err)
			}
			r.print(model, c.Zero)
		}
	}
	return nil
}

// config is the demo's run, or that of a larger model on short rows.
func config(dir, model string) (spillway.Config, error) {
	c := spillway.Default()
	c.Model, c.Data, c.Order = model, filepath.Join(dir, "tokens.bin"), "sequential"
	c.Batch, c.Seq, c.Optimizer = 1, 64, "adamw"
	if model == "demo" {
		c.Model, c.Batch, c.Clip = "spillway-demo", 2, 1
		c.Seq = 128
	}
	tokens := make([]byte, 1<<20) // uint16, little-endian, below 256
	state := uint32(1)
	for i := 0; i < len(tokens); i += 2 {
		state = state*1664525 + 1013904223
		tokens[i] = byte(state >> 16)
	}
	return c, os.WriteFile(c.Data, tokens, 0o600)
}

// result is what the steps of the two runs took, in pairs: without the flag, with it.
type result struct {
	wall, cpu [2][]float64 // s of a step
	plan      [2]*plan.Plan
}

func compare(c spillway.Config, steps int) (r result, err error) {
	var runs [2]*spillway.Trainer
	defer func() {
		for _, t := range runs {
			if t != nil {
				err = errors.Join(err, t.Close())
			}
		}
	}()
	for i := range runs {
		c.Reproducible, c.Steps = i == 1, steps+1
		if runs[i], err = spillway.New(context.Background(), c); err != nil {
			return r, err
		}
		r.plan[i] = runs[i].Plan()
	}
	for s := range steps + 1 {
		for turn := range runs {
			i := (turn + s) % 2
			wall, cpu := time.Now(), processor()
			if _, err := runs[i].Step(context.Background()); err != nil {
				return r, err
			}
			if s > 0 { // the first faults memory in
				r.wall[i] = append(r.wall[i], time.Since(wall).Seconds())
				r.cpu[i] = append(r.cpu[i], processor()-cpu)
			}
		}
	}
	return r, nil
}

// processor returns the seconds that this process's threads have computed so far.
func processor() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

func (r *result) print(model string, stage int) {
	pairs := ratios(r.wall)
	fmt.Printf("%-10s %5d %7.3f s %7.3f s %6.3f %6.3f %6.3f %8.3f", filepath.Base(model), stage, median(r.wall[0]), median(r.wall[1]), median(pairs), slices.Min(pairs), slices.Max(pairs), median(ratios(r.cpu)))
	of := func(i int) (sent, peak string) {
		return plan.Bytes(r.plan[i].CommBytes), plan.Bytes(r.plan[i].Layout.Spaces[graph.Device].Peak)
	}
	sent0, peak0 := of(0)
	sent1, peak1 := of(1)
	fmt.Printf(" %13s %12s %13s %12s\n", sent0, sent1, peak0, peak1)
}

// ratios are those of pairs of steps, with the flag over without.
func ratios(of [2][]float64) (list []float64) {
	for i, v := range of[0] {
		list = append(list, of[1][i]/v)
	}
	return list
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
