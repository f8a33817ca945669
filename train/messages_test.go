package train

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/train/saving"
)

// TestWhatADivergenceSays checks that a Diverged error does not propose settings the run already
// has, and does not call overflows of fp16's loss scale skipped steps.
func TestWhatADivergenceSays(t *testing.T) {
	const skip = "Config.OnNonFinite skip"
	plain := Diverged{Step: 3, Rank: -1}
	require.Contains(t, plain.Error(), skip)
	given := Diverged{Step: 3, Rank: -1, Skips: true}
	require.NotContains(t, given.Error(), skip)
	tenth := Diverged{Step: 12, Rank: -1, Skips: true, Skipped: 10}
	require.Contains(t, tenth.Error(), "none of the last 10 steps was finite")
	require.NotContains(t, tenth.Error(), skip)
	floor := Diverged{Step: 4, Rank: -1, Skipped: 3, LossScale: 1}
	require.Contains(t, floor.Error(), "it overflowed at a loss scale of 1, as each of the last 3 steps did at its own")
	require.NotContains(t, floor.Error(), skip)
	require.NotContains(t, floor.Error(), "Config.LossScale")
	static := Diverged{Step: 10, Rank: -1, Skipped: 10, LossScale: 1 << 24}
	require.Contains(t, static.Error(), "Config.LossScale dynamic, or a smaller one")
	require.NotContains(t, static.Error(), "Config.LR")
}

// TestAnOrderOfSumsIsAChange checks that a resume reports settings that change only the order of
// sums, and with it the bits.
func TestAnOrderOfSumsIsAChange(t *testing.T) {
	c := request{Config: config.Default()}
	was := saving.Settings(&c.Config)
	c.Reproducible, c.AccumOrder, c.Collectives, c.ShardSize = true, "Layer", "ring", 2
	_, lines := saving.Changed(was, saving.Settings(&c.Config))
	require.Equal(t, []string{"Config.Collectives: not in use → ring", "Config.Reproducible: not in use → true", "Config.ShardSize: not in use → 2"}, lines,
		"of one micro-batch, layer order is micro order")
	c.Accum = 2
	_, lines = saving.Changed(was, saving.Settings(&c.Config))
	require.Contains(t, lines, "Config.AccumOrder: not in use → layer")
}

// TestADefaultIsNoChange checks that a setting at its default is not reported as a change. Earlier
// checkpoints recorded the default of 16-bit gradients.
func TestADefaultIsNoChange(t *testing.T) {
	c := request{Config: config.Default()}
	now := saving.Settings(&c.Config)
	c.Precision = "bf16"
	flags, lines := saving.Changed(now, saving.Settings(&c.Config))
	require.Equal(t, []string{"precision"}, flags)
	require.Equal(t, []string{"Config.Precision: fp32 → bf16"}, lines)
	old := saving.Settings(&c.Config)
	old["reduce"] = "same"
	flags, _ = saving.Changed(old, saving.Settings(&c.Config))
	require.Empty(t, flags)
	require.Equal(t, "same", old["reduce"], "what was read stays")
	c.Reduce = "fp32"
	_, lines = saving.Changed(old, saving.Settings(&c.Config))
	require.Equal(t, []string{"Config.Reduce: not in use → fp32"}, lines)
	c.Precision = "fp16"
	was := saving.Settings(&c.Config)
	c.LossScale = "1024"
	_, lines = saving.Changed(was, saving.Settings(&c.Config))
	require.Equal(t, []string{"Config.LossScale: dynamic → 1024"}, lines, "the default of fp16, which is not recorded")
}
