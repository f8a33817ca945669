// Command plantime holds the cost model to the clock: it calibrates the CPU
// device, predicts the step of a grid of configurations and measures them, in
// rounds (calibrate, then measure the whole grid) so that both meet the same
// machine, and prints predicted and measured times with their errors.
//
//	go run ./benchmarks/plantime -rounds 3
package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway"
)

func main() {
	rounds := flag.Int("rounds", 3, "times that everything is calibrated and measured")
	steps := flag.Int("steps", 4, "steps of a measurement; the first does not count")
	flag.Parse()
	if err := run(*rounds, *steps); err != nil {
		fmt.Fprintln(os.Stderr, "plantime:", err)
		os.Exit(1)
	}
}

var models = []struct{ name, config string }{
	{"gpt2-4x384", `{"model_type":"gpt2","n_layer":4,"n_head":6,"n_embd":384,"vocab_size":4096,"n_positions":512}`},
	{"llama-3x320", `{"model_type":"llama","hidden_size":320,"intermediate_size":864,"num_hidden_layers":3,"num_attention_heads":5,"vocab_size":4096,"max_position_embeddings":512}`},
}

type point struct {
	model     string
	cfg       spillway.Config
	predicted []float64 // s, by round
	measured  []float64
}

func run(rounds, steps int) error {
	dir, err := os.MkdirTemp("", "plantime-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	tokens := make([]byte, 1<<17)
	for i := range tokens {
		tokens[i] = byte(i * 7 % 251 * (1 - i%2)) // uint16 below 251
	}
	data := filepath.Join(dir, "tokens.bin")
	if err := os.WriteFile(data, tokens, 0o644); err != nil {
		return err
	}
	var grid []*point
	for _, m := range models {
		folder := filepath.Join(dir, m.name)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(m.config), 0o644); err != nil {
			return err
		}
		for _, ranks := range []int{1, 3} {
			for z := range 4 {
				if ranks == 1 && z > 0 {
					continue // nothing to shard
				}
				for _, again := range []string{"none", "full"} {
					for _, shape := range [][2]int{{2, 128}} {
						c := spillway.Default()
						c.Model, c.Data, c.Ranks, c.Zero, c.Recompute = folder, data, ranks, z, again
						c.Batch, c.Seq, c.Steps = shape[0], shape[1], steps
						grid = append(grid, &point{model: m.name, cfg: c})
					}
				}
			}
		}
	}
	ctx := context.Background()
	for range rounds {
		cal, err := spillway.Calibrate(ctx, 0)
		if err != nil {
			return err
		}
		for _, p := range grid {
			f, err := spillway.Predict(p.cfg, cal.Machine(p.cfg.Ranks))
			if err != nil {
				return err
			}
			p.predicted = append(p.predicted, f.Step.Seconds)
			seconds, err := measure(ctx, p.cfg)
			if err != nil {
				return err
			}
			p.measured = append(p.measured, seconds)
		}
	}
	var errs []float64
	worst := 0
	fmt.Println("model,ranks,zero,recompute,batch,seq,predicted_ms,measured_ms,error")
	for i, p := range grid {
		pred, real := median(p.predicted), median(p.measured)
		e := pred/real - 1
		errs = append(errs, math.Abs(e))
		if errs[i] > errs[worst] {
			worst = i
		}
		c := p.cfg
		fmt.Printf("%s,%d,%d,%s,%d,%d,%.2f,%.2f,%+.1f%%\n", p.model, c.Ranks, c.Zero, c.Recompute, c.Batch, c.Seq, pred*1e3, real*1e3, e*100)
	}
	w := grid[worst]
	fmt.Printf("\nmedian error %.1f%% over %d configurations; worst %.1f%%: %s, %d ranks, stage %d, recompute %s, %d × %d tokens\n",
		median(errs)*100, len(grid), errs[worst]*100, w.model, w.cfg.Ranks, w.cfg.Zero, w.cfg.Recompute, w.cfg.Batch, w.cfg.Seq)
	return nil
}

// measure returns the median time of a step after the first.
func measure(ctx context.Context, c spillway.Config) (float64, error) {
	t, err := spillway.New(ctx, c)
	if err != nil {
		return 0, err
	}
	defer t.Close()
	var times []float64
	if err := t.Run(ctx, func(r spillway.StepResult) error { times = append(times, r.Seconds); return nil }); err != nil {
		return 0, err
	}
	return median(times[1:]), nil
}

func median(v []float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
