package planning

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
)

// Presets that a mesh does not divide are no candidates: SmolLM2 135M has 9 heads, GPT-2 12 layers.
func TestPresetsThatAMeshDivides(t *testing.T) {
	names := func(c config.Config) (list []string) {
		for _, i := range presets(&c) {
			list = append(list, bySize()[i].Name)
		}
		require.ElementsMatch(t, append(list, undivided(&c)...), presetNames(c.Seq))
		return list
	}
	c := config.Default()
	require.Len(t, names(c), len(presetNames(c.Seq)))
	c.Tensor = 2
	require.Contains(t, names(c), "gpt2")
	require.NotContains(t, names(c), "smollm2-135m")
	c.Tensor, c.Pipeline = 0, 13
	require.NotContains(t, names(c), "gpt2")
	require.Contains(t, names(c), "gpt2-xl")
}

// The memory sizes tried by --ask increase by at most 2 %.
func TestSizesLieClose(t *testing.T) {
	list := sizes(nil)
	require.EqualValues(t, 1<<20, list[0])
	for i, v := range list[1:] {
		require.Greater(t, v, list[i])
		require.LessOrEqual(t, float64(v), 1.02*float64(list[i]), "%d", v)
		require.True(t, v < 64<<20 || v%(1<<20) == 0, "%d", v)
	}
	require.EqualValues(t, 4<<40, list[len(list)-1])
}

func presetNames(seq int) (list []string) {
	for _, p := range bySize() {
		if p.Config.Positions >= seq {
			list = append(list, p.Name)
		}
	}
	return list
}
