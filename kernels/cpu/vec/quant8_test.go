package vec

import (
	"bytes"
	bin "encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// snr returns the signal-to-noise ratio in decibels.
func snr(want, got []float64) float64 {
	var signal, noise float64
	for i, v := range want {
		signal += v * v
		noise += (v - got[i]) * (v - got[i])
	}
	return 10 * math.Log10(signal/noise)
}

func normals(r *rand.Rand, n int, square bool) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64() * 1e-3)
		if square {
			x[i] *= x[i]
		}
	}
	return x
}

func (m *Q8Map) roundTrip(x []float32) []float32 {
	y := make([]float32, len(x))
	for lo := 0; lo < len(x); lo += Q8Block {
		hi := min(lo+Q8Block, len(x))
		var codes [Q8Block]byte
		scale := m.Quantize(codes[:], x[lo:hi])
		m.Dequantize(y[lo:hi], codes[:], scale)
	}
	return y
}

func f64s(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// Codes are ascending, and every number gets the nearest one.
func TestQ8CodesAreNearest(t *testing.T) {
	for name, m := range map[string]*Q8Map{"signed": Q8Signed, "unsigned": Q8Unsigned} {
		var values []float64
		for c := range 256 {
			if m.signed && c == 0x80 { // -0
				continue
			}
			values = append(values, float64(m.value[c]))
		}
		slices.Sort(values)
		require.Len(t, slices.Compact(slices.Clone(values)), len(values), name)
		require.Equal(t, 1.0, values[len(values)-1])
		r := rand.New(rand.NewPCG(1, 2))
		for range 300_000 {
			x := float32(math.Exp(-r.Float64() * 18))
			if m.signed && r.IntN(2) == 0 {
				x = -x
			}
			got := float64(m.value[m.code(x, x)])
			best := math.Inf(1)
			at, _ := slices.BinarySearch(values, float64(x))
			for _, v := range values[max(at-1, 0):min(at+1, len(values))] {
				best = min(best, math.Abs(v-float64(x)))
			}
			if !m.signed && got == float64(m.value[1]) {
				continue // never 0
			}
			require.InDelta(t, best, math.Abs(got-float64(x)), 2e-6*math.Abs(float64(x)), "%s: %v became %v", name, x, got)
		}
	}
	require.Equal(t, uint8(1), Q8Unsigned.code(1e-30, 1e-30), "a positive second moment never becomes 0")
	require.Zero(t, Q8Unsigned.code(0, 0))
	minus := float32(math.Copysign(0, -1))
	require.Equal(t, uint8(0x80), Q8Signed.code(minus, minus))
}

// Quantising a dequantised value gives the same bytes, so a checkpoint in float32 loses nothing.
func TestQ8IsStable(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for name, m := range map[string]*Q8Map{"signed": Q8Signed, "unsigned": Q8Unsigned} {
		for range 2000 {
			n := 1 + r.IntN(Q8Block)
			x := normals(r, n, !m.signed)
			for i := range x {
				if r.IntN(3) == 0 {
					x[i] *= float32(math.Exp(-20 * r.Float64()))
				}
			}
			var first, second [Q8Block]byte
			scale := m.Quantize(first[:], x)
			y := make([]float32, n)
			m.Dequantize(y, first[:], scale)
			require.Equal(t, scale, m.Quantize(second[:], y))
			require.Equal(t, first, second, name)
		}
	}
}

func TestQ8OddBlocks(t *testing.T) {
	var block [Q8Block]byte
	for i := range block {
		block[i] = 0xff
	}
	x := make([]float32, Q8Block)
	require.Zero(t, Q8Signed.Quantize(block[:], x))
	require.Equal(t, [Q8Block]byte{}, block, "a block of zeros")
	Q8Signed.Dequantize(x, block[:], 0)
	require.Equal(t, make([]float32, Q8Block), x)
	for _, odd := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
		x = normals(rand.New(rand.NewPCG(1, 1)), Q8Block, false)
		x[77] = odd
		Q8Signed.Dequantize(x, block[:], Q8Signed.Quantize(block[:], x))
		for _, v := range x {
			require.True(t, v != v, "%v", odd)
		}
	}
	x = []float32{math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat32}
	Q8Signed.Dequantize(x, block[:], Q8Signed.Quantize(block[:], x))
	require.Equal(t, []float32{math.SmallestNonzeroFloat32, -math.SmallestNonzeroFloat32}, x)
}

