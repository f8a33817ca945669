package cost

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Korthikanti et al. 2022, table 3 and section 5 (selective recomputation): 5as/h is 80 for GPT-3
// and 64 for MT-NLG, which saves 70 % and 65 % of the activations.
func TestMegatronsActivations(t *testing.T) {
	for _, m := range []struct {
		name            string
		layers, h, a, b float64
		perToken, saves float64
	}{
		{"22B", 48, 6144, 64, 4, 5 * 64 * 2048 / 6144., 0},
		{"175B (GPT-3)", 96, 12288, 96, 1, 80, 0.70},
		{"530B (MT-NLG)", 105, 20480, 128, 1, 64, 0.65},
		{"1T", 128, 25600, 160, 1, 64, 0.65},
	} {
		const s = 2048
		all := MegatronActivationBytes(m.layers, s, m.b, m.h, m.a, false)
		require.InEpsilon(t, m.layers*s*m.b*m.h*(34+m.perToken), all, 1e-12, m.name)
		if m.saves > 0 {
			require.InDelta(t, m.saves, 1-MegatronActivationBytes(m.layers, s, m.b, m.h, m.a, true)/all, 0.006, m.name)
		}
	}
}

// zeroActivationBytes is the estimate of the ZeRO paper (Rajbhandari et al., SC 2020,
// section 3.2) for a GPT-2-like model: 12 · width · rows · tokens · layers values, in 16
// bits.
func zeroActivationBytes(layers, s, b, h float64) float64 { return 2 * 12 * h * b * s * layers }

// ZeRO, section 3.2: GPT-2 1.5B at 32 rows of 1K tokens "requires about 60 GB", which is the 56 GiB
// that later texts quote.
func TestZeROsActivations(t *testing.T) {
	n := zeroActivationBytes(48, 1024, 32, 1600)
	require.InDelta(t, 60, n/1e9, 0.5)
	require.InDelta(t, 56, n/(1<<30), 0.5)
}
