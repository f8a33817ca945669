package train

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/train/saving"
)

// leafGradient returns the mean gradient of the given number of rows, from sample on. It measures
// the change of the parameters in a step of plain SGD with a large rate.
func leafGradient(t *testing.T, c request, rows, sample int) (g []float64) {
	t.Helper()
	const rate = 1 << 20
	c.Ranks, c.Batch, c.GlobalBatch, c.Steps = 1, rows, rows, 1
	c.Optimizer, c.LR, c.Beta1, c.WeightDecay, c.Clip = "sgd", rate, 0, 0, 0
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	require.NoError(t, tr.train.sampler.Seek(0, int64(sample)))
	values := func() (list []float64) {
		for i := range tr.plan.Program.Params {
			_, v, err := tr.Parameter(tr.plan.Program.Params[i].Name)
			require.NoError(t, err)
			for _, x := range v {
				list = append(list, float64(x))
			}
		}
		return list
	}
	before := values()
	r, err := tr.Step(context.Background())
	require.NoError(t, err)
	require.True(t, math.IsNaN(r.Noise.Square), "of one leaf")
	for i, after := range values() {
		g = append(g, (before[i]-after)/rate)
	}
	return g
}

// noiseOf returns the noise and the gradient norm of c's first step.
func noiseOf(t *testing.T, c request) (Noise, float64) {
	t.Helper()
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	r, err := tr.Step(context.Background())
	require.NoError(t, err)
	return r.Noise, r.GradNorm
}

// TestNoiseScaleOfLeaves compares the noise with the leaves' gradients, also if the last leaf has
// fewer rows. The number of ranks and clipping must not change it.
func TestNoiseScaleOfLeaves(t *testing.T) {
	t.Parallel()
	for _, rows := range []int{6, 5} {
		c := tiny("gpt2")
		c.Seq, c.Reproducible = 16, true
		const batch = 2
		var leaves [][]float64
		var weights []float64
		for at := 0; at < rows; at += batch {
			n := min(batch, rows-at)
			leaves = append(leaves, leafGradient(t, c, n, at))
			weights = append(weights, float64(n)/float64(rows))
		}
		mean := make([]float64, len(leaves[0]))
		sum, q := 0.0, 0.0
		for i, g := range leaves {
			q += weights[i] * weights[i]
			for k, v := range g {
				mean[k] += weights[i] * v
				sum += weights[i] * v * weights[i] * v
			}
		}
		whole := 0.0
		for _, v := range mean {
			whole += v * v
		}
		square := (whole - sum) / (1 - q)
		trace := float64(rows) * (whole - square)

		c.Batch, c.GlobalBatch = batch, rows
		want, norm := noiseOf(t, c)
		require.InEpsilon(t, whole, norm*norm, 1e-5)
		require.InEpsilon(t, square, want.Square, 1e-5)
		require.InEpsilon(t, trace, want.Trace, 1e-5)
		require.InEpsilon(t, trace/square, want.Scale, 1e-5)
		require.True(t, math.IsNaN(want.Error), "of one step")
		for _, change := range []func(c *request){
			func(c *request) { c.Ranks, c.Zero = 3, 0 },
			func(c *request) { c.Ranks, c.Zero, c.Clip = 2, 3, 1e-3 },
			func(c *request) { c.Ranks, c.Zero, c.Offload = 2, 2, "optimizer=host,gradients=host" },
		} {
			d := c
			change(&d)
			got, _ := noiseOf(t, d)
			require.Equal(t, fmt.Sprint(want), fmt.Sprint(got))
		}
	}
}