// q8Values draws numbers near borders between codes, and over float32's complete range.
func q8Values(r *rand.Rand, m *Q8Map, n int, scale float32) []float32 {
	x := make([]float32, n)
	for i := range x {
		a, b := m.value[r.IntN(256)], m.value[r.IntN(256)]
		switch r.IntN(8) {
		case 0:
			x[i] = a * scale
		case 1: // between neighbours
			c := r.IntN(127)
			x[i] = (m.value[c] + m.value[c+1]) / 2 * scale
		case 2:
			x[i] = m.t.borders[r.IntN(7)] * scale
		case 3:
			x[i] = math.Nextafter32(m.t.borders[r.IntN(7)], float32(r.IntN(2))) * scale
		case 4:
			x[i] = 0
		case 5:
			x[i] = float32(math.Exp(-60*r.Float64())) * scale
		default:
			x[i] = (a + b) / 2 * scale
		}
		if !m.signed {
			x[i] = max(x[i], -x[i])
		} else if r.IntN(2) == 0 {
			x[i] = -x[i]
		}
	}
	return x
}

// Codes and scales are the same at every level, for magnitudes from float32's smallest to its
// largest.
func TestQ8CodesAreTheSameAtEveryLevel(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for name, m := range map[string]*Q8Map{"signed": Q8Signed, "unsigned": Q8Unsigned} {
		used := map[byte]bool{}
		for i := range 3000 {
			x := q8Values(r, m, 1+r.IntN(Q8Block), float32(math.Ldexp(1+r.Float64(), i%277-149)))
			var want [Q8Block]byte
			restore := useLevel(level.Portable)
			scale := m.Quantize(want[:], x)
			restore()
			for l := level.AVX2; l <= level.Best(); l++ {
				var got [Q8Block]byte
				restore := useLevel(l)
				s := m.Quantize(got[:], x)
				restore()
				require.Equal(t, math.Float32bits(scale), math.Float32bits(s), "%s at %v", name, l)
				require.Equal(t, want, got, "%s at %v: %v", name, l, x)
			}
			for j, v := range x {
				used[want[j]] = true
				require.False(t, !m.signed && v > 0 && want[j] == 0, "%v became 0, scale %v", v, scale)
			}
		}
		require.Greater(t, len(used), 250, "%s: codes that were met", name)
	}
}

// An update gives the same bits at every level, for all types, and for blocks with zero, tiny or
// non-finite moments.
func TestAdamW8IsTheSameAtEveryLevel(t *testing.T) {
	for _, low := range []Half{NoHalf, BF16, F16} {
		for _, g16 := range []Half{NoHalf, BF16} {
			var want []byte
			for l := level.Portable; l <= level.Best(); l++ {
				restore := useLevel(l)
				got := adamw8Bytes(t, low, g16)
				restore()
				if want == nil {
					want = got
				}
				require.True(t, bytes.Equal(want, got), "%v, parameters as %v, gradients as %v: %d of %d bytes differ", l, low, g16, differing(want, got), len(want))
			}
		}
	}
}

// adamw8Bytes returns everything that a few updates write.
func adamw8Bytes(t *testing.T, low, g16 Half) []byte {
	const n = 9*Q8Block + 53
	r := rand.New(rand.NewPCG(11, 12))
	blocks := Q8Blocks(n)
	k := AdamW8{P: normals(r, n, false), M: make([]byte, n), V: make([]byte, n), MScale: make([]float32, blocks), VScale: make([]float32, blocks),
		AdamStep: AdamStep{GradScale: 0.5, LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 0.3, BC2: 0.1}}
	if low != NoHalf {
		k.Low, k.LowAs = make([]uint16, n), low
	}
	for range 4 {
		g := normals(r, n, false)
		clear(g[:Q8Block])
		for i := range Q8Block {
			g[Q8Block+i] *= 1e-18
			g[2*Q8Block+i] *= 1e18
		}
		g[3*Q8Block+7] = float32(math.Inf(1))
		k.G, k.G16 = g, Half16{}
		if g16 != NoHalf {
			k.G, k.G16 = nil, Half16{X: make([]uint16, n), As: g16}
			narrow(g16, k.G16.X, g)
		}
		require.NoError(t, k.Run(nil))
	}
	for i, v := range k.P { // a NaN's payload is not fixed
		if v != v {
			k.P[i] = 0
			if low != NoHalf {
				k.Low[i] = 0
			}
		}
	}
	all := slices.Concat(k.M, k.V)
	for _, x := range [][]float32{k.P, k.MScale, k.VScale} {
		for _, v := range x {
			all = bin.LittleEndian.AppendUint32(all, math.Float32bits(v))
		}
	}
	for _, v := range k.Low {
		all = bin.LittleEndian.AppendUint16(all, v)
	}
	return all
}

