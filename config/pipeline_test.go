package config

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// TestBesidePipeline checks that settings a pipeline does not support are rejected. The error must
// name Config.Pipeline and the other field.
func TestBesidePipeline(t *testing.T) {
	for want, change := range map[string]func(c *Config){
		"Config.Zero 2":               func(c *Config) { c.Zero = 2 },
		"Config.Zero 3":               func(c *Config) { c.Zero = 3 },
		"Config.Inference":            func(c *Config) { c.Inference = true },
		"Config.Generate":             func(c *Config) { c.Generate = true },
		"Config.AccumOrder layer":     func(c *Config) { c.AccumOrder = "layer" },
		"Config.Int8":                 func(c *Config) { c.Int8 = []string{"optimizer"} },
		"Config.Own.Rule":             func(c *Config) { c.Own.Rule = &zero.Rule{Name: "own", Emit: func(*zero.Emitter, *zero.Target) {}} },
		"Config.FrozenCache":          func(c *Config) { c.Freeze, c.FrozenCache = []string{"wte.weight"}, FrozenCache{graph.Host, 1 << 20} },
		"Config.Collectives ring":     func(c *Config) { c.Collectives = "ring" },
		"Config.RankShares":           func(c *Config) { c.Reproducible, c.RankShares = true, []int{1, 2} },
		"Config.BatchSchedule":        func(c *Config) { c.BatchSchedule = BatchSchedule{{0, 8}, {2, 16}} },
		"Config.Receipt":              func(c *Config) { c.Receipt = "chain" },
		"Config.PipelineSchedule":     func(c *Config) { c.PipelineSchedule = "dapple" },
		"Config.Pipeline -1":          func(c *Config) { c.Pipeline = -1 },
		`Config.Stages "0-2,3-5,6-8"`: func(c *Config) { c.Stages = "0-2,3-5,6-8" },
		`Config.Stages "1-2,3-5"`:     func(c *Config) { c.Stages = "1-2,3-5" },
		`Config.Stages "0-2,4-5"`:     func(c *Config) { c.Stages = "0-2,4-5" },
		`Config.Stages "0-2,"`:        func(c *Config) { c.Stages = "0-2," },
		`Config.Stages "0-11"`:        func(c *Config) { c.Stages, c.Pipeline = "0-11", 1 },
	} {
		c := Default()
		c.Model, c.Ranks, c.Pipeline, c.Zero = "gpt2", 4, 2, 1
		require.NoError(t, c.Validate())
		change(&c)
		err := c.Validate()
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "Config.Pipeline")
	}
	c := Default()
	c.Model, c.Device, c.Pipeline, c.Zero = "gpt2", "cuda", 2, 0
	require.NoError(t, c.Validate(), "it can be planned")
	require.ErrorContains(t, c.Runnable(), "Config.Pipeline with Config.Device cuda")
}

func TestStages(t *testing.T) {
	c := Default()
	c.Ranks, c.Tensor, c.Pipeline, c.Stages = 24, 2, 3, "0-5, 6,7-11"
	first, layers, err := c.FirstLayers()
	require.NoError(t, err)
	require.Equal(t, []int{0, 6, 7}, first)
	require.Equal(t, 12, layers)
	require.Equal(t, 4, c.DataRanks())
}
