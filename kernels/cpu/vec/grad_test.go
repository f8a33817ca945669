//go:build linux

package vec

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// gradCase is a differentiable kernel in float64. forward writes y from the inputs; backward writes
// the inputs' gradients from dy.
type gradCase struct {
	name     string
	inputs   [][]float64
	y        []float64
	forward  func()
	backward func(dy []float64) [][]float64
}

func grads(r *rand.Rand) []gradCase {
	f := func(n int) []float64 { return randoms[float64](r, n) }
	z := func(n int) []float64 { return make([]float64, n) }
	var cs []gradCase
	must := func(k runner) {
		if err := k.Run(nil); err != nil {
			panic(err)
		}
	}
	for a := range numActs {
		const n = 33
		x, y := f(n), z(n)
		cs = append(cs, gradCase{"activation", [][]float64{x}, y,
			func() { must(&Activation[float64]{Act: a, X: x, Y: y}) },
			func(dy []float64) [][]float64 {
				dx := z(n)
				must(&ActivationGrad[float64]{Act: a, DY: dy, X: x, DX: dx})
				return [][]float64{dx}
			}})
	}
	{
		const n = 21
		g, u, y := f(n), f(n), z(n)
		cs = append(cs, gradCase{"swiglu", [][]float64{g, u}, y,
			func() { must(&SwiGLU[float64]{Gate: g, Up: u, Y: y}) },
			func(dy []float64) [][]float64 {
				dg, du := z(n), z(n)
				must(&SwiGLUGrad[float64]{DY: dy, Gate: g, Up: u, DGate: dg, DUp: du})
				return [][]float64{dg, du}
			}})
	}
	{
		const n, c = 4, 19
		x, g, b, y, mean, rstd := f(n*c), f(c), f(c), z(n*c), z(n), z(n)
		cs = append(cs, gradCase{"layernorm", [][]float64{x, g, b}, y,
			func() {
				must(&LayerNorm[float64]{N: n, C: c, X: x, Gamma: g, Beta: b, Eps: 1e-5, Y: y, Mean: mean, Rstd: rstd})
			},
			func(dy []float64) [][]float64 {
				dx, dg, db := z(n*c), z(c), z(c)
				must(&LayerNormGrad[float64]{N: n, C: c, DY: dy, X: x, Gamma: g, Mean: mean, Rstd: rstd, DX: dx, DGamma: dg, DBeta: db})
				return [][]float64{dx, dg, db}
			}})
		cs = append(cs, gradCase{"rmsnorm", [][]float64{x, g}, y,
			func() { must(&RMSNorm[float64]{N: n, C: c, X: x, Gamma: g, Eps: 1e-5, Y: y, Rstd: rstd}) },
			func(dy []float64) [][]float64 {
				dx, dg := z(n*c), z(c)
				must(&RMSNormGrad[float64]{N: n, C: c, DY: dy, X: x, Gamma: g, Rstd: rstd, DX: dx, DGamma: dg})
				return [][]float64{dx, dg}
			}})
		cs = append(cs, gradCase{"softmax", [][]float64{x}, y,
			func() { must(&Softmax[float64]{N: n, C: c, X: x, Y: y}) },
			func(dy []float64) [][]float64 {
				dx := z(n * c)
				must(&SoftmaxGrad[float64]{N: n, C: c, DY: dy, Y: y, DX: dx})
				return [][]float64{dx}
			}})
		targets, lse, loss := []int32{3, -1, 18, 0}, z(n), z(1)
		cs = append(cs, gradCase{"cross entropy", [][]float64{x}, loss,
			func() {
				loss[0] = 0
				must(&CrossEntropy[float64]{N: n, V: c, Logits: x, Targets: targets, LSE: lse, Loss: loss})
			},
			func(dy []float64) [][]float64 {
				dx := z(n * c)
				must(&CrossEntropyGrad[float64]{N: n, V: c, Logits: x, Targets: targets, LSE: lse, DLogits: dx, Scale: dy[0]})
				return [][]float64{dx}
			}})
		bias := z(c)
		cs = append(cs, gradCase{"row broadcast of positions", [][]float64{x, bias}, y,
			func() { must(&AddPos[float64]{N: n, C: c, Seq: 1, X: x, Pos: bias, Y: y}) },
			func(dy []float64) [][]float64 {
				db := z(c)
				must(&ColumnSum[float64]{N: n, C: c, X: dy, Y: db})
				return [][]float64{dy, db}
			}})
		pos := f(3 * c)
		cs = append(cs, gradCase{"positions", [][]float64{pos}, y,
			func() { must(&AddPos[float64]{N: n, C: c, Seq: 2, X: x, Pos: pos, Y: y}) },
			func(dy []float64) [][]float64 {
				dp := z(3 * c)
				must(&AddPosGrad[float64]{N: n, C: c, Seq: 2, DY: dy, DPos: dp})
				return [][]float64{dp}
			}})
	}
	{
		const n, v, c = 7, 5, 3
		table, y, tokens := f(v*c), z(n*c), []int32{0, 4, 4, 1, 0, 4, 2}
		cs = append(cs, gradCase{"embed", [][]float64{table}, y,
			func() { must(&Embed[float64]{N: n, V: v, C: c, Tokens: tokens, Table: table, Y: y}) },
			func(dy []float64) [][]float64 {
				d := z(v * c)
				must(&EmbedGrad[float64]{N: n, V: v, C: c, Tokens: tokens, DY: dy, DTable: d})
				return [][]float64{d}
			}})
	}
	{
		const n, h, d, s = 5, 2, 6, 3
		x, y, table := f(n*h*d), z(n*h*d), z(s*d)
		must(&RopeTable[float64]{Seq: s, D: d, Theta: 100, Table: table})
		cs = append(cs, gradCase{"rope", [][]float64{x}, y,
			func() { must(&Rope[float64]{N: n, Heads: h, D: d, Seq: s, X: x, Y: y, Table: table}) },
			func(dy []float64) [][]float64 {
				dx := z(n * h * d)
				must(&Rope[float64]{N: n, Heads: h, D: d, Seq: s, X: dy, Y: dx, Table: table, Inverse: true})
				return [][]float64{dx}
			}})
	}
	{
		const n = 130
		x, y := f(n), z(n)
		cs = append(cs, gradCase{"dropout", [][]float64{x}, y,
			func() { must(&Dropout[float64]{X: x, Y: y, Elems: n / 2, P: 0.4, Seed: 1, Site: 2, Sample: 3}) },
			func(dy []float64) [][]float64 {
				dx := z(n)
				must(&Dropout[float64]{X: dy, Y: dx, Elems: n / 2, P: 0.4, Seed: 1, Site: 2, Sample: 3})
				return [][]float64{dx}
			}})
	}
	{
		w := Window{B: 2, H: 5, W: 4, C: 2, KH: 3, KW: 2, Stride: 2, Pad: 1}
		x := f(w.B * w.H * w.W * w.C)
		cols := z(w.B * w.OutH() * w.OutW() * w.KH * w.KW * w.C)
		cs = append(cs, gradCase{"im2col", [][]float64{x}, cols,
			func() { must(&Im2Col[float64]{Window: w, X: x, Cols: cols}) },
			func(dy []float64) [][]float64 {
				dx := z(len(x))
				must(&Col2Im[float64]{Window: w, DCols: dy, DX: dx})
				return [][]float64{dx}
			}})
		y := z(w.B * w.OutH() * w.OutW() * w.C)
		cs = append(cs, gradCase{"maxpool", [][]float64{x}, y,
			func() { must(&MaxPool[float64]{Window: w, X: x, Y: y}) },
			func(dy []float64) [][]float64 {
				dx := z(len(x))
				must(&MaxPoolGrad[float64]{Window: w, DY: dy, X: x, DX: dx})
				return [][]float64{dx}
			}})
	}
	{
		const n = 9
		a, b, y := f(n), f(n), z(n)
		cs = append(cs, gradCase{"mul", [][]float64{a, b}, y,
			func() { must(&Binary[float64]{Op: Mul, A: a, B: b, Y: y}) },
			func(dy []float64) [][]float64 {
				da, db := z(n), z(n)
				must(&Binary[float64]{Op: Mul, A: dy, B: b, Y: da})
				must(&Binary[float64]{Op: Mul, A: dy, B: a, Y: db})
				return [][]float64{da, db}
			}})
		s := z(1)
		cs = append(cs, gradCase{"sum", [][]float64{a}, s,
			func() { must(&Sum[float64]{X: a, Y: s, Work: z(SumWork(n))}) },
			func(dy []float64) [][]float64 {
				da := z(n)
				must(&Fill[float64]{Y: da, Value: dy[0]})
				return [][]float64{da}
			}})
	}
	return cs
}

