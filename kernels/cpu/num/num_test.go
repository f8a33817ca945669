package num

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// bigFma is the reference: the exact value, rounded once to float32.
func bigFma(a, b, c float32) float32 {
	f := func(x float32) *big.Float { return new(big.Float).SetPrec(1024).SetFloat64(float64(x)) }
	s := f(a)
	s.Mul(s, f(b))
	s.Add(s, f(c))
	r, _ := s.Float32()
	return r
}

func TestFma32(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	// Values with few bits, subnormals and cancellation make ties likely.
	draw := func() float32 {
		switch r.IntN(5) {
		case 0:
			return math.Float32frombits(r.Uint32())
		case 1:
			return float32(math.Ldexp(float64(r.IntN(1<<24)-1<<23), r.IntN(60)-30))
		case 2:
			return float32(math.Ldexp(float64(r.IntN(16)-8), -150+r.IntN(30)))
		case 3:
			return 1 + float32(math.Ldexp(float64(r.IntN(8)), -23))
		}
		return float32(math.Ldexp(1+float64(r.IntN(2))*math.Ldexp(1, -23), -75-r.IntN(5)))
	}
	for range 300000 {
		a, b, c := draw(), draw(), draw()
		switch r.IntN(4) {
		case 0:
			c = -a * b
		case 1: // the product is about half a unit of c
			c = draw()
			a = float32(math.Ldexp(1+math.Ldexp(float64(r.IntN(5)-2), -23), r.IntN(20)))
			b = c * float32(math.Ldexp(1, -24)) / float32(math.Ldexp(1, math.Ilogb(float64(a))))
		}
		fin := func(x float32) bool { return x-x == 0 }
		if !fin(a) || !fin(b) || !fin(c) {
			continue
		}
		want, got := bigFma(a, b, c), Fma32(a, b, c)
		if want == 0 && got == 0 {
			continue // the sign of zero is tested below
		}
		require.Equal(t, math.Float32bits(want), math.Float32bits(got), "fma(%g, %g, %g)", a, b, c)
	}
	// A subnormal tie that the discarded part decides; rounding twice gives a wrong result.
	c := float32(math.Ldexp(1<<22, -149))
	a, b := float32(math.Ldexp(1+0x1p-23, -75)), float32(math.Ldexp(1+0x1p-23, -75))
	require.Equal(t, bigFma(a, b, c), Fma32(a, b, c))
	inf := float32(math.Inf(1))
	require.Equal(t, inf, Fma32(inf, 1, 2))
	require.True(t, IsNaN(Fma32(inf, 1, -inf)))
	require.True(t, IsNaN(Fma32(inf, 0, 1)))
	require.Equal(t, uint32(0), math.Float32bits(Fma32(1, 1, -1)))
	require.Equal(t, uint32(1<<31), math.Float32bits(Fma32(-1, 0, float32(math.Copysign(0, -1)))))
}

func ulps(got, want float64) float64 {
	u := math.Max(math.Ldexp(1, math.Ilogb(want)-23), math.Ldexp(1, -149))
	return math.Abs(got-want) / u
}

func TestExp(t *testing.T) {
	worst := 0.0
	for x := float32(-87.3); x < 88.7; x += 0.00137 {
		worst = max(worst, ulps(float64(Exp(x)), math.Exp(float64(x))))
	}
	require.Less(t, worst, 1.0)
	for x := float32(-103.9); x < -87; x += 0.0037 { // subnormal results
		require.LessOrEqual(t, math.Abs(float64(Exp(x))-math.Exp(float64(x))), 1.5*math.SmallestNonzeroFloat32)
	}
	inf := float32(math.Inf(1))
	require.Equal(t, inf, Exp(inf))
	require.Equal(t, inf, Exp(float32(88.73)))
	require.Equal(t, float32(0), Exp(-inf))
	require.Equal(t, float32(0), Exp(float32(-104)))
	require.Equal(t, float32(1), Exp(float32(0)))
	require.True(t, IsNaN(Exp(float32(math.NaN()))))
}

func TestErf(t *testing.T) {
	worst := 0.0
	for x := float32(-5); x < 5; x += 0.00031 {
		worst = max(worst, math.Abs(float64(Erf(x))-math.Erf(float64(x))))
	}
	require.Less(t, worst, 4e-7)
	t.Logf("largest error of Erf: %.3g", worst)
	require.InDelta(t, 1, float64(Erf(float32(math.Inf(1)))), 2e-7)
	require.InDelta(t, -1, float64(Erf(float32(math.Inf(-1)))), 2e-7)
	require.True(t, IsNaN(Erf(float32(math.NaN()))))
}