// Normal numbers and their squares keep 30 dB. As negative controls, a linear map of the squares
// and a neighbouring block's scales do not.
func TestQ8KeepsTheSignal(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	x, v := normals(r, 1<<16, false), normals(r, 1<<16, true)
	require.Greater(t, snr(f64s(x), f64s(Q8Signed.roundTrip(x))), 30.0)
	require.Greater(t, snr(f64s(v), f64s(Q8Unsigned.roundTrip(v))), 30.0)

	// An update divides by the root of the second moment, so small moments matter.
	lost := func(got []float32) (n int) {
		for i, x := range got {
			if r := math.Sqrt(float64(x) / float64(v[i])); v[i] > 1e-10 && !(r > 0.7 && r < 1.4) {
				n++
			}
		}
		return n
	}
	linear := make([]float32, len(v))
	for lo := 0; lo < len(v); lo += Q8Block {
		top := slices.Max(v[lo : lo+Q8Block])
		for i := lo; i < lo+Q8Block; i++ {
			linear[i] = float32(math.Round(float64(v[i]/top)*255)) / 255 * top
		}
	}
	require.Zero(t, lost(Q8Unsigned.roundTrip(v)))
	require.Greater(t, lost(linear), len(v)/50)

	for lo := 0; lo < len(x); lo += Q8Block { // blocks of different size
		for i := range Q8Block {
			x[lo+i] *= float32(lo%7 + 1)
		}
	}
	wrong := make([]float32, len(x))
	for lo := 0; lo+2*Q8Block <= len(x); lo += Q8Block {
		var a, b [Q8Block]byte
		Q8Signed.Quantize(a[:], x[lo:lo+Q8Block])
		Q8Signed.Dequantize(wrong[lo:lo+Q8Block], a[:], Q8Signed.Quantize(b[:], x[lo+Q8Block:lo+2*Q8Block]))
	}
	require.Less(t, snr(f64s(x), f64s(wrong)), 20.0)
	require.Greater(t, snr(f64s(x), f64s(Q8Signed.roundTrip(x))), 30.0)
}

// The 8-bit rule stays close to AdamW in float64, for any number of threads, and also if a
// parameter is updated in pieces of blocks.
func TestAdamW8FollowsAdamW(t *testing.T) {
	const n, steps = 5*Q8Block + 100, 60
	r := rand.New(rand.NewPCG(7, 8))
	p := normals(r, n, false)
	exact := f64s(p)
	start := slices.Clone(exact)
	em, ev := make([]float64, n), make([]float64, n)
	m, v, ms, vs := make([]byte, n), make([]byte, n), make([]float32, Q8Blocks(n)), make([]float32, Q8Blocks(n))
	q, qm, qv, qms, qvs := slices.Clone(p), make([]byte, n), make([]byte, n), make([]float32, Q8Blocks(n)), make([]float32, Q8Blocks(n))
	low := make([]uint16, n)
	pl := pool.New(3)
	defer pl.Close()
	for s := 1; s <= steps; s++ {
		g := normals(r, n, false)
		for i := range g {
			g[i] += 5e-4 // a drift, as in training
		}
		one := AdamW8{AdamStep: AdamStep{GradScale: 0.5, LR: 1e-3, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1,
			BC1: 1 - math.Pow(0.9, float64(s)), BC2: 1 - math.Pow(0.95, float64(s))}}
		whole := one
		whole.P, whole.G, whole.M, whole.V, whole.MScale, whole.VScale, whole.Low, whole.LowAs = p, g, m, v, ms, vs, low, BF16
		require.NoError(t, whole.Run(pl))
		for _, cut := range [][2]int{{2 * Q8Block, n}, {0, 2 * Q8Block}} {
			part := one
			lo, hi := cut[0], cut[1]
			part.P, part.G = q[lo:hi], g[lo:hi]
			part.M, part.V = qm[lo:hi], qv[lo:hi]
			part.MScale, part.VScale = qms[Q8Blocks(lo):Q8Blocks(hi)], qvs[Q8Blocks(lo):Q8Blocks(hi)]
			require.NoError(t, part.Run(nil))
		}
		require.Equal(t, p, q)
		require.Equal(t, m, qm)
		require.Equal(t, v, qv)
		require.Equal(t, ms, qms)
		require.Equal(t, vs, qvs)
		for i := range exact {
			x := float64(g[i]) * 0.5
			em[i] = 0.9*em[i] + 0.1*x
			ev[i] = 0.95*ev[i] + 0.05*x*x
			exact[i] = exact[i]*(1-1e-4) - 1e-3/one.BC1*em[i]/(math.Sqrt(ev[i]/one.BC2)+1e-8)
		}
	}
	moved, got := make([]float64, n), make([]float64, n)
	for i := range exact {
		moved[i], got[i] = exact[i]-start[i], float64(p[i])-start[i]
	}
	require.Greater(t, snr(moved, got), 25.0)
	back := make([]float32, n)
	WidenRow(BF16, back, low)
	require.Greater(t, snr(f64s(p), f64s(back)), 40.0)
	require.Error(t, (&AdamW8{P: p, G: p, M: m[1:], V: v, MScale: ms, VScale: vs, AdamStep: AdamStep{BC1: 1, BC2: 1}}).Run(nil))
	require.Error(t, (&AdamW8{P: p, G: p, M: m, V: v, MScale: ms, VScale: vs[1:], AdamStep: AdamStep{BC1: 1, BC2: 1}}).Run(nil))
}

func differing(a, b []byte) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}
