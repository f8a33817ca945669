package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/zero"
)

// squares is a data set of images with a light square in one of four corners; the target is the
// corner's number. Every eighth image has no target.
type squares struct{ n int64 }

const squareSide = 8

func (s squares) Len() int64 { return s.n }

func (s squares) Sample(i int64, r *data.Row) error {
	rng := rand.New(rand.NewPCG(uint64(i), 11))
	class := rng.IntN(4)
	for k := range r.Input("x") {
		y, x := k/squareSide, k%squareSide
		v := 0.2 * rng.NormFloat64()
		if y/4 == class/2 && x/4 == class%2 {
			v++
		}
		r.Input("x")[k] = float32(v)
	}
	if i%8 != 7 {
		r.Targets[0] = int32(class)
	}
	return nil
}

// countedSquares is squares with CountTargets.
type countedSquares struct{ squares }

func (countedSquares) CountTargets(i int64) int {
	if i%8 == 7 {
		return 0
	}
	return 1
}

// clamp is a leaky ReLU: y = x for positive x, otherwise x/100.
var clampGrad = graph.MustDefine(graph.Definition{
	Kind: "test_clamp_grad", In: []graph.Operand{graph.FloatIn("x"), graph.FloatIn("dy")}, Out: []graph.Operand{graph.GradOut("dx")},
	Shapes: func(_ any, in [][]int64) ([][]int64, error) { return in[:1], nil },
	CPU: func(c *graph.Call) error {
		for i := range int(c.In[0].Elems()) {
			v := c.In[1].At(i)
			if c.In[0].At(i) < 0 {
				v *= 0.01
			}
			c.Out[0].Put(i, v)
		}
		return nil
	},
})

var clamp = graph.MustDefine(graph.Definition{
	Kind: "test_clamp", In: []graph.Operand{graph.FloatIn("x")}, Out: []graph.Operand{graph.FloatOut("y")}, Saves: []string{"x"},
	Shapes: func(_ any, in [][]int64) ([][]int64, error) { return in[:1], nil },
	CPU: func(c *graph.Call) error {
		for i := range int(c.In[0].Elems()) {
			c.Out[0].Put(i, max(c.In[0].At(i), 0.01*c.In[0].At(i)))
		}
		return nil
	},
	Derive: func(d *graph.Derivation) { d.Apply(clampGrad, "d", nil, []graph.BufID{d.In(0), d.Grad(0)}, 0) },
})

// descent updates p −= lr · coef · g.
var descentStep = graph.MustDefine(graph.Definition{
	Kind: "test_descent", In: graph.UpdateIn(), Out: []graph.Operand{graph.StateOut("p"), graph.LowOut()}, Attr: graph.UpdateAttr{},
	CPU: func(c *graph.Call) error {
		g, coef, lr, p, low := c.In[0].F32, c.In[1].F32[0], c.In[2].F64[graph.HyperLR], c.Out[0].F32, c.Out[1].F32
		for i := range p {
			p[i] -= float32(lr * float64(coef*g[i]))
			if low != nil {
				low[i] = p[i]
			}
		}
		return nil
	},
})

var descent = zero.Rule{Name: "descent", Emit: func(e *zero.Emitter, t *zero.Target) {
	e.ApplyOwn(t, descentStep, e.Scalars(t), zero.InPlace(t.Value))
}}

// twoPaths classifies squares with a convolution and a parallel second input.
func twoPaths() *config.Model {
	return &config.Model{Name: "two-paths", Forward: func(b *graph.Builder, rows, seq int, train bool) error {
		n := int64(rows)
		b.Unit("conv")
		x := b.Input("x", n, squareSide, squareSide, 1)
		x = b.Conv2D("conv", x, b.Param("conv.weight", graph.Normal(0.4), 4, 9), b.Param("conv.bias", graph.Zeros, 4), graph.ConvAttr{KH: 3, KW: 3, Stride: 1, Pad: 1})
		x = b.MaxPool("pool", b.Apply(clamp, "clamp", nil, x)[0], graph.ConvAttr{KH: 2, KW: 2, Stride: 2})
		x = b.Reshape("flat", x, n, 64)
		b.Unit("bias")
		extra := b.Linear("side", b.Input("extra", n, 3), b.Param("extra.weight", graph.Normal(0.1), 64, 3), graph.Value{}, graph.LinearAttr{TransW: true})
		b.Unit("head")
		x = b.Add("sum", x, extra)
		x = b.Linear("head", x, b.Param("head.weight", graph.Normal(0.1), 4, 64), graph.Value{}, graph.LinearAttr{TransW: true})
		b.CrossEntropy("loss", x, b.Targets(n, 1))
		return nil
	}}
}

