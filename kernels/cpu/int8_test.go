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

// int8Product draws an int8 linear, or the gradient of its input.
func int8Product(kind graph.Kind, rng *rand.Rand, dt graph.DType, m, k, n int64) *operation {
	a := graph.LinearAttr{Int8: true, TransW: rng.IntN(2) == 0}
	w := []int64{k, n}
	if a.TransW {
		w = []int64{n, k}
	}
	in, out := [][]int64{{m, n}, w}, [][]int64{{m, k}}
	if kind == graph.Linear {
		in, out = [][]int64{{m, k}, w, {n}}, [][]int64{{m, n}, {m, n}}
		if rng.IntN(2) == 0 {
			a.Act = graph.ActGELUTanh
		}
	}
	return &operation{Operation: optest.Of(kind, a, in, out, 1, rng, optionsOf(dt))}
}

// int8 products give the interpreter's bits for any number of threads, and need the target's
// workspace.
func TestInt8ProductsEqualInterpreter(t *testing.T) {
	for _, kind := range []graph.Kind{graph.Linear, graph.LinearGradX} {
		for seed := range uint64(40) {
			rng := rand.New(rand.NewPCG(seed, 8))
			dt := types[1+seed%2]
			m, k, n := 1+rng.Int64N(80), 1+rng.Int64N(90), 1+rng.Int64N(90)
			if seed%10 == 9 { // several passes over K
				m, k, n = 1+rng.Int64N(5), 2100+rng.Int64N(9), 2100+rng.Int64N(9)
			}
			o := int8Product(kind, rng, dt, m, k, n)
			require.NoError(t, graph.Check(o.P, o.Op()))
			require.Equal(t, workspace(o.P, o.Op()), graph.CPUTarget().Workspace(o.P, o.Op()))
			want := interpret(t, o)
			for _, threads := range []int{1, 3} {
				compare(t, o, want, threads, seed, true)
			}
		}
	}
	require.Equal(t, graph.QuantFloor, vec.Int8Floor)
}

// snr returns the signal-to-noise ratio of got in dB.
func snr(want, got []float64) float64 {
	var signal, noise float64
	for i, v := range want {
		signal += v * v
		noise += (got[i] - v) * (got[i] - v)
	}
	return 10 * math.Log10(signal/noise)
}

func widened(b []byte) []float64 {
	var v []float64
	for _, h := range optest.Values[uint16](b) {
		v = append(v, float64(num.FromBF16(h)))
	}
	return v
}

// Compared with fp64 on normal numbers, products have at least 20 dB, and every row of a saved
// activation 30 dB. With a neighbour's scales they do not, so the test can fail.
func TestInt8SignalToNoise(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	opts := optionsOf(graph.BF16)
	opts.Finite = true
	const m, k, n = 24, 192, 40
	o := optest.Of(graph.Linear, graph.LinearAttr{Int8: true}, [][]int64{{m, k}, {k, n}, {1}}, [][]int64{{m, n}}, 1, rng, opts)
	op := o.Op()
	op.In = op.In[:2] // without a bias
	after, err := o.Interpret()
	require.NoError(t, err)
	x, w := widened(o.Before[op.In[0]]), widened(o.Before[op.In[1]])
	want := make([]float64, m*n)
	for i := range want {
		for j := range k {
			want[i] += x[i/n*k+j] * w[j*n+i%n]
		}
	}
	require.GreaterOrEqual(t, snr(want, widened(after[op.Out[0].Buf])), 20.0)

	rows := make([]float32, m*k)
	for i := range rows {
		rows[i] = float32(rng.NormFloat64() * math.Exp2(float64(i/k%7-3)))
	}
	at := graph.QuantAttr{Block: k, Parts: 1}
	q := vec.Int8{Q: make([]byte, at.Bytes(m*k)), Block: k, Len: m * k, Parts: 1}
	quantize, err := vec.NewQuantize8(q, rows, vec.Half16{}, nil)
	require.NoError(t, err)
	require.NoError(t, quantize.Run(nil))
	read := make([]float32, m*k)
	least := func() float64 {
		require.NoError(t, (&vec.Dequantize8{From: q, Y: read}).Run(nil))
		worst := math.Inf(1)
		for r := range m {
			var a, b []float64
			for i := r * k; i < (r+1)*k; i++ {
				a, b = append(a, float64(rows[i])), append(b, float64(read[i]))
			}
			worst = min(worst, snr(a, b))
		}
		return worst
	}
	require.GreaterOrEqual(t, least(), 30.0)
	scales := optest.Values[float32](q.Q[m*k:])
	first := scales[0]
	copy(scales, scales[1:])
	scales[m-1] = first
	require.Less(t, least(), 30.0, "the scales of the neighbouring rows")
}

// Quantising a value that was quantised and rounded to 16 bits changes nothing. So a step that
// changes no parameter, and a second gather, change no bit.
func TestQuantisingAgainChangesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	for _, as := range []vec.Half{vec.BF16, vec.F16} {
		x := make([]uint16, 64*graph.QuantBlock)
		for i := range x {
			v := float32(rng.NormFloat64() * math.Exp2(float64(i/graph.QuantBlock/2-24)))
			if x[i] = num.BF16(v); as == vec.F16 {
				x[i] = num.F16(v)
			}
		}
		q := vec.Int8{Block: graph.QuantBlock, Len: len(x), Parts: 1}
		q.Q = make([]byte, graph.QuantAttr{Block: graph.QuantBlock, Parts: 1}.Bytes(int64(len(x))))
		again := func(x []uint16) []uint16 {
			k, err := vec.NewQuantize8(q, nil, vec.Half16{X: x, As: as}, nil)
			require.NoError(t, err)
			require.NoError(t, k.Run(nil))
			y := make([]uint16, len(x))
			require.NoError(t, (&vec.Dequantize8{From: q, Y16: y, As: as}).Run(nil))
			return y
		}
		once := again(x)
		require.NotEqual(t, x, once)
		require.Equal(t, once, again(once))
	}
}
