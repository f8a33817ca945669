package run_test

import (
	"crypto/sha256"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/owntest"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/zero"
)

// This file alone defines an operation and an optimizer that no package of the module knows.

// bendAttr holds the attributes of bend.
type bendAttr struct{ Strength float64 }

// sameAs returns a shape rule for bend and its gradient: x is (N,C), w is (C), and the outputs have
// the shapes of the given inputs.
func sameAs(inputs ...int) func(any, [][]int64) ([][]int64, error) {
	return func(_ any, in [][]int64) (out [][]int64, err error) {
		if len(in[0]) != 2 || len(in[1]) != 1 || in[1][0] != in[0][1] {
			return nil, fmt.Errorf("x is %v and w %v, want (N,C) and (C)", in[0], in[1])
		}
		for _, i := range inputs {
			out = append(out, in[i])
		}
		return out, nil
	}
}

// bendGrad computes the gradients of bend's two inputs.
var bendGrad = graph.MustDefine(graph.Definition{
	Kind: "bend_grad", Doc: "dx = dy·(1 + 2·Strength·w·x), dw = Strength·Σ dy·x² over rows",
	In:   []graph.Operand{graph.FloatIn("x"), graph.FloatIn("w"), graph.FloatIn("dy")},
	Out:  []graph.Operand{graph.GradOut("dx"), graph.GradOut("dw")},
	Attr: bendAttr{}, Shapes: sameAs(0, 1),
	Flops: func(_ any, in, _ [][]int64) int64 { return 8 * in[0][0] * in[0][1] },
	CPU:   bendBackward, Reference: bendBackward,
})

// One index sums one column, so each sum has a fixed order.
func bendBackward(c *graph.Call) error {
	x, w, dy := &c.In[0], &c.In[1], &c.In[2]
	n, s := int(x.Shape[1]), c.Attr.(bendAttr).Strength
	c.Parallel(n, func(j int) {
		sum := 0.0
		for i := j; i < int(x.Elems()); i += n {
			c.Out[0].Put(i, dy.At(i)*(1+2*s*w.At(j)*x.At(i)))
			sum += dy.At(i) * x.At(i) * x.At(i)
		}
		c.Out[1].Put(j, s*sum)
	})
	return nil
}

func bendForward(c *graph.Call) error {
	x, w := &c.In[0], &c.In[1]
	n, s := int(x.Shape[1]), c.Attr.(bendAttr).Strength
	c.Parallel(int(x.Shape[0]), func(row int) {
		for i := row * n; i < (row+1)*n; i++ {
			c.Out[0].Put(i, x.At(i)+s*w.At(i%n)*x.At(i)*x.At(i))
		}
	})
	return nil
}

var bend = graph.MustDefine(graph.Definition{
	Kind: "bend", Doc: "y = x + Strength·w·x², w (C) by column of x (N,C)", Derivative: "dx = dy·(1 + 2·Strength·w·x); dw = Strength·Σ dy·x²",
	In: []graph.Operand{graph.FloatIn("x"), graph.FloatIn("w")}, Out: []graph.Operand{graph.FloatOut("y")},
	Attr: bendAttr{}, Saves: []string{"x", "w"}, Cheap: true, Shapes: sameAs(0),
	Flops: func(_ any, in, _ [][]int64) int64 { return 4 * in[0][0] * in[0][1] },
	Derive: func(d *graph.Derivation) {
		d.Apply(bendGrad, "d", d.Attr(), []graph.BufID{d.In(0), d.In(1), d.Grad(0)}, 0, 1)
	},
	CPU: bendForward, Reference: bendForward,
})

// signum is momentum SGD that steps by the momentum's sign (Bernstein et al., signSGD, 2018).
var signumStep = graph.MustDefine(graph.Definition{
	Kind: "signum", Doc: "m = Beta1·m + (1−Beta1)·coef·g; p −= lr·(sign(m) + Decay·p)",
	In: graph.UpdateIn(), Out: []graph.Operand{graph.StateOut("p"), graph.StateOut("m"), graph.LowOut()}, Attr: graph.UpdateAttr{},
	CPU: func(c *graph.Call) error {
		a := c.Attr.(graph.UpdateAttr)
		g, coef, lr := c.In[0].F32, c.In[1].F32[0], c.In[2].F64[graph.HyperLR]
		p, m, low := c.Out[0].F32, c.Out[1].F32, c.Out[2].F32
		c.Parallel(len(c.Params), func(k int) {
			r := c.Params[k]
			for i := r.Lo; i < r.Hi; i++ {
				m[i] = float32(a.Beta1*float64(m[i]) + (1-a.Beta1)*float64(coef*g[i]))
				step := math.Copysign(1, float64(m[i]))
				if r.Decay {
					step += a.Decay * float64(p[i])
				}
				p[i] -= float32(lr * step)
				if low != nil {
					low[i] = p[i]
				}
			}
		})
		return nil
	},
})