func ownConfig(m *config.Model) request {
	c := request{Config: config.Default()}
	c.Own = config.Own{Model: m, Data: squares{64}, Eval: squares{20}, Schedule: func(step int) float64 { return 0.3 / float64(1+step) }}
	c.Ranks, c.Batch, c.Accum, c.Steps, c.EvalSteps, c.EvalEvery, c.Threads = 2, 4, 2, 3, 2, 2, 2
	c.Order, c.poison = "shuffled", true
	return c
}

// ran runs c and returns its losses, held-out losses and the hash of its parameters as text.
func ran(t *testing.T, c request) string {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	text := ""
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		text += fmt.Sprintf("%d: %v at %g, %v right", r.Step, r.Loss, r.LR, r.Accuracy)
		if r.Eval != nil {
			text += fmt.Sprintf(" held out %v of %d, %v right", r.Eval.Loss, r.Eval.Targets, r.Eval.Accuracy)
		}
		text += "\n"
		return nil
	}))
	sum, err := tr.ParamsSHA256()
	require.NoError(t, err)
	require.NotContains(t, text, "NaN")
	return text + sum
}

// TestOwnHasOneResult trains with the program's own model, operation, rule, schedule, masked data
// and second input. Stage, micro-batch order and placement must not change the result, in fp32 and
// bf16.
func TestOwnHasOneResult(t *testing.T) {
	for _, precision := range []string{"fp32", "bf16"} {
		base := ownConfig(twoPaths())
		base.Own.Rule, base.Precision, base.Zero = &descent, precision, 0
		want := ran(t, base)
		for name, change := range map[string]func(c *request){
			"stage 1, layer order": func(c *request) { c.Zero, c.AccumOrder = 1, "layer" },
			"counted":              func(c *request) { c.Own.Data = countedSquares{squares{64}} },
			"all on the host, made again": func(c *request) {
				c.Offload, c.Recompute = "optimizer=host,parameters=host,activations=host", "full"
			},
		} {
			c := base
			change(&c)
			require.Equal(t, want, ran(t, c), "%s, %s", precision, name)
		}
		two, three := base, base
		two.Zero, three.Zero = 2, 3
		require.Equal(t, ran(t, two), ran(t, three), precision)
	}
}

// TestAnInputIsReshaped checks that a model may reshape its input so that the first dimension is
// not the rows. Here each image is four samples of a layer.
func TestAnInputIsReshaped(t *testing.T) {
	c := ownConfig(&config.Model{Name: "parts", Forward: func(b *graph.Builder, rows, seq int, train bool) error {
		n := int64(rows)
		b.Unit("parts")
		x := b.Reshape("parts", b.Input("x", n, squareSide*squareSide), 4*n, squareSide*squareSide/4)
		x = b.Linear("part", x, b.Param("part.weight", graph.Normal(0.2), 3, squareSide*squareSide/4), graph.Value{}, graph.LinearAttr{TransW: true})
		x = b.Reshape("whole", x, n, 12)
		x = b.Linear("head", x, b.Param("head.weight", graph.Normal(0.2), 4, 12), graph.Value{}, graph.LinearAttr{TransW: true})
		b.CrossEntropy("loss", x, b.Targets(n, 1))
		return nil
	}})
	c.Zero = 0
	want := ran(t, c)
	c.Zero, c.AccumOrder = 1, "layer"
	require.Equal(t, want, ran(t, c))
}

// TestClassifiersLearn trains package model's models that are not language models; the loss must
// fall and the accuracy be near 1.
func TestClassifiersLearn(t *testing.T) {
	for _, m := range []model.Config{
		{Family: model.MLP, Inputs: squareSide * squareSide, Hidden: []int{24}, Classes: 4},
		{Family: model.CNN, Height: squareSide, ImgWidth: squareSide, Chans: 1, Hidden: []int{6}, Classes: 4},
	} {
		c := ownConfig(config.NewModel(string(m.Family), m))
		c.Own.Schedule, c.LR, c.Steps, c.Batch, c.Accum, c.poison = nil, 0.01, 40, 8, 1, false
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		var first, last float32
		var accuracy *EvalResult
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
			if last = r.Loss; r.Step == 1 {
				first = r.Loss
			}
			accuracy = r.Eval
			return nil
		}))
		require.NoError(t, tr.Close())
		require.InDelta(t, 1, accuracy.Accuracy, 0.1, m.Family)
		require.Greater(t, first, float32(1.0), m.Family)
		require.Less(t, last, 0.3*first, m.Family)
	}
}