// Every backward kernel matches central differences of its forward kernel.
func TestFiniteDifferences(t *testing.T) {
	const h = 1e-6
	r := rand.New(rand.NewPCG(11, 12))
	for _, c := range grads(r) {
		t.Run(c.name, func(t *testing.T) {
			dy := randoms[float64](r, len(c.y))
			loss := func() float64 {
				c.forward()
				return rowDot(dy, c.y)
			}
			loss()
			got := c.backward(dy)
			require.Len(t, got, len(c.inputs))
			for k, x := range c.inputs {
				require.Len(t, got[k], len(x))
				for i := range x {
					old := x[i]
					x[i] = old + h
					up := loss()
					x[i] = old - h
					down := loss()
					x[i] = old
					require.InDelta(t, (up-down)/(2*h), got[k][i], 1e-7*math.Max(1, math.Abs(got[k][i])), "input %d, element %d", k, i)
				}
			}
		})
	}
}

// Accumulating gives the old value plus the value that writing gives.
func TestAccumulateAddsTheWrittenValue(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	const n, c = 5, 37
	old := randoms[float32](r, n*c)
	x, dy, g := randoms[float32](r, n*c), randoms[float32](r, n*c), randoms[float32](r, c)
	mean, rstd := randoms[float32](r, n), randoms[float32](r, n)
	for _, make := range []func(d []float32, acc bool) runner{
		func(d []float32, acc bool) runner {
			return &Binary[float32]{Op: Add, A: x, B: dy, Y: d, Accumulate: acc}
		},
		func(d []float32, acc bool) runner {
			return &Binary[float32]{Op: Sub, A: x, B: dy, Y: d, Accumulate: acc}
		},
		func(d []float32, acc bool) runner {
			return &Binary[float32]{Op: Mul, A: x, B: dy, Y: d, Accumulate: acc}
		},
		func(d []float32, acc bool) runner { return &Scale[float32]{X: x, Y: d, Factor: 0.3, Accumulate: acc} },
		func(d []float32, acc bool) runner { return &Fill[float32]{Y: d, Value: 0.3, Accumulate: acc} },
		func(d []float32, acc bool) runner {
			return &ActivationGrad[float32]{Act: GELUTanh, DY: dy, X: x, DX: d, Accumulate: acc}
		},
		func(d []float32, acc bool) runner {
			return &LayerNormGrad[float32]{N: n, C: c, DY: dy, X: x, Gamma: g, Mean: mean, Rstd: rstd, DX: d, AccumulateDX: acc}
		},
		func(d []float32, acc bool) runner {
			return &RMSNormGrad[float32]{N: n, C: c, DY: dy, X: x, Gamma: g, Rstd: rstd, DX: d, AccumulateDX: acc}
		},
		func(d []float32, acc bool) runner {
			return &SoftmaxGrad[float32]{N: n, C: c, DY: dy, Y: x, DX: d, Accumulate: acc}
		},
	} {
		w, a := append([]float32(nil), old...), append([]float32(nil), old...)
		require.NoError(t, make(w, false).Run(nil))
		require.NoError(t, make(a, true).Run(nil))
		for i := range w {
			require.Equal(t, old[i]+w[i], a[i], "%T, element %d", make(w, false), i)
		}
	}
}