var signum = zero.Rule{Name: "signum", States: []string{"momentum"}, Source: "Bernstein et al., signSGD, 2018",
	Emit: func(e *zero.Emitter, t *zero.Target) {
		e.ApplyOwn(t, signumStep, e.Scalars(t), zero.InPlace(t.Value, t.States[0]))
	}}

const ownRows, ownSeq, ownWidth, ownVocab = 2, 4, 48, 31

func ownModel(t *testing.T) *graph.Program {
	b := graph.NewBuilder()
	b.Unit("in")
	x := b.Embed("embed", b.Tokens(ownRows, ownSeq), b.Param("embed.weight", graph.Normal(0.5), ownVocab, ownWidth))
	for i := range 3 {
		b.Block("h", i)
		name := fmt.Sprintf("h.%d.", i)
		y := b.Linear(name+"fc", x, b.Param(name+"fc.weight", graph.Normal(0.2), ownWidth, ownWidth), graph.Value{}, graph.LinearAttr{})
		y = b.Apply(bend, name+"bend", bendAttr{0.25}, y, b.Param(name+"bend.weight", graph.Normal(0.5), ownWidth))[0]
		x = b.Add(name+"add", x, y)
	}
	b.Unit("out")
	b.CrossEntropy("loss", b.Linear("head", x, b.Param("head.weight", graph.Normal(0.2), ownWidth, ownVocab), graph.Value{}, graph.LinearAttr{}), b.Targets(ownRows, ownSeq))
	p, err := b.Program()
	require.NoError(t, err)
	return p
}

func TestDefinitionsHold(t *testing.T) {
	for seed := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, 1))
		n, c := 1+rng.Int64N(9), 1+rng.Int64N(40)
		require.NoError(t, owntest.Check(bend, bendAttr{0.3}, [][]int64{{n, c}, {c}}, seed))
		require.NoError(t, owntest.Check(bendGrad, bendAttr{0.3}, [][]int64{{n, c}, {c}, {n, c}}, seed))
	}
}

// trained runs two steps and returns the parameters and losses as text.
func trained(t *testing.T, c plan.Config) string {
	pl, err := plan.Build(plan.Forward{Train: ownModel(t)}, c)
	require.NoError(t, err)
	world := platform.OneProcess(c.Ranks)
	device, err := platform.NewCPU(platform.Options{Device: "cpu", World: world, Timeout: time.Minute, Poison: true, CheckWrites: true})
	require.NoError(t, err)
	workers := pool.New(2)
	defer workers.Close()
	require.NoError(t, device.Start(platform.Setup{Plan: pl, Pool: workers}))
	ranks, err := run.Open(run.RankOptions{World: world, Plan: pl, Platform: device, Timeout: time.Minute, Poison: true})
	defer func() {
		require.NoError(t, ranks.Close())
		require.NoError(t, device.Close())
	}()
	require.NoError(t, err)
	require.NoError(t, ranks.Each("init", func(r *run.Rank) error { return r.Exec.RunSection("init", nil) }))
	p, states := pl.Program, ranks.States()
	for i := range p.Params {
		v := make([]float32, p.Params[i].Elems())
		num.FillNormal(v, p.Params[i].Std, 7, num.Stream(p.Params[i].Name), 0)
		require.NoError(t, states.Write(i, "value", 0, v))
	}
	if p.Section(graph.SectionRefresh.String()) != nil {
		require.NoError(t, ranks.Each("refresh", func(r *run.Rank) error { return r.Exec.RunSection(graph.SectionRefresh.String(), nil) }))
	}
	losses := make([]float64, c.Ranks)
	for step := range 2 {
		require.NoError(t, ranks.Each("step", func(r *run.Rank) error {
			micro := 0
			err := r.Exec.RunSection("step", func(ph *graph.Phase, _ int) error {
				if ph.Kind != graph.MicroPhase {
					return nil
				}
				err := fillOwn(r.Exec, p, step, (micro*c.Ranks+r.Index)*ownRows, c)
				micro++
				return err
			})
			if err != nil {
				return err
			}
			l, err := r.Exec.HostF64(p.Port(graph.PortLoss))
			if err == nil {
				losses[r.Index] = l[0]
			}
			return err
		}))
	}
	if p.Section(graph.SectionFlush.String()) != nil {
		require.NoError(t, ranks.Each("flush", func(r *run.Rank) error { return r.Exec.RunSection(graph.SectionFlush.String(), nil) }))
	}
	h := sha256.New()
	require.NoError(t, states.Hash(h))
	return fmt.Sprintf("%x %v", h.Sum(nil)[:8], losses[0])
}

