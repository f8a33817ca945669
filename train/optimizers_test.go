package train

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// tensor is a parameter in float64.
type tensor struct {
	v     []float64
	decay bool // 2 or more dimensions
}

type tensors map[string]*tensor

func parameters(t *testing.T, tr *Trainer) tensors {
	t.Helper()
	all := tensors{}
	for i := range tr.Plan().Program.Params {
		prm := &tr.Plan().Program.Params[i]
		_, v, err := tr.Parameter(prm.Name)
		require.NoError(t, err)
		w := &tensor{v: make([]float64, len(v)), decay: len(prm.Shape) >= 2}
		for k, x := range v {
			w.v[k] = float64(x)
		}
		all[prm.Name] = w
	}
	return all
}

// gradientsAt measures a step's gradients at the weights in folder. Plain SGD with rate 2^20, whose
// product is exact, gives W − 2^20·g.
func gradientsAt(t *testing.T, c request, folder string, w tensors) (map[string][]float64, float64) {
	t.Helper()
	const rate = 1 << 20
	c.Init, c.Optimizer, c.LR, c.Beta1, c.WeightDecay, c.Clip, c.LRSchedule, c.Warmup, c.Nesterov = folder, "sgd", rate, 0, 0, 0, "constant", 0, false
	c.Checkpoint, c.SaveEvery, c.Steps, c.Zero = "", 0, 1, 0 // the same rows on the same ranks give the same bits
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	r, err := tr.Step(context.Background())
	require.NoError(t, err)
	grads, norm := map[string][]float64{}, 0.0
	for name, after := range parameters(t, tr) {
		g := make([]float64, len(after.v))
		for i := range g {
			g[i] = (w[name].v[i] - after.v[i]) / rate
			norm += g[i] * g[i]
		}
		grads[name] = g
	}
	norm = math.Sqrt(norm)
	require.InEpsilon(t, norm, r.GradNorm, 1e-6, "the reported norm")
	return grads, norm
}

func l2(v []float64) float64 {
	s := 0.0
	for _, x := range v {
		s += x * x
	}
	return math.Sqrt(s)
}

// hyper holds the hyperparameters of papers, the optimizers in float64 as published. A function
// updates one parameter w with gradient g at step k (from 1). The states m and v are as long as w;
// v[0] holds a second moment per layer. decay is 0 for vectors.
type hyper struct {
	lr, b1, b2, eps, decay, trust float64
	nesterov                      bool
	adapt                         bool    // the rate of this parameter adapts to its norms
	unadapted                     float64 // LARS's local rate for parameters that do not adapt
}