// TestMaskedTargetsDoNotCount checks that targets of −1 are excluded from the mean loss.
func TestMaskedTargetsDoNotCount(t *testing.T) {
	m := config.NewModel("mlp", model.Config{Family: model.MLP, Inputs: squareSide * squareSide, Classes: 4})
	c := ownConfig(m)
	c.Own.Data, c.Own.Eval, c.Order, c.EvalEvery, c.Accum, c.Steps = squares{16}, nil, "", 0, 1, 1 // samples 0 to 7, of which 7 count
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	_, w, err := tr.Parameter("layer.0.weight")
	require.NoError(t, err)
	tokens, targets, err := tr.Sample(0, 0, 1)
	require.NoError(t, err)
	require.Empty(t, tokens)
	require.Len(t, targets, c.Batch)
	require.Equal(t, int32(-1), targets[3], "sample 7")
	require.NotContains(t, targets[:3], int32(-1))
	sum := 0.0
	for i := range int64(7) {
		shape := data.Shape{Targets: 1, Inputs: []data.InputSize{{Name: "x", Elems: squareSide * squareSide}}}
		in := shape.NewMicro(1)
		r, err := data.NewSampleReader(onlySample{i}, shape, 1, data.SamplerConfig{Batch: 1, StepRows: data.StepRows{Accum: 1}, Ranks: 1})
		require.NoError(t, err)
		require.NoError(t, r.FillSamples(0, 0, 0, in))
		var logits [4]float64
		total := 0.0
		for k := range logits {
			for j, x := range in.Inputs[0] {
				logits[k] += float64(w[k*len(in.Inputs[0])+j]) * float64(x)
			}
			total += math.Exp(logits[k])
		}
		sum += math.Log(total) - logits[in.Targets[0]]
	}
	r, err := tr.Step(context.Background())
	require.NoError(t, err)
	require.InEpsilon(t, sum/7, float64(r.Loss), 1e-5)
}

// TestASumIsAMeanOverSamples checks a model without targets. Its loss and gradient are means over
// the step's samples, for any micro-batches, ranks and precision.
func TestASumIsAMeanOverSamples(t *testing.T) {
	fit := &config.Model{Name: "fit", Forward: func(b *graph.Builder, rows, _ int, _ bool) error {
		b.Unit("fit")
		y := b.Linear("y", b.Input("x", int64(rows), 2), b.Param("w", graph.Normal(0.5), 1, 2), graph.Value{}, graph.LinearAttr{TransW: true})
		off := b.Sub("off", y, b.Input("want", int64(rows), 1))
		b.SumLoss("loss", b.Mul("square", off, off))
		return nil
	}}
	const samples, rate = 8, 0.1
	for name, change := range map[string]func(c *request){
		"one micro-batch":      func(c *request) { c.Ranks, c.Batch, c.Accum = 1, samples, 1 },
		"two ranks, stage 3":   func(c *request) { c.Zero = 3 },
		"layer order":          func(c *request) { c.AccumOrder = "layer" },
		"made again, 16 bits":  func(c *request) { c.Recompute, c.Precision = "full", "bf16" },
		"scaled loss, 16 bits": func(c *request) { c.Precision = "fp16" },
	} {
		c := ownConfig(fit)
		c.Own.Data, c.Own.Eval, c.Own.Schedule, c.EvalEvery = points(samples), nil, nil, 0
		c.Order, c.Batch, c.Optimizer, c.Beta1, c.LR, c.WeightDecay, c.Clip, c.Steps = "sequential", samples/4, "sgd", 0, rate, 0, 0, 1
		change(&c)
		tr, err := c.start(context.Background())
		require.NoError(t, err, name)
		_, w, err := tr.Parameter("w")
		require.NoError(t, err)
		var loss float64
		var grad [2]float64
		for i := range int64(samples) {
			x, want := point(i)
			off := float64(w[0])*x[0] + float64(w[1])*x[1] - want
			loss += off * off / samples
			for k := range grad {
				grad[k] += 2 * off * x[k] / samples
			}
		}
		r, err := tr.Step(context.Background())
		require.NoError(t, err, name)
		require.InEpsilon(t, loss, float64(r.Loss), 1e-2, name)
		_, after, err := tr.Parameter("w")
		require.NoError(t, err)
		for k := range grad {
			require.InEpsilon(t, -rate*grad[k], float64(after[k]-w[k]), 2e-2, "%s: parameter %d", name, k)
		}
		require.NoError(t, tr.Close())
	}
}