func fillOwn(e run.Executor, p *graph.Program, step, row int, c plan.Config) error {
	tokens, err := e.HostI32(p.Port(graph.PortTokens))
	if err != nil {
		return err
	}
	targets, err := e.HostI32(p.Port(graph.PortTargets))
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(uint64(step), uint64(row)))
	for i := range tokens {
		tokens[i], targets[i] = rng.Int32N(ownVocab), rng.Int32N(ownVocab)
	}
	h, err := e.HostF64(p.Port(graph.PortHyper))
	if err != nil {
		return err
	}
	h[graph.HyperLR], h[graph.HyperInvCount], h[graph.HyperLossScale], h[graph.HyperUpdate] = 0.01, 1/float64(c.Ranks*c.Accum*ownRows*ownSeq), 1, float64(step+1)
	h[graph.HyperBC1], h[graph.HyperBC2] = 1-math.Pow(0.9, float64(step+1)), 1-math.Pow(0.95, float64(step+1))
	return nil
}

// A model with a user-defined operation, trained by a user-defined rule, gives the same bits at
// every stage, with recomputation and with optimizer and activations offloaded, in f32 and in bf16.
func TestOwnOperationAndRule(t *testing.T) {
	for _, prec := range []precision.Precision{precision.FP32, precision.BF16} {
		base := plan.Config{Ranks: 2, Accum: 1, Prefetch: 1, Clip: 1, Target: graph.CPUTarget(), Verify: true, Precision: prec,
			Optimizer: zero.Optimizer{Rule: &signum, Beta1: 0.9, Decay: 0.1}}
		want := trained(t, base)
		require.NotContains(t, want, "NaN")
		for name, change := range map[string]func(c *plan.Config) error{
			"stage 3": func(c *plan.Config) error { c.Stage = 3; return nil },
			"stage 3, recomputed, offloaded": func(c *plan.Config) (err error) {
				c.Stage = 3
				if c.Recompute, err = recompute.Parse("full"); err != nil {
					return err
				}
				c.Offload, err = offload.Parse("optimizer=host,parameters=host,activations=host")
				c.Offload.Chunk = 1024
				return err
			},
			"stage 1, updated in chunks on the host": func(c *plan.Config) (err error) {
				c.Stage = 1
				c.Offload, err = offload.Parse("optimizer=host")
				c.Offload.Chunk = 1024
				return err
			},
			"stage 2, cheap ones made again": func(c *plan.Config) (err error) {
				c.Stage = 2
				c.Recompute, err = recompute.Parse("selective")
				return err
			},
		} {
			c := base
			require.NoError(t, change(&c))
			require.Equal(t, want, trained(t, c), "%v, %s", prec, name)
		}
	}
}

// Operations that a program cannot use are refused, and the error names them.
func TestOwnOperationsAreRefused(t *testing.T) {
	again, err := graph.Define(*bend.Definition())
	require.NoError(t, err)
	b := graph.NewBuilder()
	b.Unit("u")
	x, w := b.Param("x", graph.Ones, 3, 4), b.Param("w", graph.Ones, 4)
	b.Apply(bend, "one", bendAttr{1}, x, w)
	b.Apply(again, "two", bendAttr{1}, x, w)
	_, err = b.Program()
	require.ErrorContains(t, err, `two operations are defined as "bend"; define it once`)

	b = graph.NewBuilder()
	b.Unit("u")
	b.Apply(bend, "one", bendAttr{1}, b.Param("x", graph.Ones, 3, 4), b.Param("w", graph.Ones, 5))
	_, err = b.Program()
	require.ErrorContains(t, err, "graph: one (bend): x is [3 4] and w [5], want (N,C) and (C)")

	d := *bend.Definition()
	d.Kind = graph.Linear
	_, err = graph.Define(d)
	require.ErrorContains(t, err, `operation "linear": its Kind is one of the kind table's`)
	d.Kind, d.CPU = "bent", nil
	_, err = graph.Define(d)
	require.ErrorContains(t, err, `operation "bent": its CPU is nil`)

	text := graph.Format(ownModel(t))
	back, err := progtext.Parse(text, bend)
	require.NoError(t, err)
	require.NoError(t, graph.VerifyStructure(back))
	require.Equal(t, text, graph.Format(back))

	// owntest.Check detects wrong definitions.
	d = *bend.Definition()
	d.Kind, d.Reference = "bent", func(c *graph.Call) error {
		if err := bendForward(c); err != nil {
			return err
		}
		c.Out[0].F64[0] += 0.01
		return nil
	}
	wrong, err := graph.Define(d)
	require.NoError(t, err)
	require.ErrorContains(t, owntest.Check(wrong, bendAttr{1}, [][]int64{{2, 3}, {3}}, 1), "output y, added to what is there false: element 0 is")
	d.Reference, d.Derive = bendForward, func(d *graph.Derivation) { d.Pass(0, 0, "dx") }
	wrong, err = graph.Define(d)
	require.NoError(t, err)
	require.ErrorContains(t, owntest.Check(wrong, bendAttr{1}, [][]int64{{2, 3}, {3}}, 1), "the loss does not depend on w")
}
