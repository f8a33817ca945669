package exact

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// bigSum is the reference: the exact sum as a big.Float, rounded once.
func bigSum(xs []float64) float64 {
	s := new(big.Float).SetPrec(4096)
	for _, x := range xs {
		s.Add(s, new(big.Float).SetPrec(4096).SetFloat64(x))
	}
	f, _ := s.Float64()
	return f
}

func randomFinite(r *rand.Rand) float64 {
	for {
		x := math.Float64frombits(r.Uint64())
		switch r.IntN(4) {
		case 0:
			x = r.NormFloat64()
		case 1:
			x = math.Float64frombits(r.Uint64() & (1<<53 - 1)) // subnormal, or nearly
		}
		if !math.IsNaN(x) && !math.IsInf(x, 0) {
			return x
		}
	}
}

func TestSumEqualsBig(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		xs := make([]float64, r.IntN(20))
		for i := range xs {
			xs[i] = randomFinite(r)
			if i > 0 && r.IntN(3) == 0 {
				xs[i] = -xs[i-1] // cancellation
			}
		}
		a := make(Accumulator, Limbs)
		for _, x := range xs {
			a.Add(x)
		}
		require.Equal(t, bigSum(xs), a.Float64(), "%v", xs)

		// The value does not depend on the order or on how the terms are split over accumulators.
		b, c := make(Accumulator, Limbs), make(Accumulator, Limbs)
		for _, i := range r.Perm(len(xs)) {
			if r.IntN(2) == 0 {
				b.Add(xs[i])
			} else {
				c.Add(xs[i])
			}
		}
		if r.IntN(2) == 0 {
			b.Normalize()
		}
		b.Merge(c)
		require.Equal(t, a.Float64(), b.Float64())
		a.Normalize()
		b.Normalize()
		require.Equal(t, a, b)
	}
}

func TestRounding(t *testing.T) {
	for _, xs := range [][]float64{
		{1, math.Ldexp(1, -53)},                                       // a tie, to even
		{1, math.Ldexp(1, -53), math.SmallestNonzeroFloat64},          // just above a tie
		{1 + math.Ldexp(1, -52), math.Ldexp(1, -53)},                  // a tie, up to even
		{math.MaxFloat64, math.MaxFloat64},                            // too large
		{math.MaxFloat64, math.MaxFloat64, -math.MaxFloat64},          // back in range
		{math.MaxFloat64, math.Ldexp(1, 969)},                         // below half a unit
		{math.MaxFloat64, math.Ldexp(1, 970)},                         // rounds to infinity
		{-math.MaxFloat64, -math.MaxFloat64},                          //
		{math.SmallestNonzeroFloat64, math.SmallestNonzeroFloat64},    //
		{0x1p-1022, -math.SmallestNonzeroFloat64},                     // largest subnormal
		{math.Copysign(0, -1)},                                        // a zero sum is +0
		{1e300, 1, -1e300},                                            //
		{-1, -math.Ldexp(1, -53), -math.SmallestNonzeroFloat64, 1e-8}, //
	} {
		a := make(Accumulator, Limbs)
		for _, x := range xs {
			a.Add(x)
		}
		want := bigSum(xs)
		require.Equal(t, want+0, a.Float64(), "%v", xs)
	}
}

func TestNonFinite(t *testing.T) {
	sum := func(xs ...float64) float64 {
		a := make(Accumulator, Limbs)
		for _, x := range xs {
			a.Add(x)
		}
		return a.Float64()
	}
	require.Equal(t, math.Inf(1), sum(1, math.Inf(1)))
	require.Equal(t, math.Inf(-1), sum(math.Inf(-1), 5))
	require.True(t, math.IsNaN(sum(math.Inf(-1), math.Inf(1))))
	require.True(t, math.IsNaN(sum(1, math.NaN())))
}

func TestManyAdditions(t *testing.T) {
	a := make(Accumulator, Limbs)
	for range 1 << 20 {
		a.Add(0.1)
	}
	require.Equal(t, 0.1*(1<<20), a.Float64())
}

func TestOfRefusesLength(t *testing.T) {
	_, err := Of(make([]int64, Limbs-1))
	require.ErrorContains(t, err, "71 int64, want 72")
	_, err = Of(make([]int64, Limbs))
	require.NoError(t, err)
}

func TestAddDoesNotAllocate(t *testing.T) {
	a := make(Accumulator, Limbs)
	require.Zero(t, alloctest.PerRun(100, func() { a.Add(1.5); a.Normalize(); _ = a.Float64() }))
}
