// Command layerorder compares layer order with micro order where a step is bound by
// the disk: a GPT of 112 million parameters on one rank, parameters and optimizer
// states on disk, 8 micro-batches of one short row. The two orders run in turn; every
// pair is printed, with what a step read from disk and how much of it waited for that.
//
//	go run ./benchmarks/layerorder [-pairs 5] [-steps 3] [-disk DIR] [-layers 14] [-accum 8] [-seq 32]
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

func main() {
	pairs := flag.Int("pairs", 5, "runs of each order")
	steps := flag.Int("steps", 3, "timed steps of a run, behind one that warms up")
	disk := flag.String("disk", filepath.Join(os.TempDir(), "spillway-layerorder"), "folder of the disk tier")
	layers := flag.Int("layers", 14, "layers of the model")
	accum := flag.Int("accum", 8, "micro-batches of a step")
	seq := flag.Int("seq", 32, "tokens of a micro-batch")
	flag.Parse()
	if err := run(*pairs, *steps, *disk, *layers, *accum, *seq); err != nil {
		fmt.Fprintln(os.Stderr, "layerorder:", err)
		os.Exit(1)
	}
}

// took is what a run's timed steps took.
type took struct {
	seconds float64 // of a step, the median
	waited  float64 // share of the traced time in which a disk stream worked and nothing was computed
	read    int64   // bytes of a step from disk
	written int64
	loss    float32 // the last
	sha     string
}

func run(pairs, steps int, disk string, layers, accum, seq int) (err error) {
	dir, err := os.MkdirTemp("", "spillway-layerorder-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	c, err := config(dir, disk, layers, accum, seq)
	if err != nil {
		return err
	}
	c.Steps = 1 + steps
	p, err := spillway.Build(context.Background(), c)
	if err != nil {
		return err
	}
	fmt.Printf("%d parameters; %d micro-batches of %d tokens; %s on disk\n\n", p.Program.ParamElems(), accum, seq, plan.Bytes(p.Layout.Spaces[graph.Disk].Peak))
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "pair\tmicro\tread\twaiting for the disk\tlayer\tread\twaiting for the disk\tmicro / layer\t")
	var ratios []float64
	for i := range pairs {
		var of [2]took // micro, layer
		for k := range of {
			turn := (k + i) % 2
			one := c
			one.AccumOrder = []string{"micro", "layer"}[turn]
			one.Trace = filepath.Join(dir, "trace.json")
			if of[turn], err = timed(one); err != nil {
				return fmt.Errorf("%s order: %w", one.AccumOrder, err)
			}
		}
		if of[0].sha != of[1].sha {
			return fmt.Errorf("the parameters differ: SHA-256 %s in micro order, %s in layer order", of[0].sha, of[1].sha)
		}
		ratios = append(ratios, of[0].seconds/of[1].seconds)
		fmt.Fprintf(w, "%d\t", i+1)
		for _, o := range of {
			fmt.Fprintf(w, "%.2f s\t%s\t%.0f %%\t", o.seconds, plan.Bytes(o.read), 100*o.waited)
		}
		fmt.Fprintf(w, "%.2f\t\n", ratios[i])
	}
	if err := w.Flush(); err != nil {
		return err
	}
	slices.Sort(ratios)
	fmt.Printf("\nmicro / layer: median %.2f, %.2f to %.2f; the same parameters after every pair\n", ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1])
	return nil
}

// config makes the model, whose head is its own, and its data.
func config(dir, disk string, layers, accum, seq int) (spillway.Config, error) {
	const vocab = 8192
	shape := map[string]any{"model_type": "gpt2", "n_layer": layers, "n_head": 12, "n_embd": 768, "vocab_size": vocab, "n_positions": max(seq, 128), "tie_word_embeddings": false}
	text, err := json.Marshal(shape)
	if err != nil {
		return spillway.Config{}, err
	}
	tokens := make([]byte, 1<<20) // uint16, little-endian
	state := uint32(1)
	for i := 0; i < len(tokens); i += 2 {
		state = state*1664525 + 1013904223
		tokens[i], tokens[i+1] = byte(state>>8), byte(state>>16)%(vocab>>8)
	}
	c := spillway.Default()
	c.Model, c.Data, c.Order = filepath.Join(dir, "model"), filepath.Join(dir, "tokens.bin"), "sequential"
	c.Batch, c.Seq, c.Accum = 1, seq, accum
	c.Offload, c.Disk = "optimizer=disk,parameters=disk", disk
	return c, errors.Join(os.Mkdir(c.Model, 0o700), os.WriteFile(filepath.Join(c.Model, "config.json"), text, 0o600), os.WriteFile(c.Data, tokens, 0o600))
}

// timed runs a configuration.
func timed(c spillway.Config) (o took, err error) {
	ctx := context.Background()
	t, err := spillway.New(ctx, c)
	if err != nil {
		return o, err
	}
	var seconds []float64
	all := 0.0
	err = t.Run(ctx, func(r spillway.StepResult) error {
		if all += r.Seconds; r.Step > 1 {
			seconds = append(seconds, r.Seconds)
		}
		o.read, o.written, o.loss = r.DiskRead, r.DiskWritten, r.Loss
		return nil
	})
	if err == nil {
		o.sha, err = t.ParamsSHA256()
	}
	if err = errors.Join(err, t.Close()); err != nil { // the trace is written here
		return o, err
	}
	slices.Sort(seconds)
	o.seconds = seconds[len(seconds)/2]
	waited, err := waiting(c.Trace)
	o.waited = waited / all
	return o, err
}

// span is when an operation ran, in µs.
type span struct{ from, to float64 }

// waiting returns the seconds of a trace's steps in which a disk stream worked and
// nothing was computed.
func waiting(path string) (float64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	var doc struct {
		TraceEvents []struct {
			Ph      string
			Tid     int
			Ts, Dur float64
			Args    struct{ Section string }
		}
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return 0, err
	}
	var computing, disk []span
	for _, e := range doc.TraceEvents {
		if e.Ph != "X" || e.Args.Section != graph.SectionStep.String() {
			continue
		}
		switch s := (span{e.Ts, e.Ts + e.Dur}); graph.StreamID(e.Tid) {
		case graph.Compute, graph.HostWork:
			computing = append(computing, s)
		case graph.DiskIn, graph.DiskOut:
			disk = append(disk, s)
		}
	}
	both := length(slices.Concat(computing, disk))
	return (both - length(computing)) / 1e6, nil
}

// length is how much time spans cover, in µs.
func length(list []span) (sum float64) {
	slices.SortFunc(list, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	end := 0.0
	for _, s := range list {
		if from := max(s.from, end); s.to > from {
			sum += s.to - from
		}
		end = max(end, s.to)
	}
	return sum
}
