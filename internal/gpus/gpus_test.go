package gpus

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTable(t *testing.T) {
	seen := map[string]bool{}
	for _, g := range List() {
		for _, n := range append([]string{g.Name}, g.Aliases...) {
			require.False(t, seen[n], n)
			require.Equal(t, normal(n), n)
			seen[n] = true
		}
		require.NotEmpty(t, g.Source, g.Name)
		require.NotEmpty(t, outside[g.Arch], g.Name)
		// Orders of magnitude and relations that a wrong digit would violate.
		require.Greater(t, g.Memory, int64(14)<<30, g.Name)
		require.Less(t, g.Memory, int64(200)<<30, g.Name)
		require.Greater(t, g.Rates.FP16, g.Rates.FP32, g.Name)
		require.True(t, g.Rates.BF16 == 0 || g.Rates.BF16 == g.Rates.FP16, g.Name)
		require.True(t, g.Arch == Volta || g.Rates.INT8 > g.Rates.FP16, g.Name)
		require.GreaterOrEqual(t, g.PCIe, pcie3x16, g.Name)
		intensity := g.Rates.FP16 / g.MemoryBandwidth // FLOP a byte
		require.Greater(t, intensity, 35.0, g.Name)   // H20: 37
		require.Less(t, intensity, 450.0, g.Name)
	}
	for _, name := range []string{"v100-16", "v100-32", "a100-40", "a100-80", "h100-80", "h200-141", "b200-192", "rtx-3090", "rtx-4090", "rtx-5090", "l40s"} {
		require.True(t, seen[name], name)
	}
}

func TestLookup(t *testing.T) {
	for _, name := range []string{"h100-80", "H100-80", " NVIDIA H100_80 ", "h100"} {
		g, err := Lookup(name)
		require.NoError(t, err, name)
		require.Equal(t, "h100-80", g.Name)
	}
	_, err := Lookup("h10-80")
	require.ErrorContains(t, err, `"h10-80"`)
	require.ErrorContains(t, err, "nearest are h100-80")
}

func TestProductsOfNVML(t *testing.T) {
	for product, want := range map[string]string{
		"NVIDIA H200": "h200-141", "NVIDIA H100 80GB HBM3": "h100-80", "NVIDIA GeForce RTX 4090": "rtx-4090",
		"NVIDIA A100-SXM4-80GB": "a100-80", "Tesla V100-SXM2-32GB": "v100-32", "NVIDIA L40S": "l40s",
	} {
		g, ok := byProduct(product)
		require.True(t, ok, product)
		require.Equal(t, want, g.Name)
	}
	_, ok := byProduct("NVIDIA GeForce GTX 1080")
	require.False(t, ok)
}

// A rank with its own GPU has all of the GPU's rates and its link. Ranks that share a GPU divide
// both.
func TestRanksSpreadOverGPUs(t *testing.T) {
	g, err := Lookup("a100-40")
	require.NoError(t, err)
	require.Equal(t, g.Machine(4), g.Spread(4, 8))
	require.Equal(t, g.Machine(4), g.Spread(4, 4))
	require.Equal(t, g.Shared(4), g.Spread(4, 1))
	require.Equal(t, g.Shared(1), g.Spread(1, 0), "nothing is known of the machine")
	m := g.Spread(8, 4)
	require.Equal(t, g.Shared(2).Matrix, m.Matrix)
	require.Equal(t, 8, m.NodeSize)
	require.InEpsilon(t, g.Machine(8).Intra.Bandwidth/2, m.Intra.Bandwidth, 1e-9)
}

// Detect describes the machine's GPUs, or returns a one-line error that says what to do.
func TestDetect(t *testing.T) {
	found, err := Detect()
	if err != nil {
		require.Empty(t, found)
		require.ErrorContains(t, err, "name")
		require.NotContains(t, err.Error(), "\n")
		return
	}
	for _, g := range found {
		require.Positive(t, g.Memory)
	}
}
