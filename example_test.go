package spillway_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/train/receipts"
	"github.com/spillway-ml/spillway/zero"
)

var ctx = context.Background()

// quadrants is a data set of points in the plane; the target is the number of the point's quadrant.
type quadrants struct{}

func (quadrants) Len() int64 { return 256 }

func (quadrants) Sample(i int64, r *data.Row) error {
	x, y := float32(i%16)-7.5, float32(i/16)-7.5
	copy(r.Input("x"), []float32{x / 8, y / 8})
	r.Targets[0] = 0
	if x > 0 {
		r.Targets[0]++
	}
	if y > 0 {
		r.Targets[0] += 2
	}
	return nil
}

// small trains a perceptron on quadrants, over two ranks at ZeRO-3.
func small() spillway.Config {
	cfg := spillway.Default()
	cfg.Own.Model = spillway.NewModel("quadrants", model.Config{Family: model.MLP, Inputs: 2, Hidden: []int{64}, Classes: 4})
	cfg.Own.Data = quadrants{}
	cfg.Ranks, cfg.Zero, cfg.Batch, cfg.Steps, cfg.LR, cfg.Order = 2, 3, 16, 40, 0.02, "shuffled"
	return cfg
}

// layers returns the config of a preset for planning; it needs no files.
func layers() spillway.Config {
	cfg := spillway.Default()
	cfg.Model, cfg.Ranks, cfg.Batch, cfg.Seq = "spillway-ledger", 2, 1, 32
	return cfg
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func Example() {
	t, err := spillway.New(ctx, small())
	check(err)
	defer t.Close()
	var first float32
	check(t.Run(ctx, func(r spillway.StepResult) error {
		switch r.Step {
		case 1:
			first = r.Loss
		case t.Config().Steps:
			fmt.Println("the loss fell to less than a third:", r.Loss < first/3)
		}
		return nil
	}))
	// Output: the loss fell to less than a third: true
}

func ExampleDefault() {
	cfg := spillway.Default()
	fmt.Println(cfg.Optimizer, cfg.LR, cfg.Zero, cfg.Device, cfg.Precision)
	// Output: adamw 0.001 3 cpu fp32
}

func ExampleConfig_Validate() {
	cfg := spillway.Default()
	cfg.Model, cfg.Beta2 = "gpt2", 1
	err := cfg.Validate()
	fmt.Println(err)
	fmt.Println(errors.Is(err, spillway.ErrConfig))
	// Output:
	// Config.Beta2 1: a number in [0, 1) is needed
	// true
}

func ExampleFieldError() {
	cfg := layers()
	cfg.Seq = 1 << 20
	_, err := spillway.Build(ctx, cfg)
	var refused *spillway.FieldError
	fmt.Println(errors.As(err, &refused), refused.Field)
	// Output: true Seq
}

func ExampleSettings() {
	cfg, _ := capped()
	best, err := spillway.Fit(ctx, cfg, spillway.Fixed{}, 0, spillway.CPUHardware(4))
	check(err)
	fmt.Println(best.Choices[0].Field, best.Choices[0].Value)
	// Output: Config.Zero 3
}

func ExampleConfig() {
	cfg := layers()
	cfg.Recompute = "full"                             // activations are recomputed
	cfg.Offload = "optimizer=host,parameters=host:50%" // moments and half of the parameters
	cfg.Precision, cfg.Reproducible = "bf16", true     // same bits at every number of ranks
	fmt.Println(cfg.Validate())
	// Output: <nil>
}

func ExampleNew() {
	cfg := small()
	cfg.DeviceMemory = 1 << 10
	_, err := spillway.New(ctx, cfg)
	var refused *spillway.Refusal
	fmt.Println(errors.Is(err, spillway.ErrDoesNotFit), errors.As(err, &refused))
	// Output: true false
}

func ExampleTrainer() {
	t, err := spillway.New(ctx, small())
	check(err)
	defer t.Close()
	r, err := t.Step(ctx)
	check(err)
	fmt.Println("touched as planned:", slices.Equal(r.Peak[graph.Device], r.Planned[graph.Device]))

	shape, values, err := t.Parameter("layer.0.weight")
	check(err)
	for i := range values {
		values[i] /= 2
	}
	check(t.SetParameter("layer.0.weight", values))
	fmt.Println(shape, "halved")
	// Output:
	// touched as planned: true
	// [64 2] halved
}

func ExampleStepResult() {
	cfg := small()
	cfg.Own.Eval, cfg.EvalEvery, cfg.EvalSteps, cfg.Steps = quadrants{}, 2, 4, 4
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	check(t.Run(ctx, func(r spillway.StepResult) error {
		fmt.Println(r.Step, r.LR, r.Skipped, r.Eval != nil)
		return nil
	}))
	// Output:
	// 1 0.02 false false
	// 2 0.02 false true
	// 3 0.02 false false
	// 4 0.02 false true
}

func ExampleEvalResult() {
	cfg := small()
	cfg.Own.Eval, cfg.EvalSteps = quadrants{}, 8
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	held, err := t.Evaluate(ctx)
	check(err)
	fmt.Println(held.Targets, "targets; the loss is that of four classes:", math.Abs(float64(held.Loss)-math.Log(4)) < 0.3)
	// Output: 256 targets; the loss is that of four classes: true
}

func ExampleSampling() {
	cfg := spillway.Default()
	cfg.Model, cfg.Init, cfg.Inference, cfg.Generate, cfg.Tokenizer = "testdata/gpt2", "testdata/gpt2", true, true, "bytes"
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	n, err := t.GenerateTo(ctx, "The ", 5, spillway.Sampling{Temperature: 0.8, TopK: 40, TopP: 0.9, Seed: 1}, func(string) error { return nil })
	check(err)
	fmt.Println(n, "tokens")
	// Output: 5 tokens
}

func ExampleErrStop() {
	t, err := spillway.New(ctx, small())
	check(err)
	defer t.Close()
	err = t.Run(ctx, func(r spillway.StepResult) error {
		if r.Step == 3 {
			return spillway.ErrStop
		}
		return nil
	})
	fmt.Println(t.Done(), err)
	// Output: 3 <nil>
}

func ExampleDiverged() {
	cfg := small()
	cfg.Own.Schedule = func(step int) float64 { return 1e30 }
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	err = t.Run(ctx, nil)
	var diverged *spillway.Diverged
	fmt.Println(errors.Is(err, spillway.ErrDiverged), errors.As(err, &diverged))
	// Output: true true
}

func ExampleOwn() {
	cfg := small()
	cfg.Own.Schedule = func(step int) float64 { return 0.1 / float64(1+step) }
	cfg.Own.Rule = &zero.Rule{Name: "still", Emit: func(*zero.Emitter, *zero.Target) {}} // moves nothing
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	_, before, err := t.Parameter("layer.1.bias")
	check(err)
	_, err = t.Step(ctx)
	check(err)
	_, after, err := t.Parameter("layer.1.bias")
	fmt.Println(slices.Equal(before, after), err)
	// Output: true <nil>
}

func ExampleModel() {
	cfg := small()
	cfg.Own.Model = &spillway.Model{Name: "line", Forward: func(b *graph.Builder, rows, _ int, _ bool) error {
		x := b.Input("x", int64(rows), 2)
		b.Unit("line") // the values sharded and gathered together
		w := b.Param("weight", graph.Normal(0.1), 4, 2)
		b.CrossEntropy("loss", b.Linear("logits", x, w, graph.Value{}, graph.LinearAttr{TransW: true}), b.Targets(int64(rows), 1))
		return b.Err()
	}}
	p, err := spillway.Build(ctx, cfg)
	check(err)
	fmt.Println(p.Program.ParamElems(), "parameters")
	// Output: 8 parameters
}

func ExampleNewModel() {
	cfg := small()
	cfg.Own.Model = spillway.NewModel("digits", model.Config{Family: model.CNN, Height: 28, ImgWidth: 28, Chans: 1, Hidden: []int{8, 16}, Classes: 10})
	p, err := spillway.Build(ctx, cfg)
	check(err)
	fmt.Println(len(p.Program.Params), "parameters of", cfg.Own.Model.Name)
	// Output: 6 parameters of digits
}

func ExampleBuild() {
	cfg := layers()
	whole, err := spillway.Build(ctx, cfg)
	check(err)
	cfg.DeviceMemory = whole.Layout.Spaces[graph.Device].Peak - 1
	_, err = spillway.Build(ctx, cfg)
	var refused *plan.DoesNotFit
	fmt.Println(errors.As(err, &refused), errors.Is(err, spillway.ErrDoesNotFit))
	// Output: true true
}

func ExamplePredict() {
	cfg, machine := layers(), spillway.CPUHardware(4).Machine(2)
	var peaks []int64
	for cfg.Zero = range 4 {
		f, err := spillway.Predict(ctx, cfg, machine)
		check(err)
		peaks = append(peaks, -f.Plan.Layout.Spaces[graph.Device].Peak)
	}
	fmt.Println("each stage takes less:", slices.IsSorted(peaks))
	// Output: each stage takes less: true
}

func ExampleForecast() {
	f, err := spillway.Predict(ctx, layers(), spillway.CPUHardware(4).Machine(2))
	check(err)
	fmt.Println(f.Parameters() == f.Plan.Program.ParamElems(), f.Fits, f.TokensPerSecond() > 0)
	// Output: true true true
}

func ExamplePasses() {
	var names []string
	check(spillway.Passes(ctx, layers(), func(pass string, p *graph.Program) error {
		names = append(names, pass)
		return nil
	}))
	fmt.Println(names[:3])
	// Output: [model freeze lora]
}

// capped returns a run that needs more device memory than its cap, and its forecast.
func capped() (spillway.Config, *spillway.Forecast) {
	cfg, hw := layers(), spillway.CPUHardware(4)
	cfg.Zero = 0
	f, err := spillway.Predict(ctx, cfg, hw.Machine(2))
	check(err)
	cfg.DeviceMemory = f.Plan.Layout.Spaces[graph.Device].Peak / 2
	f, err = spillway.Predict(ctx, cfg, hw.Machine(2))
	check(err)
	return cfg, f
}

func ExampleFit() {
	cfg, _ := capped()
	best, err := spillway.Fit(ctx, cfg, spillway.Fixed{}, 0, spillway.CPUHardware(4))
	check(err)
	fmt.Println(best.Fits, best.Config.Zero)
	// Output: true 3
}

func ExampleFixed() {
	cfg, _ := capped()
	best, err := spillway.Fit(ctx, cfg, spillway.Fixed{Zero: true}, 0, spillway.CPUHardware(4))
	check(err)
	fmt.Println(best.Fits, best.Config.Zero)
	// Output: true 0
}

func ExampleFitted() {
	best, err := spillway.Fit(ctx, layers(), spillway.Fixed{}, 8, spillway.CPUHardware(4)) // 8 rows per step over both ranks
	check(err)
	fmt.Println(best.Config.Batch*best.Config.Accum, best.Tried > 1, len(best.Reasons) > 0)
	// Output: 4 true true
}

func ExampleFitHere() {
	cfg, _ := capped()
	best, err := spillway.FitHere(ctx, cfg, spillway.Fixed{}, 0, spillway.CPUHardware(4))
	check(err)
	fmt.Println(best.Fits)
	// Output: true
}

func ExampleNothingFits() {
	cfg := layers()
	cfg.DeviceMemory = 1 << 10
	_, err := spillway.Fit(ctx, cfg, spillway.Fixed{Offload: true, Recompute: true}, 0, spillway.CPUHardware(4))
	var none *spillway.NothingFits
	fmt.Println(errors.As(err, &none), none.Smallest != nil)
	// Output: true true
}

func ExampleWaysOut() {
	_, asked := capped()
	ways, _ := spillway.WaysOut(ctx, asked, spillway.CPUHardware(4))
	for _, w := range ways {
		fmt.Println(w.Forecast.Config.Zero, w.Forecast.Fits)
		break
	}
	// Output: 3 true
}

func ExampleWay() {
	cfg, asked := capped()
	ways, _ := spillway.WaysOut(ctx, asked, spillway.CPUHardware(4))
	cfg = ways[0].Forecast.Config // what New takes
	fmt.Println(cfg.DeviceMemory == asked.Config.DeviceMemory, ways[0].Cost == "")
	// Output: true true
}

func ExampleNoWay() {
	cfg := layers()
	cfg.DeviceMemory, cfg.Batch = 1<<10, 1
	asked, err := spillway.Predict(ctx, cfg, spillway.CPUHardware(4).Machine(2))
	check(err)
	ways, no := spillway.WaysOut(ctx, asked, spillway.CPUHardware(4))
	fmt.Println(len(ways), no.Tried > 1, no.Nearest != nil)
	// Output: 0 true true
}

func ExampleRefusal() {
	cfg, _ := capped()
	_, err := spillway.Build(ctx, cfg)
	var refused *spillway.Refusal
	fmt.Println(errors.As(err, &refused), len(refused.Ways) > 0)
	// Output: true true
}

func ExampleExplain() {
	cfg := layers()
	cfg.Recompute = "full"
	f, err := spillway.Predict(ctx, cfg, spillway.CPUHardware(4).Machine(2))
	check(err)
	again := spillway.Explain(f)
	fmt.Println(len(again.Lines()) > 0)
	// Output: true
}

func ExampleExplanation() {
	cfg := layers()
	cfg.Offload = "optimizer=host"
	f, err := spillway.Predict(ctx, cfg, spillway.CPUHardware(4).Machine(2))
	check(err)
	for _, p := range spillway.Explain(f).Placed {
		fmt.Println(p.Class)
	}
	// Output: optimizer
}

func ExampleHardware() {
	hw := spillway.CPUHardware(4)
	hw.HostShare = 1 << 30 // limits the host memory of each rank
	one, two := hw.Machine(1), hw.Machine(2)
	fmt.Println("two ranks share what one has:", two.Cores <= one.Cores)
	// Output: two ranks share what one has: true
}

func ExampleCPUHardware() {
	f, err := spillway.Predict(ctx, layers(), spillway.CPUHardware(4).Machine(2))
	check(err)
	fmt.Println(f.Step.Seconds > 0)
	// Output: true
}

func ExampleDeviceHardware() {
	hw, cfg, err := spillway.DeviceHardware(layers()) // for a GPU it also sets the memory cap
	check(err)
	_, err = spillway.Predict(ctx, cfg, hw.Machine(cfg.Ranks))
	fmt.Println(err)
	// Output: <nil>
}

func ExampleMissingDevice() {
	err := fmt.Errorf("start: %w", &spillway.MissingDevice{Device: "cuda", Err: errors.New("no driver")})
	fmt.Println(errors.Is(err, spillway.ErrNoDevice))
	// Output: true
}

func ExampleMachineTooSmall() {
	var err error = &spillway.MachineTooSmall{Ranks: 8, Planned: 64 << 30, Total: 16 << 30}
	fmt.Println(errors.Is(err, spillway.ErrDoesNotFit))
	// Output: true
}

func ExampleFrozenCache() {
	cfg := spillway.Default()
	cfg.Model, cfg.Init, cfg.Data = "testdata/gpt2", "testdata/gpt2", "testdata/text.bin"
	cfg.Freeze, cfg.FrozenCache = []string{"wte.*", "wpe.*", "h.0.*"}, spillway.FrozenCache{Tier: graph.Host, Bytes: 16 << 20}
	cfg.Batch, cfg.Seq, cfg.Steps = 4, 64, 24
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	cached := false
	check(t.Run(ctx, func(r spillway.StepResult) error { cached = r.Cached; return nil }))
	fmt.Println("the last step skipped the frozen layers:", cached)
	// Output: the last step skipped the frozen layers: true
}

func ExampleOpenMetrics() {
	dir, err := os.MkdirTemp("", "spillway-example-")
	check(err)
	defer os.RemoveAll(dir)
	cfg := small()
	cfg.Steps = 2
	t, err := spillway.New(ctx, cfg)
	check(err)
	defer t.Close()
	w, err := spillway.OpenMetrics(filepath.Join(dir, "metrics.jsonl"), -1)
	check(err)
	check(t.Run(ctx, w.Step))
	check(w.Close())
	text, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	check(err)
	fmt.Println(slices.IndexFunc(text, func(c byte) bool { return c == '\n' }) > 0)
	// Output: true
}

// joined is this process's place in a job. Package launch, which started the process, or comm/mpi
// provides the links.
var joined *spillway.Job

func ExampleJob() {
	cfg := small()
	joined.Own = cfg.Own // every process sets the same model and data
	if joined.Process > 0 {
		_, err := spillway.Work(context.Background(), joined, func(warning string) { log.Println(warning) })
		check(err)
		return
	}
	cfg = cfg.Over(joined)
	t, err := spillway.New(ctx, cfg)
	check(err)
	err = t.Run(ctx, nil)
	joined.Dismiss(err)
	check(errors.Join(err, t.Close()))
}

func ExampleWork() {
	began, err := spillway.Work(context.Background(), joined, func(warning string) { log.Println(warning) })
	if !began {
		log.Println("the leader had nothing to run")
	}
	check(err)
}

func ExampleMetricsWriter() {
	t, err := spillway.New(ctx, small())
	check(err)
	defer t.Close()
	w, err := spillway.OpenMetrics(filepath.Join(os.TempDir(), "metrics.jsonl"), t.Done())
	check(err)
	check(t.Run(ctx, w.Step))
	sum, err := t.ParamsSHA256()
	check(err)
	check(w.Done(t.Done(), sum))
	check(w.Close())
}

func ExampleVerifyReceipt() {
	dir, err := os.MkdirTemp("", "spillway-example-")
	check(err)
	defer os.RemoveAll(dir)
	cfg := small()
	cfg.Steps, cfg.SaveEvery, cfg.Reproducible = 6, 2, true
	cfg.Checkpoint, cfg.Receipt = filepath.Join(dir, "run"), filepath.Join(dir, "receipt.jsonl")
	t, err := spillway.New(ctx, cfg)
	check(err)
	check(t.Run(ctx, nil))
	check(t.Close())
	found, err := spillway.VerifyReceipt(ctx, spillway.Verification{Checkpoint: cfg.Checkpoint, Change: func(c *spillway.Config) {
		c.Own, c.Ranks, c.Zero = cfg.Own, 1, 0 // the program's own model and data, on one rank
	}})
	check(err)
	fmt.Println("steps that were run again and are equal:", found.Checked)
	// Output: steps that were run again and are equal: 6
}

func ExampleVerification() {
	// Verify the last two segments of a run, on another machine.
	v := spillway.Verification{Checkpoint: "run1", Change: func(c *spillway.Config) { c.Data, c.Offload = "tokens.bin", "optimizer=host" }}
	v.Choose = func(can []receipts.Segment) []receipts.Segment { return can[max(0, len(can)-2):] }
	_, err := spillway.VerifyReceipt(ctx, v)
	if errors.Is(err, spillway.ErrDiffers) {
		log.Println(err)
	}
}

func ExampleErrDamaged() {
	cfg := small()
	cfg.Checkpoint, cfg.Steps = filepath.Join(os.TempDir(), fmt.Sprint("spillway-example-", os.Getpid())), 2
	defer os.RemoveAll(cfg.Checkpoint)
	t, err := spillway.New(ctx, cfg)
	check(err)
	check(t.Run(ctx, nil))
	check(t.Close())
	parts, err := filepath.Glob(filepath.Join(cfg.Checkpoint, "step-*", "*"))
	check(err)
	for _, part := range parts { // simulate a disk that lost its data
		check(os.Truncate(part, 1))
	}
	cfg.Resume = true
	_, err = spillway.New(ctx, cfg)
	fmt.Println(errors.Is(err, spillway.ErrDamaged))
	// Output: true
}

func ExampleErrLost() {
	t, err := spillway.New(ctx, small().Over(joined))
	check(err)
	err = t.Run(ctx, nil)
	if errors.Is(err, spillway.ErrLost) {
		log.Println("start it again: it goes on from its newest checkpoint")
	}
	check(errors.Join(err, t.Close()))
}
