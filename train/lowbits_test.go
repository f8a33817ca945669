package train

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// oneBatch reduces the data of c to one global batch, so that every step has the same rows.
func oneBatch(t *testing.T, c *request) {
	text, err := os.ReadFile(c.Data)
	require.NoError(t, err)
	c.Data = filepath.Join(t.TempDir(), "batch.bin")
	require.NoError(t, os.WriteFile(c.Data, text[:2*(c.Ranks*c.Batch*c.Seq+1)], 0o644))
}

// measure computes the 16-bit gradients of a run at any weights. Plain SGD with rate 2^20 gives W −
// 2^20·g; rounding the difference to the gradient's type is exact.
type measure struct {
	tr     *Trainer
	digits int // bits of the gradient's significand
}

func newMeasure(t *testing.T, c request) *measure {
	c.Optimizer, c.OptimizerDType, c.StochasticRounding, c.Int8, c.Nesterov = "sgd", "", false, nil, false
	c.LR, c.Beta1, c.WeightDecay, c.Clip, c.Warmup, c.Zero, c.LRSchedule = 1<<20, 0, 0, 0, 0, 0, "constant"
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, tr.Close()) })
	return &measure{tr, map[string]int{"bf16": 8, "fp16": 11}[c.Precision]}
}

func (m *measure) at(t *testing.T, w tensors) (map[string][]float64, float64) {
	t.Helper()
	for name, p := range w {
		v := make([]float32, len(p.v))
		for i, x := range p.v {
			v[i] = float32(x)
		}
		require.NoError(t, m.tr.SetParameter(name, v))
	}
	r, err := m.tr.Step(t.Context())
	require.NoError(t, err)
	grads, square := map[string][]float64{}, 0.0
	for name, after := range parameters(t, m.tr) {
		g := make([]float64, len(after.v))
		for i := range g {
			frac, exp := math.Frexp((w[name].v[i] - after.v[i]) / (1 << 20))
			g[i] = math.Ldexp(math.RoundToEven(math.Ldexp(frac, m.digits)), exp-m.digits)
			square += g[i] * g[i]
		}
		grads[name] = g
	}
	require.InEpsilon(t, math.Sqrt(square), r.GradNorm, 1e-6)
	return grads, math.Sqrt(square)
}

// dynamicMap returns the code book of the block-wise 8-bit optimizers (Dettmers et al., 2022) with
// 2^bits magnitudes. These are 0, 1, and decades down from [0.1, 1). Each decade has half the steps
// of the one above; a code is the middle of a step.
func dynamicMap(bits int) (book []float64) {
	book = []float64{0, 1}
	for k := 1; k < bits; k++ {
		top, steps := math.Pow(10, float64(k-bits+1)), math.Exp2(float64(k))
		for i := range int(steps) {
			book = append(book, top*(0.1+0.9*(float64(i)+0.5)/steps))
		}
	}
	slices.Sort(book)
	return book
}

// quantised8 rounds a state as 8-bit storage does: per block, the nearest code times the largest
// magnitude. A positive second moment keeps a positive code.
func quantised8(x []float64, book []float64, second bool) {
	for lo := 0; lo < len(x); lo += 256 {
		block := x[lo:min(lo+256, len(x))]
		scale := 0.0
		for _, v := range block {
			scale = max(scale, math.Abs(v))
		}
		if scale == 0 {
			continue
		}
		for i, v := range block {
			at, _ := slices.BinarySearch(book, math.Abs(v)/scale)
			at = min(at, len(book)-1)
			if at > 0 && math.Abs(v)/scale-book[at-1] < book[at]-math.Abs(v)/scale {
				at--
			}
			if second && v > 0 {
				at = max(at, 1)
			}
			block[i] = math.Copysign(book[at]*scale, v)
		}
	}
}