var papers = map[string]func(w, g, m, v []float64, k int, h hyper){
	// Loshchilov and Hutter, Decoupled Weight Decay Regularization (ICLR 2019), algorithm 2.
	"adamw": func(w, g, m, v []float64, k int, h hyper) {
		for i := range w {
			m[i] = h.b1*m[i] + (1-h.b1)*g[i]
			v[i] = h.b2*v[i] + (1-h.b2)*g[i]*g[i]
			mhat, vhat := m[i]/(1-math.Pow(h.b1, float64(k))), v[i]/(1-math.Pow(h.b2, float64(k)))
			w[i] -= h.lr * (mhat/(math.Sqrt(vhat)+h.eps) + h.decay*w[i])
		}
	},
	// Momentum as in Sutskever et al. (ICML 2013) in PyTorch's form, with L2 decay.
	"sgd": func(w, g, m, v []float64, k int, h hyper) {
		for i := range w {
			d := g[i] + h.decay*w[i]
			m[i] = h.b1*m[i] + d
			if h.nesterov { // PyTorch's form
				w[i] -= h.lr * (d + h.b1*m[i])
			} else {
				w[i] -= h.lr * m[i]
			}
		}
	},
	// Duchi, Hazan and Singer (JMLR 2011) in PyTorch's form, with L2 decay.
	"adagrad": func(w, g, m, v []float64, k int, h hyper) {
		for i := range w {
			d := g[i] + h.decay*w[i]
			v[i] += d * d
			w[i] -= h.lr * d / (math.Sqrt(v[i]) + h.eps)
		}
	},
	// You et al., Large Batch Optimization for Deep Learning (ICLR 2020), algorithm 2, φ(z) = z.
	"lamb": func(w, g, m, v []float64, k int, h hyper) {
		r := make([]float64, len(w))
		for i := range w {
			m[i] = h.b1*m[i] + (1-h.b1)*g[i]
			v[i] = h.b2*v[i] + (1-h.b2)*g[i]*g[i]
			mhat, vhat := m[i]/(1-math.Pow(h.b1, float64(k))), v[i]/(1-math.Pow(h.b2, float64(k)))
			r[i] = mhat/(math.Sqrt(vhat)+h.eps) + h.decay*w[i]
		}
		ratio := 1.0
		if h.adapt && l2(w) > 0 && l2(r) > 0 {
			ratio = l2(w) / l2(r)
		}
		for i := range w {
			w[i] -= h.lr * ratio * r[i]
		}
	},
	// You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks (2017), algorithm 1.
	"lars": func(w, g, m, v []float64, k int, h hyper) {
		local := h.unadapted
		if h.adapt && l2(w) > 0 && l2(g) > 0 {
			local = h.trust * l2(w) / (l2(g) + h.decay*l2(w))
		}
		for i := range w {
			m[i] = h.b1*m[i] + h.lr*local*(g[i]+h.decay*w[i])
			w[i] -= m[i]
		}
	},
	// The same with the local rate no larger than the global one (LARC, NVIDIA Apex, clip=True).
	"larc": func(w, g, m, v []float64, k int, h hyper) {
		local := 1.0
		if h.adapt && l2(w) > 0 && l2(g) > 0 {
			local = min(h.trust*l2(w)/(l2(g)+h.decay*l2(w))/h.lr, 1)
		}
		for i := range w {
			m[i] = h.b1*m[i] + local*(g[i]+h.decay*w[i])
			w[i] -= h.lr * m[i]
		}
	},
	// Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments (2019), algorithm 1.
	"novograd": func(w, g, m, v []float64, k int, h hyper) {
		n := l2(g)
		if k == 1 {
			v[0] = n * n
		} else {
			v[0] = h.b2*v[0] + (1-h.b2)*n*n
		}
		for i := range w {
			m[i] = h.b1*m[i] + g[i]/(math.Sqrt(v[0])+h.eps) + h.decay*w[i]
			w[i] -= h.lr * m[i]
		}
	},
}

