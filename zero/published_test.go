package zero

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

// Rajbhandari et al., SC 2020, table 1: GB of model states a device with
// mixed-precision Adam (K = 12), for P_os, P_os+g and P_os+g+p, as printed.
func TestTable1(t *testing.T) {
	type row struct {
		ranks  float64
		stages [3]float64 // stages 1, 2, 3
	}
	for _, model := range []struct {
		params, alone float64
		rows          []row
	}{
		{7.5e9, 120, []row{{1, [3]float64{120, 120, 120}}, {4, [3]float64{52.5, 41.3, 30}}, {16, [3]float64{35.6, 21.6, 7.5}},
			{64, [3]float64{31.4, 16.6, 1.88}}, {256, [3]float64{30.4, 15.4, 0.47}}, {1024, [3]float64{30.1, 15.1, 0.12}}}},
		{128e9, 2048, []row{{1, [3]float64{2048, 2048, 2048}}, {4, [3]float64{896, 704, 512}}, {16, [3]float64{608, 368, 128}},
			{64, [3]float64{536, 284, 32}}, {256, [3]float64{518, 263, 8}}, {1024, [3]float64{513, 257, 2}}}},
		{1e12, 16000, []row{{1, [3]float64{16000, 16000, 16000}}, {4, [3]float64{7000, 5500, 4000}}, {16, [3]float64{4750, 2875, 1000}},
			{64, [3]float64{4187, 2218, 250}}, {256, [3]float64{4046, 2054, 62.5}}, {1024, [3]float64{4011, 2013, 15.6}}}},
	} {
		for _, r := range model.rows {
			require.InDelta(t, model.alone, Replicate.ModelStateBytes(model.params, r.ranks, 2, 2, 12)/1e9, 1e-6)
			for i, want := range r.stages {
				got := Stage(i+1).ModelStateBytes(model.params, r.ranks, 2, 2, 12) / 1e9
				// The paper rounds small values and truncates large ones, so the test allows one
				// unit of the last printed digit.
				digits := 1.0
				for _, d := range []float64{1, 0.1, 0.01} {
					if math.Abs(want/d-math.Round(want/d)) < 1e-9 {
						digits = d
						break
					}
				}
				require.InDelta(t, want, got, digits, "%g parameters, %g ranks, stage %d", model.params, r.ranks, i+1)
			}
		}
	}
}

// Section 3.1 of the paper: mixed-precision Adam needs 16 bytes of model states a parameter. The
// sizes are published examples.
func TestSixteenBytesAParameter(t *testing.T) {
	for params, want := range map[float64]float64{0.32e9: 5.12, 1.5e9: 24, 17.2e9: 275, 175e9: 2800} {
		require.InDelta(t, want, Replicate.ModelStateBytes(params, 1, 2, 2, 12)/1e9, 0.5, "%g parameters", params)
	}
}