// TestLowBitOptimizersFollowTheirPapers runs every optimizer in 16 bits, and AdamW also with 8-bit
// moments, with clipping and weight decay. The weights of each step must follow the paper's rule in
// float64 with the same 16-bit gradients. 8-bit moments are compared with a plain implementation of
// their method. It runs 12 steps, with SPILLWAY_LONG 50.
func TestLowBitOptimizersFollowTheirPapers(t *testing.T) {
	t.Parallel()
	signed, unsigned := dynamicMap(7), dynamicMap(8)
	steps := long.Or(12, 50)
	for i, name := range []string{"adamw", "sgd", "lamb", "lars", "larc", "novograd", "adagrad", "nesterov", "adamw8"} {
		for k, precision := range []string{"bf16", "fp16"} {
			if !long.On() && (i+k)%2 == 1 {
				continue
			}
			t.Run(name+"/"+precision, func(t *testing.T) {
				c := tiny("gpt2")
				c.Ranks, c.Zero, c.Batch, c.Seq, c.Precision = 1, 3, 1, 24, precision
				oneBatch(t, &c)
				if precision == "fp16" {
					c.LossScale = "1024"
				}
				c.Optimizer, c.LR, c.Beta1, c.Beta2, c.Eps, c.WeightDecay, c.Clip, c.Trust = name, 3e-3, 0.8, 0.9, 1e-6, 0.3, 0.5, 0.02
				eight := name == "adamw8"
				switch name {
				case "adamw8":
					c.Optimizer, c.Int8 = "adamw", []string{"optimizer"}
				case "nesterov":
					c.Optimizer, c.Nesterov = "sgd", true
				case "adagrad": // the first step is d/(|d|+eps), which amplifies f32's rounding of d by 1/eps
					c.Eps = 1e-2
				}
				m := newMeasure(t, c)
				tr, err := c.start(t.Context())
				require.NoError(t, err)
				defer func() { require.NoError(t, tr.Close()) }()
				first := parameters(t, tr)
				now, want := first, map[string][]float64{}
				m1, m2 := map[string][]float64{}, map[string][]float64{}
				for p, w := range first {
					want[p], m1[p], m2[p] = slices.Clone(w.v), make([]float64, len(w.v)), make([]float64, len(w.v))
				}
				for step := 1; step <= steps; step++ {
					grads, norm := m.at(t, now)
					r, err := tr.Step(t.Context())
					require.NoError(t, err)
					require.InEpsilon(t, norm, r.GradNorm, 1e-5, "step %d", step)
					now = parameters(t, tr)
					var off, moved, size float64
					for p, w := range first {
						g := grads[p]
						for i := range g {
							g[i] *= min(1, c.Clip/(norm+1e-6))
						}
						h := hyper{lr: r.LR, b1: c.Beta1, b2: c.Beta2, eps: c.Eps, trust: c.Trust, nesterov: c.Nesterov, adapt: w.decay, unadapted: c.Trust}
						if w.decay {
							h.decay = c.WeightDecay
						}
						papers[c.Optimizer](want[p], g, m1[p], m2[p], step, h)
						if eight {
							quantised8(m1[p], signed, false)
							quantised8(m2[p], unsigned, true)
						}
						for i, x := range want[p] {
							off += (now[p].v[i] - x) * (now[p].v[i] - x)
							moved += (w.v[i] - x) * (w.v[i] - x)
							size += x * x
						}
					}
					limit := map[bool]float64{false: 3e-5, true: 3e-3}[eight]
					resolution := math.Exp2(-25) * math.Sqrt(size) * float64(step) // of fp32 master weights
					require.Less(t, math.Sqrt(off), limit*math.Sqrt(moved)+resolution, "step %d: the weights' distance from the paper's, which moved by %g", step, math.Sqrt(moved))
				}
			})
		}
	}
}