// TestOptimizersFollowTheirPapers compares the updates of a Trainer with the papers' rules in
// float64, from the gradients at the weights before each step. It varies clipping, the trust
// coefficient, and whether rates of parameters without decay adapt.
func TestOptimizersFollowTheirPapers(t *testing.T) {
	t.Parallel()
	for name, rule := range papers {
		for _, clip := range []float64{0, 0.5} {
			c := tiny("gpt2")
			c.Ranks, c.Zero, c.Batch, c.Seq, c.Steps = 2, 3, 1, 24, long.Or(3, 4)
			// The text is one global batch, so that every step has the same rows.
			text, err := os.ReadFile(c.Data)
			require.NoError(t, err)
			c.Data = filepath.Join(t.TempDir(), "batch.bin")
			require.NoError(t, os.WriteFile(c.Data, text[:2*(2*24+1)], 0o644))
			c.Optimizer, c.LR, c.Beta1, c.Beta2, c.Eps, c.WeightDecay, c.Clip = name, 0.01, 0.8, 0.9, 1e-6, 0.3, clip
			c.LRSchedule, c.Warmup = "linear", 1
			if name == "adagrad" { // the first step is d/(|d|+eps), which amplifies f32's rounding of d by 1/eps
				c.Eps = 1e-2
			}
			if clip > 0 {
				c.Trust, c.AdaptAll, c.Nesterov = 0.02, true, name == "sgd"
			}
			c.Checkpoint, c.SaveEvery = scratch(t), 1
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			first, err := tr.Save(context.Background())
			require.NoError(t, err)
			before := parameters(t, tr)
			m, v := map[string][]float64{}, map[string][]float64{}
			for p, w := range before {
				m[p], v[p] = make([]float64, len(w.v)), make([]float64, len(w.v))
			}
			folder := first
			for k := 1; k <= c.Steps; k++ {
				grads, norm := gradientsAt(t, c, folder, before)
				coef := 1.0
				if clip > 0 {
					coef = min(1, clip/norm)
					require.Less(t, coef, 1.0, "clipping is tested where it clips")
				}
				r, err := tr.Step(context.Background())
				require.NoError(t, err)
				require.InEpsilon(t, norm, r.GradNorm, 1e-5, "the norm before clipping")
				after := parameters(t, tr)
				for p, w := range before {
					g := grads[p]
					for i := range g {
						g[i] *= coef
					}
					h := hyper{lr: r.LR, b1: c.Beta1, b2: c.Beta2, eps: c.Eps, trust: c.Trust, nesterov: c.Nesterov, adapt: w.decay || c.AdaptAll, unadapted: c.Trust}
					if w.decay {
						h.decay = c.WeightDecay
					}
					if c.AdaptAll {
						h.unadapted = 1
					}
					want := append([]float64(nil), w.v...)
					rule(want, g, m[p], v[p], k, h)
					worst := 0.0
					for i := range want {
						move := math.Abs(want[i] - w.v[i])
						tolerance := 1e-3*move + 1.2e-7*math.Abs(w.v[i]) + 1e-6*r.LR*r.LR
						worst = max(worst, math.Abs(after[p].v[i]-want[i])/tolerance)
					}
					require.LessOrEqual(t, worst, 1.0, "%s, clip %g, step %d, %s", name, clip, k, p)
				}
				before = after
				folder, err = tr.Save(context.Background())
				require.NoError(t, err)
			}
			require.NoError(t, tr.Close())
		}
	}
}

// TestOptimizerStatesInCheckpoints checks that a checkpoint holds each optimizer's states under
// their names, with non-zero values.
func TestOptimizerStatesInCheckpoints(t *testing.T) {
	t.Parallel()
	for name, states := range map[string][]string{"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum"}, "lamb": {"exp_avg", "exp_avg_sq"},
		"adagrad": {"sum"}, "lars": {"momentum"}, "muon": {"momentum", "exp_avg", "exp_avg_sq"}, "larc": {"momentum"}, "novograd": {"exp_avg", "exp_avg_sq"}} {
		c := tiny("gpt2")
		c.Steps, c.Ranks, c.Optimizer, c.Checkpoint = 1, 2, name, scratch(t)
		runOf(t, c)
		list, err := checkpoint.List(c.Checkpoint)
		require.NoError(t, err)
		got := files(t, list[0])
		require.Len(t, got, len(states)+1, name)
		for _, s := range states {
			require.Contains(t, got, s, name)
			r := openState(t, list[0], s)
			moved := false
			for _, tensor := range r.Tensors() {
				v := make([]float32, 1)
				require.NoError(t, r.ReadFloat32(tensor.Name, 0, v))
				moved = moved || v[0] != 0
			}
			require.True(t, moved, "%s: %s is all zero", name, s)
			require.NoError(t, r.Close())
		}
	}
}

