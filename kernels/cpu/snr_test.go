package cpu

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// batch draws rows of bf16 numbers with a different magnitude in each row: normal numbers, outputs
// of GELU, or rows with outliers.
func batch(r *rand.Rand, rows, cols int) []float32 {
	x := make([]float32, rows*cols)
	kind := r.IntN(3)
	for i := range x {
		v := r.NormFloat64()
		switch {
		case kind == 1:
			v *= 0.5 * (1 + math.Erf(v/math.Sqrt2))
		case kind == 2 && i%61 == 0:
			v *= 6
		}
		x[i] = num.FromBF16(num.BF16(float32(v * math.Exp2(float64((i/cols*5)%7-3)))))
	}
	return x
}

func f64(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

func halves16(x []float32) []uint16 {
	y := make([]uint16, len(x))
	for i, v := range x {
		y[i] = num.BF16(v)
	}
	return y
}

// leastOf returns the lowest signal-to-noise ratio among rows of n numbers.
func leastOf(want, got []float64, n int) float64 {
	worst := math.Inf(1)
	for lo := 0; lo < len(want); lo += n {
		worst = min(worst, snr(want[lo:lo+n], got[lo:lo+n]))
	}
	return worst
}

// neighbours replaces each scale by the next one.
func neighbours(scales []float32) {
	first := scales[0]
	copy(scales, scales[1:])
	scales[len(scales)-1] = first
}

// quantised8 returns x after quantising it to int8 and back, in parts with blocks, or the sum of
// the parts. harm may change codes and scales in between.
func quantised8(t *testing.T, x []float32, block, parts int, sum bool, harm func(codes []byte, scales []float32)) []float64 {
	t.Helper()
	n := len(x) / parts
	q := vec.Int8{Block: block, Len: n, Parts: parts, Q: make([]byte, graph.QuantAttr{Block: int64(block), Parts: int64(parts)}.Bytes(int64(n)))}
	k, err := vec.NewQuantize8(q, nil, vec.Half16{X: halves16(x), As: vec.BF16}, nil)
	require.NoError(t, err)
	require.NoError(t, k.Run(nil))
	if harm != nil {
		size := len(q.Q) / parts
		for p := range parts {
			harm(q.Q[p*size:][:n], optest.Values[float32](q.Q[p*size+size-4*(n/block):][:4*(n/block)]))
		}
	}
	y := make([]float32, len(x))
	if sum {
		y = y[:n]
	}
	require.NoError(t, (&vec.Dequantize8{From: q, Y: y, Sum: sum}).Run(nil))
	return f64(y)
}

// The signal-to-noise ratio against fp64 of every kind that computes or stores in int8, over 20
// batches, by the worst row or block. With a neighbour's scale or codes it must be below the limit.
func TestSignalToNoiseOfEveryQuantisedKind(t *testing.T) {
	const rows, cols, outs = 24, 192, 40
	pl := pool.New(2)
	defer pl.Close()
	least, harmed := map[string]float64{}, map[string]float64{}
	note := func(into map[string]float64, name string, db float64) {
		if v, ok := into[name]; !ok || db < v {
			into[name] = db
		}
	}
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 20))
		x := batch(r, rows, cols)
		// Activations saved by the forward have one scale per row.
		note(least, "saved row", leastOf(f64(x), quantised8(t, x, cols, 1, false, nil), cols))
		scale := func(_ []byte, scales []float32) { neighbours(scales) }
		row := func(codes []byte, _ []float32) { copy(codes, codes[cols:2*cols]) }
		note(harmed, "saved row, neighbour's scale", leastOf(f64(x), quantised8(t, x, cols, 1, false, scale), cols))
		note(harmed, "saved row, neighbour's codes", leastOf(f64(x), quantised8(t, x, cols, 1, false, row), cols))
		// Gathered parameters, and each rank's addend, have one scale per block of 256.
		const block, parts = graph.QuantBlock, 3
		w := batch(r, parts*4, block)
		note(least, "gathered block", leastOf(f64(w), quantised8(t, w, block, parts, false, nil), block))
		note(harmed, "gathered block, neighbour's scale", leastOf(f64(w), quantised8(t, w, block, parts, false, scale), block))
		sum := make([]float64, len(w)/parts)
		for i, v := range w {
			sum[i%len(sum)] += float64(v)
		}
		note(least, "summed block", leastOf(sum, quantised8(t, w, block, parts, true, nil), block))
		note(harmed, "summed block, neighbour's scale", leastOf(sum, quantised8(t, w, block, parts, true, scale), block))
		// Products, computed by the kernels.
		for _, kind := range []graph.Kind{graph.Linear, graph.LinearGradX} {
			o := int8Product(kind, r, graph.BF16, rows, cols, outs)
			op := o.Op()
			op.In, op.Skip = op.In[:2], graph.NoBuf
			a := op.Attr.(graph.LinearAttr)
			a.Act = graph.ActNone
			op.Attr, op.Out = a, []graph.Out{{Buf: op.Out[0].Buf}}
			m, depth, n := rows, cols, outs
			if kind == graph.LinearGradX {
				depth, n = outs, cols
			}
			left, right := batch(r, m, depth), batch(r, cols, outs)
			if a.TransW {
				right = batch(r, outs, cols)
			}
			o.Before[op.In[0]], o.Before[op.In[1]] = optest.Bytes(halves16(left)), optest.Bytes(halves16(right))
			ctx := devcpu.New(0, devcpu.Options{})
			require.NoError(t, launch(t, ctx, o.bind(t, ctx, pl)))
			got := widened(o.bytes(t, op.Out[0].Buf))
			require.NoError(t, ctx.Close())
			want := make([]float64, m*n)
			for i := range m {
				for j := range n {
					for k := range depth {
						at := k*n + j // (depth, n)
						if a.TransW == (kind == graph.Linear) {
							at = j*depth + k
						}
						want[i*n+j] += float64(left[i*depth+k]) * float64(right[at])
					}
				}
			}
			note(least, string(kind), leastOf(want, got, n))
		}
		// Moments in 8 bits, after an update that adds nothing.
		for name, q := range map[string]*vec.Q8Map{"first moment": vec.Q8Signed, "second moment": vec.Q8Unsigned} {
			y := batch(r, 4, vec.Q8Block)
			codes, back := make([]byte, vec.Q8Block), make([]float32, len(y))
			for lo := 0; lo < len(y); lo += vec.Q8Block {
				b := y[lo : lo+vec.Q8Block]
				for i, v := range b {
					if name == "second moment" {
						b[i] = v * v
					}
				}
				s := q.Quantize(codes, b)
				q.Dequantize(back[lo:lo+vec.Q8Block], codes, s)
			}
			note(least, name, leastOf(f64(y), f64(back), vec.Q8Block))
		}
	}
	t.Logf("least of 20 batches, dB: %v; with faults %v", least, harmed)
	bars := map[string]float64{"saved row": 31, "gathered block": 31, "summed block": 31, string(graph.Linear): 24, string(graph.LinearGradX): 23, "first moment": 33, "second moment": 40}
	require.Len(t, least, len(bars))
	for name, bar := range bars {
		require.GreaterOrEqual(t, least[name], bar, name)
	}
	require.Len(t, harmed, 4)
	for name, db := range harmed {
		require.Less(t, db, 15.0, name)
	}
}
