package published

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/gpus"
)

// If the parts of runs take known multiples of the predictions, the fit finds these multiples.
func TestFitFindsFactors(t *testing.T) {
	var rows []Row
	for i := range 40 {
		p := Parts{Products: 0.3 + 0.01*float64(i%7), Attention: 0.02 * float64(i%10), Other: 0.05 + 0.01*float64(i%4)}
		at := p.parts()
		slower := 1.5*at[0] + 2*at[1] + 3*at[2] + 0.5*at[3]
		rows = append(rows, Row{Calibration: i < 30, Stack: Torch, Card: "h100-80", TokensPerS: 100, Here: Prediction{TokensPerS: 100 * slower, Parts: p}})
	}
	f := FitIn(rows, Torch, "h100-80", gpus.Generation)
	require.Equal(t, 30, f.Rows)
	require.False(t, f.Elsewhere)
	for i := range rows[30:] {
		r := &rows[30+i]
		in := RangeOf([]*Fit{f}, r.Here.Parts)
		require.InEpsilon(t, r.Ratio(), in.Middle, 0.03)
		require.True(t, 0.95*r.Ratio() < in.Low && in.Low < in.High && in.High < 1.05*r.Ratio(), "%v", in)
	}
	require.Contains(t, RangeOf([]*Fit{f}, rows[0].Here.Parts).Text(), "30 published runs of torch (on h100-80)")
	// A card without rows uses those of its generation, or else those of all cards.
	require.False(t, FitIn(rows, Torch, "h200-141", gpus.Generation).Elsewhere)
	volta := FitIn(rows, Torch, "v100-32", gpus.Generation)
	require.True(t, volta.Elsewhere)
	require.Contains(t, RangeOf([]*Fit{volta}, Parts{Products: 1}).Text(), "(on h100-80; too few are known of this generation)")
	require.Nil(t, FitIn(rows, Megatron, "h100-80", gpus.Generation))
	// The fit does not depend on held-out rows.
	for i := range rows[30:] {
		rows[30+i].TokensPerS = 1e9
	}
	require.Equal(t, f, FitIn(rows, Torch, "h100-80", gpus.Generation))
}

// The interval of a few random values contains another one with probability 0.8, for any number of
// values. Interpolation between the outermost values has an error of at most 0.02.
func TestInterval(t *testing.T) {
	low, high := interval([]float64{1, 2, 3, 4, 5, 6, 7, 8, 9})
	require.Equal(t, []float64{1, 9}, []float64{low, high})
	low, high = interval([]float64{0.9, 1, 1.1})
	require.InDelta(t, 1+1.886*0.1*math.Sqrt(4./3), high, 1e-9)
	require.InDelta(t, 1, low*high, 1e-9)
	r := rand.New(rand.NewPCG(35, 1))
	for n := 2; n < 20; n++ {
		within, draws := 0, 20_000
		for range draws {
			values := make([]float64, n)
			for i := range values {
				values[i] = 1 + 0.02*r.NormFloat64()
			}
			slices.Sort(values)
			low, high := interval(values)
			if v := 1 + 0.02*r.NormFloat64(); low <= v && v <= high {
				within++
			}
		}
		require.InDelta(t, 0.8, float64(within)/float64(draws), 0.025, "%d values", n)
	}
}

// Every stack has a calibration for every card.
func TestEveryStackIsFitted(t *testing.T) {
	for _, stack := range Stacks {
		for _, g := range gpus.List() {
			f := FitOf(stack, g.Name, gpus.Generation)
			require.NotNil(t, f, "%s on %s", stack, g.Name)
			require.GreaterOrEqual(t, slices.Min(f.Of[:]), 0.0, "%s on %s: no part takes less than no time: %v", stack, g.Name, f.Of)
			in := RangeOf([]*Fit{f}, Parts{Products: 0.8, Attention: 0.1, Other: 0.05})
			require.True(t, 0.5 < in.Low && in.Low <= in.Middle && in.Middle <= in.High && in.High < 3, "%s on %s: %v", stack, g.Name, in)
		}
	}
}