// TestNoiseScaleOfOtherTypes checks the noise in 16 bits, where the loss scale is removed, and with
// quantized gradients. It must be near that of fp32, with the same bits at every number of ranks.
func TestNoiseScaleOfOtherTypes(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Seq, c.Reproducible, c.Batch, c.GlobalBatch = 16, true, 1, 6
	plain, _ := noiseOf(t, c)
	for name, set := range map[string]func(c *request){
		"bf16": func(c *request) { c.Precision = "bf16" },
		"fp16": func(c *request) { c.Precision, c.LossScale = "fp16", "1024" },
		"int8": func(c *request) { c.Int8 = []string{"reduce"} },
	} {
		d := c
		set(&d)
		want, norm := noiseOf(t, d)
		require.InEpsilon(t, plain.Scale, want.Scale, 0.05, name)
		require.InEpsilon(t, plain.Square, want.Square, 0.05, name)
		for ranks := 2; ranks < 4; ranks++ {
			d.Ranks = ranks
			got, same := noiseOf(t, d)
			require.Equal(t, fmt.Sprint(want), fmt.Sprint(got), "%s, %d ranks", name, ranks)
			require.Equal(t, norm, same)
		}
	}
}

// TestNoiseScaleIsUnknown checks that the noise is unknown for a skipped step and for a run that is
// not reproducible.
func TestNoiseScaleIsUnknown(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Seq, c.Batch, c.Accum, c.Steps = 16, 1, 4, 3
	n, _ := noiseOf(t, c)
	require.Equal(t, fmt.Sprint(unknownNoise), fmt.Sprint(n))
	c.Reproducible, c.Precision, c.LossScale = true, "fp16", "dynamic"
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	tr.at.Scale = saving.Scale{Scale: 1 << 40}
	require.NoError(t, tr.writeScale())
	r, err := tr.Step(context.Background())
	require.NoError(t, err)
	require.True(t, r.Skipped)
	require.Equal(t, fmt.Sprint(unknownNoise), fmt.Sprint(r.Noise))
	require.Empty(t, tr.at.Noise)
}

// TestNoiseScaleGoesOn checks that the noise covers the newest steps, whatever their rows, and
// continues after a resume.
func TestNoiseScaleGoesOn(t *testing.T) {
	t.Parallel()
	c := batched()
	c.Ranks, c.Checkpoint = 3, scratch(t)
	want := scheduledRun(t, c)
	require.NotContains(t, want.noise[0][:5], "NaN")
	d := c
	d.Checkpoint, d.Steps = scratch(t), 4
	scheduledRun(t, d)
	d.Resume, d.Steps, d.Ranks = true, 6, 2
	require.Equal(t, want.noise[4:], scheduledRun(t, d).noise)
}

func countedOf(leaves, each int) (sum data.Counted) {
	for range leaves {
		sum.Add(int64(each))
	}
	return sum
}

// TestNoiseScaleEstimates draws gradients with known mean and covariance. The estimate must be
// within its stated error as often as for a normal distribution.
func TestNoiseScaleEstimates(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const dims, leaves, rows, steps, tries = 40, 8, 16, 30, 400
	within, sum := 0, 0.0
	for range tries {
		var list []saving.Moments
		for range steps {
			counted := countedOf(leaves, rows/leaves)
			whole, squares := make([]float64, dims), 0.0
			for range leaves {
				for k := range dims {
					g := (0.5 + 3*r.NormFloat64()/math.Sqrt(rows/leaves)) / leaves
					whole[k] += g
					squares += g * g
				}
			}
			norm := 0.0
			for _, v := range whole {
				norm += v * v
			}
			m, ok := momentsOf(rows, counted, norm, squares)
			require.True(t, ok)
			list = append(list, m)
		}
		scale, err := noiseScale(list)
		const truth = 9 / 0.25
		if math.Abs(scale-truth) < 2*err {
			within++
		}
		sum += scale
	}
	require.InEpsilon(t, 36, sum/tries, 0.05)
	require.InDelta(t, 0.95, float64(within)/tries, 0.04)
	scale, err := noiseScale([]saving.Moments{{Square: -1, Trace: 4}, {Square: 0.5, Trace: 4}})
	require.True(t, math.IsNaN(scale) && math.IsNaN(err))
	_, ok := momentsOf(4, countedOf(1, 4), 1, 1)
	require.False(t, ok, "one leaf")
}
