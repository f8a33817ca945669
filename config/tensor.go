package config

import (
	"strings"

	"github.com/spillway-ml/spillway/comm/algorithm"
	"github.com/spillway-ml/spillway/zero"
)

// DataRanks returns the number of ranks with different data. The Tensor ranks that share the
// computation of layers have the same data, and so have the stages of a pipeline. It is 1 if Ranks
// is not known yet.
func (c *Config) DataRanks() int { return max(c.Ranks/max(c.Tensor, 1)/max(c.Pipeline, 1), 1) }

// Slices returns the number of slices into which layers are cut; 0: layers are not cut.
func (c *Config) Slices() int {
	n := c.TensorSlices
	if n == 0 {
		n = c.Tensor
	}
	if n < 2 {
		return 0
	}
	return n
}

// slicedBy returns the name of the field that cuts layers.
func (c *Config) slicedBy() string {
	if c.Tensor < 2 {
		return "TensorSlices"
	}
	return "Tensor"
}

// validTensor checks the numbers of ranks and slices of tensor parallelism, and refuses fields that
// it does not support.
func validTensor(c *Config) error {
	slices, ranks := c.Slices(), max(c.Tensor, 1)
	switch {
	case c.Tensor < 0 || int64(c.Tensor) > largest["Ranks"]:
		return Refuse("Config.Tensor %d: 1 to %d ranks are possible", c.Tensor, largest["Ranks"])
	case c.TensorSlices < 0 || c.TensorSlices > mostSlices:
		return Refuse("Config.TensorSlices %d: 1 to %d slices are possible", c.TensorSlices, mostSlices)
	case slices == 0 && c.TensorSlices == 1 && ranks > 1, slices%ranks != 0:
		return Refuse("Config.TensorSlices %d with Config.Tensor %d: each rank has as many slices; give a multiple of %d", c.TensorSlices, ranks, ranks)
	case slices == 0:
		return nil
	case slices > mostSlices || slices&(slices-1) != 0:
		what := "TensorSlices"
		if c.TensorSlices == 0 {
			what = "Tensor"
		}
		return Refuse("Config.%s %d: the parts of a layer are added in a binary tree; give a power of two up to %d", what, slices, mostSlices)
	}
	for _, given := range besideTensor {
		if what := given(c); what != "" {
			return Refuse("Config.%s with Config.%s: not built; leave one of them out", what, c.slicedBy())
		}
	}
	if slices > ranks && !strings.EqualFold(c.PrecisionName(), "fp32") {
		return Refuse("Config.Precision %s with Config.TensorSlices %d and Config.Tensor %d: "+
			"a rank's sum of several slices would be rounded once more; give Config.Tensor %d, as many as slices, or fp32",
			c.Precision, slices, ranks, slices)
	}
	return nil
}

// mostSlices bounds TensorSlices: every rank holds a row of statistics of each slice.
const mostSlices = 256

// besideTensor lists the fields that are refused with tensor parallelism. Each function returns the
// field's name, or "" if it is not set.
var besideTensor = []func(c *Config) string{
	whereGiven("Own.Model", func(c *Config) bool { return c.Own.Model != nil }),
	whereGiven("Own.Rule", func(c *Config) bool { return c.Own.Rule != nil }),
	whereGiven("Inference", func(c *Config) bool { return c.Inference }),
	whereGiven("Generate", func(c *Config) bool { return c.Generate }),
	whereGiven("LoRA dropout", func(c *Config) bool { return c.LoRA.Dropout > 0 }),           // its random numbers depend on complete rows
	whereGiven("Base int8", func(c *Config) bool { return c.BaseType().String() == "int8" }), // slices would split blocks of 256
	whereGiven("Int8", func(c *Config) bool { return len(c.Int8) > 0 }),
	whereGiven("OptimizerDType bf16", (*Config).BF16States),
	func(c *Config) string {
		o := c.UpdateRule()
		if _, perParam := o.StateNames(); len(perParam) > 0 || o.Splits() || o.Reads(zero.Trust) || o.Reads(zero.AdaptAll) {
			return "Optimizer " + o.Name // it needs complete matrices, or their norms
		}
		return ""
	},
	whereGiven("RankShares", func(c *Config) bool { return c.RankShares != nil }),
	whereGiven("FrozenCache", func(c *Config) bool { return c.FrozenCache.Bytes != 0 }),
	whereGiven("Collectives ring", func(c *Config) bool { return c.Algorithm() == algorithm.Ring }),
}

func whereGiven(field string, given func(c *Config) bool) func(c *Config) string {
	return func(c *Config) string {
		if given(c) {
			return field
		}
		return ""
	}
}