// points is a data set of the given number of samples of a plane.
type points int64

func (p points) Len() int64 { return int64(p) }

func (points) Sample(i int64, r *data.Row) error {
	x, want := point(i)
	for k := range x {
		r.Input("x")[k] = float32(x[k])
	}
	r.Input("want")[0] = float32(want)
	return nil
}

func point(i int64) (x [2]float64, want float64) {
	x = [2]float64{float64(i%4) / 4, float64(i%3) / 2}
	return x, 1 + 2*x[0] - x[1]
}

// onlySample is a data set of sample i of squares.
type onlySample struct{ i int64 }

func (onlySample) Len() int64                          { return 1 }
func (o onlySample) Sample(_ int64, r *data.Row) error { return squares{8}.Sample(o.i, r) }

// TestStopAndGoOn checks that ErrStop ends a run with a checkpoint and without an error. The
// resumed run must give the results of an uninterrupted one. A checkpoint of another model is
// refused.
func TestStopAndGoOn(t *testing.T) {
	c := ownConfig(twoPaths())
	c.Own.Eval, c.EvalEvery, c.Steps, c.Zero = nil, 0, 4, 3
	want := ran(t, c)
	c.Checkpoint = t.TempDir()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		if r.Step == 2 {
			return fmt.Errorf("enough: %w", ErrStop)
		}
		return nil
	}))
	require.Equal(t, 2, tr.Done())
	require.NoError(t, tr.Close())
	entries, err := os.ReadDir(c.Checkpoint)
	require.NoError(t, err)
	require.NotEmpty(t, entries)

	c.Resume = true
	other := *c.Own.Model
	other.Name = "another"
	no := c
	no.Own.Model = &other
	_, err = no.start(context.Background())
	require.ErrorContains(t, err, `holds model "two-paths", not "another"`)

	ended := ran(t, c)
	require.Contains(t, ended, "3: ")
	require.NotContains(t, ended, "2: ")
	require.Equal(t, want[len(want)-64:], ended[len(ended)-64:])
}

// TestSetParameter checks that parameters set with SetParameter are used: two runs with the same
// parameters have the same loss.
func TestSetParameter(t *testing.T) {
	for _, precision := range []string{"fp32", "bf16"} {
		c := ownConfig(twoPaths())
		c.Precision, c.Zero, c.EvalEvery = precision, 3, 0
		a, err := c.start(context.Background())
		require.NoError(t, err)
		c.Seed = 7
		b, err := c.start(context.Background())
		require.NoError(t, err)
		require.Equal(t, []string{"conv.weight", "conv.bias", "extra.weight", "head.weight"}, a.Parameters())
		for _, name := range a.Parameters() {
			_, v, err := a.Parameter(name)
			require.NoError(t, err)
			require.NoError(t, b.SetParameter(name, v))
		}
		x, err := a.Evaluate(context.Background())
		require.NoError(t, err)
		y, err := b.Evaluate(context.Background())
		require.NoError(t, err)
		require.Equal(t, x.Loss, y.Loss)
		require.ErrorContains(t, b.SetParameter("conv.bias", make([]float32, 3)), "3 values, want the 4 of shape [4]")
		require.ErrorContains(t, b.SetParameter("conv.bias", []float32{0, 0, float32(math.Inf(1)), 0}), "element 2 is +Inf")
		require.ErrorContains(t, b.SetParameter("none", nil), `no parameter "none"`)
		require.NoError(t, errors.Join(a.Close(), b.Close()))
	}
}

// TestEvaluateAllSamples checks that an evaluation of all held-out samples counts each once,
// although padding rows complete the last batch.
func TestEvaluateAllSamples(t *testing.T) {
	c := ownConfig(config.NewModel("mlp", model.Config{Family: model.MLP, Inputs: squareSide * squareSide, Classes: 4}))
	c.Inference, c.Own.Data, c.EvalEvery = true, nil, 0
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	r, err := tr.Evaluate(context.Background())
	require.NoError(t, err)
	require.Equal(t, int64(18), r.Targets) // of 20, 7 and 15 have none
}