// TestLearningRates compares the rate of every step with the schedule's formula. Linear warm-up
// leads to the scaled peak. Then the rate is constant, or falls linearly or by a half cosine to the
// floor at the last step. inverse-sqrt falls with 1/√step from the end of the warm-up, at least to
// the floor.
func TestLearningRates(t *testing.T) {
	t.Parallel()
	const steps, warmup, lr, floor = 11, 3, 0.5, 0.05
	rate := func(schedule string, step int, change func(*request)) float64 {
		c := request{Config: config.Default()}
		c.LR, c.MinLR, c.Warmup, c.Steps, c.LRSchedule = lr, floor, warmup, steps, schedule
		if change != nil {
			change(&c)
		}
		return c.LearningRate(step)
	}
	for _, schedule := range []string{"constant", "linear", "cosine", "inverse-sqrt"} {
		for s := range warmup {
			require.InDelta(t, lr*float64(s+1)/warmup, rate(schedule, s, nil), 1e-15, "%s warm-up, step %d", schedule, s)
		}
		for s := warmup; s < steps; s++ {
			x := float64(s-warmup) / (steps - 1 - warmup) // 0 at the end of the warm-up, 1 at the last step
			want := map[string]float64{"constant": lr, "linear": lr + (floor-lr)*x, "cosine": floor + (lr-floor)*(1+math.Cos(math.Pi*x))/2,
				"inverse-sqrt": math.Max(floor, lr*math.Sqrt(warmup/float64(s+1)))}[schedule]
			require.InDelta(t, want, rate(schedule, s, nil), 1e-15, "%s, step %d", schedule, s)
		}
		// Scaled with the global batch (here 2·3·4 rows at a base of 6): √4 and 4.
		for scale, by := range map[string]float64{"none": 1, "sqrt": 2, "linear": 4} {
			c := func(c *request) { c.Ranks, c.Batch, c.Accum, c.LRBaseBatch, c.LRScale, c.MinLR = 2, 3, 4, 6, scale, 0 }
			zero := func(c *request) { c.MinLR = 0 }
			for s := range steps {
				require.InDelta(t, by*rate(schedule, s, zero), rate(schedule, s, c), 1e-14, "%s scaled %s, step %d", schedule, scale, s)
			}
		}
	}
	require.Equal(t, floor, rate("linear", steps-1, nil))
	require.Equal(t, floor, rate("cosine", steps-1, nil))
	require.Equal(t, floor, rate("inverse-sqrt", 1<<40, nil), "never below the floor")
	require.Equal(t, lr, rate("linear", 0, func(c *request) { c.Steps, c.Warmup = 1, 0 }), "a single step has the peak")
	c := tiny("gpt2")
	c.LRSchedule, c.LRScale, c.LRBaseBatch, c.MinLR = "cosine", "linear", 1<<20, c.LR/2
	_, err := c.start(context.Background())
	require.ErrorContains(t, err, "is above the rate of a step of")
}

// TestZeroBiasesUnderLayerwiseRates checks that zero biases learn under LAMB as under AdamW, and do
// not grow too fast under LARS. By default only parameters with weight decay adapt their rate. With
// AdaptAll, as in the papers, LAMB holds such a bias at the size of its first step, and LARS
// applies the full rate.
func TestZeroBiasesUnderLayerwiseRates(t *testing.T) {
	t.Parallel()
	biases := func(optimizer string, lr float64, all bool) float64 {
		c := tiny("gpt2")
		c.Init, c.Optimizer, c.LR, c.AdaptAll = "random", optimizer, lr, all
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		require.NoError(t, tr.Run(context.Background(), nil))
		sum, n := 0.0, 0
		for name, w := range parameters(t, tr) {
			if strings.HasSuffix(name, ".bias") {
				sum, n = sum+l2(w.v)*l2(w.v), n+len(w.v)
			}
		}
		return math.Sqrt(sum / float64(n))
	}
	adamw := biases("adamw", 3e-3, false)
	lamb, letter := biases("lamb", 3e-3, false), biases("lamb", 3e-3, true)
	require.InEpsilon(t, adamw, lamb, 0.5, "lamb")
	require.Less(t, letter, adamw/3, "lamb by the letter: frozen")
	lars, letter := biases("lars", 1, false), biases("lars", 1, true)
	require.Greater(t, letter, 30*lars, "lars by the letter: the whole rate")
}

func TestTrustIsValidated(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		optimizer string
		trust     float64
		text      string
	}{{"lars", 0, "Config.Trust 0: lars"}, {"LARC", 0, "Config.Trust 0: larc"}, {"adamw", -1, "Config.Trust -1"}, {"lars", math.NaN(), "Config.Trust NaN"}} {
		config := tiny("gpt2")
		config.Optimizer, config.Trust = c.optimizer, c.trust
		require.ErrorContains(t, config.Validate(), c.text)
	}
	config := tiny("gpt2")
	config.Trust = 0
	require.NoError(t, config.Validate(), "adamw has none")
}