func TestActivationsFloat32FollowFloat64(t *testing.T) {
	type pair struct {
		name string
		f32  func(float32) float32
		f64  func(float64) float64
	}
	for _, p := range []pair{
		{"GELUTanh", GELUTanh[float32], func(x float64) float64 {
			return 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
		}},
		{"GELU", GELU[float32], func(x float64) float64 { return 0.5 * x * (1 + math.Erf(x/math.Sqrt2)) }},
		{"SiLU", SiLU[float32], func(x float64) float64 { return x / (1 + math.Exp(-x)) }},
		{"ReLU", ReLU[float32], func(x float64) float64 { return math.Max(x, 0) }},
		{"GELUTanhGrad", GELUTanhGrad[float32], GELUTanhGrad[float64]},
		{"GELUGrad", GELUGrad[float32], GELUGrad[float64]},
		{"SiLUGrad", SiLUGrad[float32], SiLUGrad[float64]},
	} {
		for x := float32(-12); x < 12; x += 0.0071 {
			require.InDelta(t, p.f64(float64(x)), float64(p.f32(x)), 1e-6*math.Max(1, math.Abs(float64(x))), "%s(%g)", p.name, x)
		}
		require.True(t, IsNaN(p.f32(float32(math.NaN()))), p.name)
	}
}

func TestGradients(t *testing.T) {
	const h = 1e-5
	for _, p := range []struct {
		name     string
		f, deriv func(float64) float64
	}{
		{"GELUTanh", GELUTanh[float64], GELUTanhGrad[float64]},
		{"GELU", GELU[float64], GELUGrad[float64]},
		{"SiLU", SiLU[float64], SiLUGrad[float64]},
	} {
		for x := -6.0; x < 6; x += 0.05 {
			require.InDelta(t, (p.f(x+h)-p.f(x-h))/(2*h), p.deriv(x), 1e-9, "%s'(%g)", p.name, x)
		}
	}
}

func TestFloat64Functions(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	rel := func(got, want float64) float64 { return math.Abs(got-want) / math.Max(math.Abs(want), 1e-300) }
	for range 100000 {
		x := math.Ldexp(r.Float64()+0.5, r.IntN(2000)-1000)
		require.Less(t, rel(Log(x), math.Log(x)), 4e-16)
		y := r.Float64()*1400 - 700
		require.Less(t, rel(Exp64(y), math.Exp(y)), 4e-16)
		z := (r.Float64() - 0.5) * math.Ldexp(1, r.IntN(24))
		s, c := Sincos(z)
		require.InDelta(t, math.Sin(z), s, 3e-16)
		require.InDelta(t, math.Cos(z), c, 3e-16)
	}
	require.InEpsilon(t, math.Pow(10000, -0.37), Pow(10000, -0.37), 1e-14)
	require.Equal(t, math.Inf(-1), Log(0))
	require.True(t, math.IsNaN(Log(-1)))
	require.Equal(t, math.Inf(1), Log(math.Inf(1)))
	require.Equal(t, math.Inf(1), Exp64(1000))
	require.Equal(t, 0.0, Exp64(math.Inf(-1)))
	require.InEpsilon(t, math.Exp(-740), Exp64(-740), 1e-2)
	s, _ := Sincos(math.Inf(1))
	require.True(t, math.IsNaN(s))
}

// Known answers from the authors' distribution (Random123, kat_vectors).
func TestPhiloxKnownAnswers(t *testing.T) {
	const f = 0xffffffff
	require.Equal(t, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}, Philox([4]uint32{}, [2]uint32{}))
	require.Equal(t, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}, Philox([4]uint32{f, f, f, f}, [2]uint32{f, f}))
	require.Equal(t, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
		Philox([4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0}))
}

// The random bits of stochastic rounding differ by seed, parameter, element and update.
func TestRoundingDrawsByEachArgument(t *testing.T) {
	even, odd := Rounding(3, 5, 7, 9)
	require.NotEqual(t, even, odd)
	for name, other := range map[string][4]uint64{
		"seed": {4, 5, 7, 9}, "high half of the seed": {3 + 1<<40, 5, 7, 9},
		"parameter": {3, 6, 7, 9}, "high half of the parameter": {3, 5 + 1<<40, 7, 9},
		"element": {3, 5, 8, 9}, "high half of the element": {3, 5, 7 + 1<<32, 9}, "update": {3, 5, 7, 10},
	} {
		e, o := Rounding(other[0], other[1], other[2], other[3])
		require.NotEqual(t, even, e, name)
		require.NotEqual(t, odd, o, name)
	}
}