func TestOwnIsRefusedByName(t *testing.T) {
	for want, change := range map[string]func(c *request){
		"Config.Own.Model has no Forward":              func(c *request) { c.Own.Model = &config.Model{Name: "m"} },
		"Config.Own.Model has no Name":                 func(c *request) { c.Own.Model.Name = "" },
		`Config.Model "gpt2" and Config.Own.Model`:     func(c *request) { c.Model = "gpt2" },
		`Config.Data "d.bin" and Config.Own.Data`:      func(c *request) { c.Data = "d.bin" },
		`Config.Own.Rule is named "adamw"`:             func(c *request) { c.Own.Rule = &zero.Rule{Name: "adamw", Emit: descent.Emit} },
		"Config.Own.Rule has no Name":                  func(c *request) { c.Own.Rule = &zero.Rule{} },
		"Config.Generate with Config.Own.Model":        func(c *request) { c.Generate = true },
		"the learning rate is NaN":                     func(c *request) { c.Own.Schedule = func(int) float64 { return math.NaN() } },
		`model "two-paths": input "x" has shape [1 2]`: badForward(func(b *graph.Builder) { b.Input("x", 1, 2) }),
		`model "two-paths": graph: fc: operand x is missing`: badForward(func(b *graph.Builder) {
			b.Linear("fc", graph.Value{}, graph.Value{}, graph.Value{}, graph.LinearAttr{})
		}),
		`model "two-paths" has no loss`:                          badForward(func(*graph.Builder) {}),
		"it needs data of its own (Config.Own)":                  func(c *request) { c.Own.Data, c.Data = nil, "tokens.bin" },
		": target 0 is 4, want -1 to 3":                          func(c *request) { c.Own.Data = wrongTarget{} },
		"Config.Own.Data: sample data: Len is 0":                 func(c *request) { c.Own.Data = squares{0} },
		": the disk is gone":                                     func(c *request) { c.Own.Data = goneData{} },
		"sum of x: and an error of the program's own comes back": badForward2(),
	} {
		c := ownConfig(twoPaths())
		change(&c)
		tr, err := c.start(context.Background())
		if err == nil {
			_, err = tr.Step(context.Background())
			require.NoError(t, tr.Close())
		}
		require.ErrorContains(t, err, want)
	}
}

// TestValuesAreTheConfigurations checks that impossible values give an ErrConfig error, wherever
// they are detected.
func TestValuesAreTheConfigurations(t *testing.T) {
	for want, change := range map[string]func(c *request){
		"Config.Ranks 5000: one process runs at most 1024":  func(c *request) { c.Ranks = 5000 },
		"Config.ShardSize 3 with Config.Ranks 2":            func(c *request) { c.ShardSize, c.Zero = 3, 1 },
		`"[" is not a pattern of names`:                     func(c *request) { c.Freeze = []string{"["} },
		`no parameter matches "foo"`:                        func(c *request) { c.Freeze = []string{"foo"} },
		"device memory outside the arena: -7 bytes":         func(c *request) { c.Outside[graph.Device] = -7 },
		"Config.Own.Data: sample data: Len is 0, want at":   func(c *request) { c.Own.Data = squares{} },
		"Config.Own.Eval: sample data: Len is 0, want at":   func(c *request) { c.Own.Eval = squares{} },
		"Config.LocalRanks -7 is negative; 0 or more ranks": func(c *request) { c.LocalRanks = -7 },
		"Config.PerHost -7 is negative; 0 or more ranks":    func(c *request) { c.PerHost = -7 },
	} {
		c := ownConfig(twoPaths())
		change(&c)
		tr, err := c.start(t.Context())
		if err == nil {
			require.NoError(t, tr.Close(), want)
		}
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, ErrConfig, want)
	}
}

func badForward(write func(b *graph.Builder)) func(c *request) {
	return func(c *request) {
		c.Own.Model.Forward = func(b *graph.Builder, rows, seq int, train bool) error { write(b); return nil }
	}
}

func badForward2() func(c *request) {
	return func(c *request) {
		c.Own.Model.Forward = func(*graph.Builder, int, int, bool) error {
			return errors.New("sum of x: and an error of the program's own comes back")
		}
	}
}

type wrongTarget struct{}

func (wrongTarget) Len() int64                        { return 8 }
func (wrongTarget) Sample(_ int64, r *data.Row) error { r.Targets[0] = 4; return nil }

type goneData struct{}

func (goneData) Len() int64                    { return 8 }
func (goneData) Sample(int64, *data.Row) error { return errors.New("the disk is gone") }
