package train

import (
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/zero"
)

// int8Switches are what Config.Int8 may list.
var int8Switches = []string{"optimizer", "gather", "reduce", "activations", "matmul"}

// int8 tells whether a switch of 8 bits is on.
func (c *Config) int8(name string) bool {
	return slices.ContainsFunc(c.Int8, func(s string) bool { return strings.EqualFold(s, name) })
}

// validInt8 refuses switches that are unknown, and what they can't be
// combined with.
func validInt8(c *Config) error {
	for _, s := range c.Int8 {
		if !slices.Contains(int8Switches, strings.ToLower(s)) {
			return refuse("Config.Int8 %.80q: use %s", s, strings.Join(int8Switches, ", "))
		}
	}
	switch {
	case c.int8("optimizer") && !c.optimizer().Narrow():
		return refuse("Config.Int8 optimizer with Config.Optimizer %.80s: only %s's moments have an 8-bit form", c.optimizer().Name, strings.Join(zero.NarrowNames(), "'s and "))
	case c.int8("gather") && strings.EqualFold(c.precision(), "fp32"):
		return refuse("Config.Int8 gather with Config.Precision fp32: what is gathered would be all there is of the parameters; give Config.Precision bf16 or fp16, which keep fp32 masters")
	case c.int8("matmul") && strings.EqualFold(c.precision(), "fp32"):
		return refuse("Config.Int8 matmul with Config.Precision fp32: int8 products stand for 16-bit ones; give Config.Precision bf16 or fp16")
	}
	return nil
}

// bf16States tells whether the optimizer keeps bf16 and no masters.
func (c *Config) bf16States() bool { return strings.EqualFold(c.OptimizerDType, "bf16") }

// validStates refuses types of states that are unknown, and what they can't be combined
// with.
func validStates(c *Config) error {
	bf16 := c.bf16States()
	switch {
	case c.OptimizerDType != "" && !bf16 && !strings.EqualFold(c.OptimizerDType, "fp32"):
		return refuse("Config.OptimizerDType %.80q: use fp32 or bf16", c.OptimizerDType)
	case !bf16 && c.StochasticRounding:
		return refuse("Config.StochasticRounding without Config.OptimizerDType bf16: fp32 states lose nothing that it would keep; give both or neither")
	case !bf16:
	case !c.StochasticRounding:
		return refuse("Config.OptimizerDType bf16 without Config.StochasticRounding: rounded to nearest, updates below a parameter's last place are lost; give both")
	case !c.optimizer().Narrow():
		return refuse("Config.OptimizerDType bf16 with Config.Optimizer %.80s: only %s has that form", c.optimizer().Name, strings.Join(zero.NarrowNames(), " and "))
	case !strings.EqualFold(c.precision(), "bf16"):
		return refuse("Config.OptimizerDType bf16 with Config.Precision %.80s: parameters without a master rest in bf16; give Config.Precision bf16", c.precision())
	case c.int8("optimizer"):
		return refuse("Config.OptimizerDType bf16 with Config.Int8 optimizer: moments have 16 bits or 8; leave one of them out")
	case c.int8("gather"):
		return refuse("Config.OptimizerDType bf16 with Config.Int8 gather: what is gathered in 8 bits needs a master; leave one of them out")
	}
	return nil
}
