package cpu

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// AdamW with parameters and moments in bf16 gives the interpreter's bits.
func TestBF16StatesEqualInterpreter(t *testing.T) {
	for seed := range uint64(24) {
		o := &operation{Operation: optest.New("adamw", rand.New(rand.NewPCG(seed, 16)), optionsOf(types[seed%2]))}
		op := o.Op()
		for _, out := range op.Out[:3] {
			values := optest.Values[float32](o.Before[out.Buf])
			low := make([]uint16, len(values))
			for i, v := range values {
				low[i] = num.BF16(v)
			}
			o.P.Buf(out.Buf).DType, o.Before[out.Buf] = graph.BF16, optest.Bytes(low)
		}
		op.Out = op.Out[:3]
		a := op.Attr.(graph.UpdateAttr)
		require.ErrorContains(t, graph.Check(o.P, op), "rest in bf16 with it")
		a.Stochastic = true
		op.Attr = a
		require.NoError(t, graph.Check(o.P, op))
		want := interpret(t, o)
		for _, threads := range []int{1, 3} {
			compare(t, o, want, threads, seed, true)
		}
	}
}

// On average, stochastic rounding loses nothing of updates that rounding to nearest would lose
// completely. Its random bits depend on the element, not on how a parameter is cut.
func TestStochasticRoundingKeepsTheMean(t *testing.T) {
	const n, updates = 512, 64
	run := func(cut int) []uint16 {
		p, m, v, g := make([]uint16, n), make([]uint16, n), make([]uint16, n), make([]float32, n)
		for i := range p {
			p[i], g[i] = num.BF16(1), 1
		}
		for u := 1; u <= updates; u++ {
			for lo := 0; lo < n; lo += cut {
				k := vec.AdamW16{P: p[lo : lo+cut], M: m[lo : lo+cut], V: v[lo : lo+cut], G: g[lo : lo+cut], AdamStep: vec.AdamStep{GradScale: 1, LR: 1.0 / 4096, Beta1: 0.9, Beta2: 0.9,
					BC1: 1 - math.Pow(0.9, float64(u)), BC2: 1 - math.Pow(0.9, float64(u))}, Seed: 3, Stream: num.Stream("w"), Update: uint64(u), First: int64(lo)}
				require.NoError(t, k.Run(nil))
			}
		}
		return p
	}
	whole := run(n)
	require.Equal(t, whole, run(256))
	mean := 0.0
	for _, h := range whole {
		mean += float64(num.FromBF16(h)) / n
	}
	// Each update is 1/4096, less than half of bf16's last place below 1 (1/512).
	require.InDelta(t, 1-updates/4096.0, mean, 1e-3)
	require.Equal(t, num.BF16(1), num.BF16(1-1.0/4096), "rounded to nearest nothing would have moved")
	for _, x := range []float32{float32(math.Inf(1)), float32(math.Inf(-1)), 0, 1, -2.5} {
		require.Equal(t, num.BF16(x), num.StochasticBF16(x, 0xffff), "what bf16 holds, or no number can")
	}
	require.True(t, math.IsNaN(float64(num.FromBF16(num.StochasticBF16(float32(math.NaN()), 0xffff)))))
}