// TestStochasticRoundingIsFair runs 50 steps of AdamW with bf16 parameters and moments. Each new
// value must be one of the two bf16 values around the exact one. For weights and moments, the
// rounding error must have mean zero within 5 standard deviations. Its variance must be that of a
// fair choice (rounding to nearest has half of it). It must not correlate with the step before.
func TestStochasticRoundingIsFair(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Zero, c.Batch, c.Seq, c.Precision, c.OptimizerDType, c.StochasticRounding = 1, 2, 1, 24, "bf16", "bf16", true
	oneBatch(t, &c)
	c.LR, c.Beta1, c.Beta2, c.Eps, c.WeightDecay, c.Clip = 1e-3, 0.8, 0.9, 1e-6, 0.3, 0.5
	m := newMeasure(t, c)
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	kept := func(name string) map[string][]float64 {
		all := map[string][]float64{}
		for i := range tr.Plan().Program.Params {
			prm := &tr.Plan().Program.Params[i]
			v := make([]float32, prm.Elems())
			require.NoError(t, tr.states.Read(i, name, 0, v))
			for _, x := range v {
				all[prm.Name] = append(all[prm.Name], float64(x))
			}
		}
		return all
	}
	type tally struct{ sum, squares, variance, before, n float64 }
	var fair [3]tally
	last := [3]map[string][]float64{{}, {}, {}} // the rounding error of the previous step
	for step := 1; step <= 50; step++ {
		now, m1, m2 := parameters(t, tr), kept("exp_avg"), kept("exp_avg_sq")
		grads, norm := m.at(t, now)
		_, err := tr.Step(t.Context())
		require.NoError(t, err)
		after := [3]map[string][]float64{kept("value"), kept("exp_avg"), kept("exp_avg_sq")}
		for p, w := range now {
			for i := range grads[p] {
				grads[p][i] *= min(1, c.Clip/(norm+1e-6))
			}
			h := hyper{lr: c.LR, b1: c.Beta1, b2: c.Beta2, eps: c.Eps}
			if w.decay {
				h.decay = c.WeightDecay
			}
			before, g := [3][]float64{slices.Clone(w.v), slices.Clone(m1[p]), slices.Clone(m2[p])}, grads[p]
			papers["adamw"](w.v, grads[p], m1[p], m2[p], step, h)
			for k, exact := range [3][]float64{w.v, m1[p], m2[p]} {
				if step == 1 {
					last[k][p] = make([]float64, len(exact))
				}
				for i, x := range exact {
					if math.Abs(x) < 1e-30 {
						last[k][p][i] = 0
						continue
					}
					_, exp := math.Frexp(x)
					ulp := math.Ldexp(1, exp-8)
					part := x/ulp - math.Floor(x/ulp)
					off := (after[k][p][i] - x) / ulp
					// The kernel computes in fp32; its rounding counts where terms cancel.
					slack := 1e-3 + 6e-7*(math.Abs(before[k][i])+[]float64{c.LR, math.Abs(g[i]), g[i] * g[i]}[k])/ulp
					require.True(t, math.Abs(off+part) < slack || math.Abs(off+part-1) < slack, "step %d, %s[%d], state %d: %g is not beside %g", step, p, i, k, after[k][p][i], x)
					if slack > 0.01 { // fp32's error would dominate at so small an ulp
						last[k][p][i] = 0
						continue
					}
					f := &fair[k]
					f.sum, f.squares, f.variance, f.n = f.sum+off, f.squares+off*off, f.variance+part*(1-part), f.n+1
					f.before += off * last[k][p][i]
					last[k][p][i] = off
				}
			}
		}
	}
	for k, f := range fair {
		require.Greater(t, f.n, 1e5)
		require.Less(t, math.Abs(f.sum)/math.Sqrt(f.variance), 5.0, "state %d: mean %g of %g numbers", k, f.sum/f.n, f.n)
		require.InEpsilon(t, f.variance, f.squares, 0.02, "state %d: the variance", k)
		require.Less(t, math.Abs(f.before)/f.variance, 0.02, "state %d: as in the step before", k)
	}
}

// TestStochasticRoundingFollowsTheSeed checks that another seed gives other rounding, with equal
// weights and samples.
func TestStochasticRoundingFollowsTheSeed(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Batch, c.Seq, c.Steps = 1, 1, 24, 1
	c.Precision, c.OptimizerDType, c.StochasticRounding = "bf16", "bf16", true
	of := func(seed int64) outcome {
		c.Seed = seed
		return runOf(t, c)
	}
	first, other := of(1), of(2)
	require.Equal(t, first.losses, other.losses, "the weights and samples")
	require.NotEqual(t, first.sha, other.sha)
}
