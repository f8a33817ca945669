package config

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/zero"
)

// TestBesideTensor checks that settings tensor parallelism does not support are rejected. The error
// must name Config.Tensor and the other field.
func TestBesideTensor(t *testing.T) {
	for want, change := range map[string]func(c *Config){
		"Config.Inference":                           func(c *Config) { c.Inference = true },
		"Config.Generate":                            func(c *Config) { c.Generate = true },
		"Config.LoRA dropout":                        func(c *Config) { c.LoRA = lora.Options{Rank: 2, Alpha: 1, Dropout: 0.1} },
		"Config.Base int8":                           func(c *Config) { c.LoRA, c.Base = lora.Options{Rank: 2, Alpha: 1}, "int8" },
		"Config.Int8":                                func(c *Config) { c.Int8 = []string{"optimizer"} },
		"Config.OptimizerDType bf16":                 func(c *Config) { c.Precision, c.OptimizerDType, c.StochasticRounding = "bf16", "bf16", true },
		"Config.Optimizer muon":                      func(c *Config) { c.Optimizer = "muon" },
		"Config.Optimizer lamb":                      func(c *Config) { c.Optimizer = "lamb" },
		"Config.Optimizer lars":                      func(c *Config) { c.Optimizer = "lars" },
		"Config.Optimizer larc":                      func(c *Config) { c.Optimizer = "larc" },
		"Config.Optimizer novograd":                  func(c *Config) { c.Optimizer = "novograd" },
		"Config.Own.Rule":                            func(c *Config) { c.Own.Rule = &zero.Rule{Name: "own", Emit: func(*zero.Emitter, *zero.Target) {}} },
		"Config.FrozenCache":                         func(c *Config) { c.Freeze, c.FrozenCache = []string{"wte.weight"}, FrozenCache{graph.Host, 1 << 20} },
		"Config.Collectives ring":                    func(c *Config) { c.Collectives = "ring" },
		"Config.RankShares":                          func(c *Config) { c.Reproducible, c.RankShares = true, []int{1, 2, 1, 1, 2, 1, 1, 1} },
		"Config.Precision bf16 with Config.Tensor":   func(c *Config) { c.Precision, c.TensorSlices = "bf16", 8 },
		"Config.Precision fp16 with Config.Tensor":   func(c *Config) { c.Precision, c.TensorSlices = "fp16", 8 },
		"Config.TensorSlices 6 with Config.Tensor 4": func(c *Config) { c.TensorSlices = 6 },
		"Config.Tensor 6":                            func(c *Config) { c.Tensor = 6 },
		"Config.TensorSlices -1":                     func(c *Config) { c.TensorSlices = -1 },
		"Config.Tensor -1":                           func(c *Config) { c.Tensor = -1 },
	} {
		c := Default()
		c.Model, c.Ranks, c.Tensor = "gpt2", 8, 4
		require.NoError(t, c.Validate())
		change(&c)
		err := c.Validate()
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "Config.Tensor")
	}
}

// TestWithTensor checks that tensor parallelism accepts the elementwise optimizers, 16-bit types,
// replicas and adapters.
func TestWithTensor(t *testing.T) {
	for _, name := range []string{"adamw", "sgd", "adagrad"} {
		for _, precision := range []string{"fp32", "bf16", "fp16"} {
			c := Default()
			c.Model, c.Ranks, c.Tensor, c.Optimizer, c.Precision = "gpt2", 8, 2, name, precision
			c.ShardSize, c.LoRA = 2, lora.Options{Rank: 2, Alpha: 1}
			require.NoError(t, c.Validate())
			require.Equal(t, 2, c.Slices())
			require.Equal(t, 4, c.DataRanks())
		}
	}
	c := Default()
	c.Model, c.Device, c.Tensor = "gpt2", "cuda", 2
	require.NoError(t, c.Validate(), "it can be planned")
	require.ErrorContains(t, c.Runnable(), "Config.Tensor with Config.Device cuda")
}
