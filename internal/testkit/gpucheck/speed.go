package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"
)

// timing is the step time of one side.
type timing struct {
	Side      string  `json:"side"`
	Precision string  `json:"precision"`
	Seconds   float64 `json:"seconds,omitempty"` // median
	Tokens    float64 `json:"tokens_per_s,omitempty"`
	Error     string  `json:"error,omitempty"`
}

// speed returns a part that times steps of a preset with random weights. In the same run it times
// PyTorch, eager and compiled.
func speed(preset string) func(context.Context, *bundle, *result) {
	return func(ctx context.Context, b *bundle, r *result) {
		s, seq, batch, kernelShape := gpt2Small, 1024, 16, "124m"
		if preset == "gpt2-xl" {
			s, kernelShape = shape{48, 25, 1600, 50257, 1024}, "1.5b"
			if b.gpu != nil && b.gpu.memory < 75<<30 {
				r.skip("a step of 16 × 1,024 tokens of 1.5 billion parameters takes 60 GB; the card has %.1f GiB", float64(b.gpu.memory)/(1<<30))
				return
			}
		}
		if b.quick {
			s, seq, kernelShape = tinyShape, 64, "tiny"
		}
		config := filepath.Join(b.work, "config-"+preset)
		data := config + ".bin"
		if err := s.writeConfig(config); err != nil {
			r.fail("%v", err)
			return
		}
		if err := tokens(data, 1<<18, s.vocab, 3); err != nil {
			r.fail("%v", err)
			return
		}
		shape := []string{"--model", config, "--data", data, "--batch", number(batch), "--seq", number(seq)}
		each := float64(batch * seq)
		var list []timing
		add := func(side, precision string, steps []step, err error) {
			t := timing{Side: side, Precision: precision}
			if err != nil {
				t.Error = err.Error()
			} else {
				t.Seconds = median(steps)
				t.Tokens = each / t.Seconds
			}
			list = append(list, t)
		}
		for _, precision := range []string{"bf16"} {
			mine, err := b.train(ctx, "speed-"+preset+"-"+precision, append(slices.Clone(shape), "--steps", "9", "--zero", "0", "--precision", precision)...)
			add("Spillway", precision, mine.steps, err)
			if err != nil { // PyTorch's time is worth as much
				r.fail("%v", err)
			}
			for _, mode := range []string{"eager", "compiled"} {
				if b.python == "" || ctx.Err() != nil || mode == "compiled" && b.gpu == nil {
					continue
				}
				args := append(slices.Clone(shape), "--steps", "9", "--random", "--dtype", precision)
				if mode == "compiled" {
					args = append(args, "--compile")
				}
				limit, cancel := context.WithTimeout(ctx, 100*time.Second)
				theirs, err := b.runTorch(limit, "speed-"+preset+"-torch-"+mode+"-"+precision, args...)
				cancel()
				add("PyTorch "+mode, precision, theirs, err)
			}
		}
		r.Data = list
		r.Table = speedTable(list)
		if b.python == "" {
			r.say("python3 has no torch: no times to compare with")
		}
		b.breakdown(ctx, r, kernelShape, list[0].Seconds)
	}
}

// speedTable returns a row for each side. The ratio is PyTorch's time divided by Spillway's in the
// same precision, above 1 if Spillway is faster.
func speedTable(list []timing) [][]string {
	rows := [][]string{{"side", "precision", "step (ms)", "tokens/s", "its time / Spillway's"}}
	mine := map[string]float64{}
	for _, t := range list {
		if t.Side == "Spillway" {
			mine[t.Precision] = t.Seconds
		}
	}
	for _, t := range list {
		row := []string{t.Side, t.Precision, "", "", ""}
		if t.Error != "" {
			row[2] = t.Error
		} else {
			row[2], row[3] = fmt.Sprintf("%.2f", 1000*t.Seconds), fmt.Sprintf("%.0f", t.Tokens)
			if m := mine[t.Precision]; m > 0 {
				row[4] = fmt.Sprintf("%.2f", t.Seconds/m)
			}
		}
		rows = append(rows, row)
	}
	return rows
}
