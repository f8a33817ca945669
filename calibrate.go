package spillway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// The models that a calibration trains: between them they have every kind of
// operation of both families, in two sizes.
var calibrationModels = []struct {
	config      string
	batch, seq  int
	ranks, zero int
}{
	{`{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":192,"vocab_size":512,"n_positions":512}`, 2, 64, 1, 0},
	{`{"model_type":"gpt2","n_layer":2,"n_head":8,"n_embd":512,"vocab_size":4096,"n_positions":512}`, 2, 256, 1, 0},
	{`{"model_type":"llama","hidden_size":256,"intermediate_size":704,"num_hidden_layers":2,"num_attention_heads":4,"vocab_size":2048,"max_position_embeddings":512}`, 2, 128, 1, 0},
	{`{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":128,"vocab_size":512,"n_positions":512}`, 1, 32, 2, 3},
	{`{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":512,"vocab_size":2048,"n_positions":512}`, 1, 32, 2, 3},
	{`{"model_type":"gpt2","n_layer":2,"n_head":4,"n_embd":256,"vocab_size":1024,"n_positions":512}`, 1, 32, 2, 0},
}

// Calibrate measures this machine's CPU device with so many threads (0: all):
// it trains small models for a few steps and times every operation. It takes a
// few seconds and leaves nothing behind.
func Calibrate(ctx context.Context, threads int) (_ *cost.Calibration, err error) {
	dir, err := os.MkdirTemp("", "spillway-calibrate-")
	if err != nil {
		return nil, fmt.Errorf("calibrate: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var samples []cost.Sample
	cfg := Default()
	cfg.Threads = threads
	for i, m := range calibrationModels {
		one := cfg
		one.Model = filepath.Join(dir, fmt.Sprint("m", i))
		one.Data = filepath.Join(dir, "tokens.bin")
		one.Trace = filepath.Join(dir, fmt.Sprint("trace", i, ".json"))
		one.Batch, one.Seq, one.Ranks, one.Zero, one.Steps = m.batch, m.seq, m.ranks, m.zero, 5
		if err := calibrationFiles(one, m.config); err != nil {
			return nil, fmt.Errorf("calibrate: %w", err)
		}
		got, err := timedSteps(ctx, one)
		if err != nil {
			return nil, fmt.Errorf("calibrate: %w", err)
		}
		for _, s := range got {
			// Several ranks at a time disturb each other's kernels: they tell of
			// collectives alone.
			isCollective := s.Kind == graph.AllGather || s.Kind == graph.ReduceScatter || s.Kind == graph.AllReduce
			if isCollective == (m.ranks > 1) {
				samples = append(samples, s)
			}
		}
	}
	return cost.Fit(cfg.threads(), samples), nil
}

func calibrationFiles(c Config, config string) error {
	if err := os.MkdirAll(c.Model, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.Model, "config.json"), []byte(config), 0o644); err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(1, 2))
	tokens := make([]byte, 2*65536) // little-endian uint16 below 512: in every vocabulary
	for i := 0; i < len(tokens); i += 2 {
		v := r.IntN(512)
		tokens[i], tokens[i+1] = byte(v), byte(v>>8)
	}
	return os.WriteFile(c.Data, tokens, 0o644)
}

// timedSteps runs a configuration with a trace and returns each operation of the
// step with its median time over the ranks and steps.
func timedSteps(ctx context.Context, c Config) ([]cost.Sample, error) {
	t, err := New(ctx, c)
	if err != nil {
		return nil, err
	}
	p := t.Plan().Program
	if err := errors.Join(t.Run(ctx, func(StepResult) error { return nil }), t.Close()); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(c.Trace)
	if err != nil {
		return nil, err
	}
	var doc struct {
		TraceEvents []struct {
			Name string  `json:"name"`
			Ph   string  `json:"ph"`
			Dur  float64 `json:"dur"` // µs
			Args struct {
				Section string `json:"section"`
				Phase   string `json:"phase"`
			} `json:"args"`
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	times := map[string][]float64{}
	for _, e := range doc.TraceEvents {
		if e.Ph == "X" && e.Args.Section == "step" {
			key := e.Args.Phase + "/" + e.Name
			times[key] = append(times[key], e.Dur)
		}
	}
	var samples []cost.Sample
	sec := p.Section("step")
	for i := range sec.Phases {
		for k := range sec.Phases[i].Ops {
			op := &sec.Phases[i].Ops[k]
			all := times[sec.Phases[i].Name+"/"+op.Name]
			if len(all) == 0 {
				continue
			}
			slices.Sort(all)
			us := all[len(all)/2]
			flops, bytes := graph.Cost(p, op)
			if sent, ok := cost.Sent(p, op); ok {
				if strings.HasPrefix(op.Name, "loss/") {
					continue // a scalar that waits for the slowest rank
				}
				bytes = sent * int64(c.Ranks)
			}
			samples = append(samples, cost.Sample{Kind: op.Kind, Flops: flops, Bytes: bytes, Seconds: us / 1e6})
		}
	}
	return samples, nil
}
