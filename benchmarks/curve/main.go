//go:build unix

// Command curve measures what --reproducible costs: the step of the same run with and
// without it, on the demo and on GPT-2 (124M), at accumulation 8 and every stage. Both
// runs are alive at once. A round is a step without the flag, one with it and another
// without: the ratio is that of the second to the mean of its neighbours, and that of
// the neighbours to each other says what the machine does by itself. A line a stage has
// the medians, and the least and the most of a round.
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
	steps := flag.Int("steps", 5, "rounds of three timed steps, behind one that warms up")
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
	fmt.Printf("%-10s %5s %9s %9s   %-21s %-21s %-21s %-21s\n", "model", "stage", "without", "with", "ratio", "of CPU time", "without, twice", "of CPU time")
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

// sample is what a step took, in seconds: on the clock, and of all threads.
type sample struct{ wall, cpu float64 }

// round is a step without the flag, one with it, and one without.
type round [3]sample

// result is a comparison's rounds, and the plans without and with the flag.
type result struct {
	rounds []round
	plan   [2]*plan.Plan
}

func compare(c spillway.Config, rounds int) (r result, err error) {
	var runs [2]*spillway.Trainer
	defer func() {
		for _, t := range runs {
			if t != nil {
				err = errors.Join(err, t.Close())
			}
		}
	}()
	for i := range runs {
		c.Reproducible, c.Steps = i == 1, 2*(rounds+1)
		if runs[i], err = spillway.New(context.Background(), c); err != nil {
			return r, err
		}
		r.plan[i] = runs[i].Plan()
	}
	for n := range rounds + 1 {
		var x round
		for i, turn := range []int{0, 1, 0} {
			wall, cpu := time.Now(), processor()
			if _, err := runs[turn].Step(context.Background()); err != nil {
				return r, err
			}
			x[i] = sample{time.Since(wall).Seconds(), processor() - cpu}
		}
		if n > 0 { // the first faults memory in
			r.rounds = append(r.rounds, x)
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
	wall := func(s sample) float64 { return s.wall }
	cpu := func(s sample) float64 { return s.cpu }
	of := func(turns ...int) (list []float64) {
		for _, x := range r.rounds {
			for _, i := range turns {
				list = append(list, x[i].wall)
			}
		}
		return list
	}
	fmt.Printf("%-10s %5d %7.3f s %7.3f s   %s %s %s %s\n", filepath.Base(model), stage, median(of(0, 2)), median(of(1)),
		spread(r.with(wall)), spread(r.with(cpu)), spread(r.twice(wall)), spread(r.twice(cpu)))
	for i, what := range []string{"without", "with"} {
		p := r.plan[i]
		fmt.Printf("%17s%s: sends %s a step and rank, peak %s\n", "", what, plan.Bytes(p.CommBytes), plan.Bytes(p.Layout.Spaces[graph.Device].Peak))
	}
}

// with are the rounds' ratios of the step with the flag to the mean of those without.
func (r *result) with(of func(sample) float64) (list []float64) {
	for _, x := range r.rounds {
		list = append(list, 2*of(x[1])/(of(x[0])+of(x[2])))
	}
	return list
}

// twice are the rounds' ratios of the two steps without the flag.
func (r *result) twice(of func(sample) float64) (list []float64) {
	for _, x := range r.rounds {
		list = append(list, of(x[2])/of(x[0]))
	}
	return list
}

// spread is the median of ratios, with the least and the most.
func spread(v []float64) string {
	return fmt.Sprintf("%.3f (%.3f to %.3f)", median(v), slices.Min(v), slices.Max(v))
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