func TestNormal(t *testing.T) {
	const n = 200000
	var s1, s2, s4 float64
	for i := range uint64(n) {
		x := normal(7, Stream("h.0.attn.c_attn.weight"), i)
		s1, s2, s4 = s1+x, s2+x*x, s4+x*x*x*x
	}
	require.InDelta(t, 0, s1/n, 0.01)
	require.InDelta(t, 1, s2/n, 0.015)
	require.InDelta(t, 3, s4/n, 0.1)
	// Any range of a stream has the same numbers, with fixed bits.
	for first := range uint64(5) {
		dst := make([]float32, 7)
		FillNormal(dst, 0.02, 7, 9, first)
		for i, v := range dst {
			require.Equal(t, float32(0.02*normal(7, 9, first+uint64(i))), v)
		}
	}
	require.NotEqual(t, normal(7, 9, 0), normal(7, 10, 0))
	require.NotEqual(t, normal(7, 9, 0), normal(8, 9, 0))
	require.Equal(t, uint64(0xaf63dc4c8601ec8c), Stream("a"))
}

func TestHalfConversions(t *testing.T) {
	for h := range 1 << 16 {
		for _, f := range []struct {
			from func(uint16) float32
			to   func(float32) uint16
		}{{FromF16, F16}, {FromBF16, BF16}} {
			x := f.from(uint16(h))
			back := f.to(x)
			if IsNaN(x) {
				require.True(t, IsNaN(f.from(back)))
				continue
			}
			require.Equal(t, uint16(h), back, "%#x = %g", h, x)
		}
	}
	// Round to nearest even: compare with the two neighbours for random values.
	r := rand.New(rand.NewPCG(7, 8))
	for range 300000 {
		x := math.Float32frombits(r.Uint32() & 0x7fffffff)
		if r.IntN(2) == 0 {
			x = float32(math.Ldexp(r.Float64(), r.IntN(44)-27))
		}
		if x-x != 0 {
			continue
		}
		for name, f := range map[string]struct {
			from func(uint16) float32
			to   func(float32) uint16
			inf  uint16
		}{"f16": {FromF16, F16, 0x7c00}, "bf16": {FromBF16, BF16, 0x7f80}} {
			h := f.to(x)
			require.Equal(t, h|0x8000, f.to(-x))
			val := func(h uint16) float64 { // infinity counts as the next value
				if h == f.inf {
					return 2*float64(f.from(h-1)) - float64(f.from(h-2))
				}
				return float64(f.from(h))
			}
			d := math.Abs(val(h) - float64(x))
			if h > 0 {
				dn := math.Abs(val(h-1) - float64(x))
				require.True(t, d < dn || d == dn && h%2 == 0, "%s(%g) = %#x", name, x, h)
			}
			if h < f.inf {
				up := math.Abs(val(h+1) - float64(x))
				require.True(t, d < up || d == up && h%2 == 0, "%s(%g) = %#x", name, x, h)
			}
		}
	}
	nan := float32(math.NaN())
	require.True(t, IsNaN(FromF16(F16(nan))))
	require.True(t, IsNaN(FromBF16(BF16(math.Float32frombits(0x7f800001)))))
}

// The generator's bits must never change: resuming from a checkpoint depends on them.
func TestNormalBits(t *testing.T) {
	h := uint64(14695981039346656037)
	for i := range uint64(1000) {
		h = (h ^ math.Float64bits(normal(1, 2, i))) * 1099511628211
	}
	require.Equal(t, uint64(0xd824a19e9bd6c0b6), h)
}

// The float32 functions give the same bits on every processor.
func TestFloat32Bits(t *testing.T) {
	h := uint64(14695981039346656037)
	add := func(x float32) { h = (h ^ uint64(math.Float32bits(x))) * 1099511628211 }
	for i := range 20000 {
		x := float32(i-10000) * 0.0113
		add(Exp(x))
		add(Sigmoid(x))
		add(Erf(x / 16))
		add(GELUTanh(x / 8))
		add(GELUTanhGrad(x / 8))
		add(GELU(x / 8))
		add(GELUGrad(x / 8))
		add(SiLUGrad(x / 8))
		add(Fma32(x, x, -x*x))
	}
	require.Equal(t, uint64(0xdde89c12700313ae), h)
}

// normal returns the number with the given index of a stream.
func normal(seed, stream, index uint64) float64 {
	a, b := normalPair(seed, stream, index/2)
	if index%2 == 0 {
		return a
	}
	return b
}
