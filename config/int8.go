package config

import (
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/zero"
)

// Int8Switches are the names that Config.Int8 may list.
var Int8Switches = []string{"optimizer", "gather", "reduce", "activations", "matmul"}

// In8Bits tells whether Config.Int8 lists a name.
func (c *Config) In8Bits(name string) bool {
	return slices.ContainsFunc(c.Int8, func(s string) bool { return strings.EqualFold(s, name) })
}

// validInt8 refuses unknown names, and combinations that are not possible.
func validInt8(c *Config) error {
	for _, s := range c.Int8 {
		if !slices.Contains(Int8Switches, strings.ToLower(s)) {
			return Refuse("Config.Int8 %.80q: use %s", s, strings.Join(Int8Switches, ", "))
		}
	}
	narrow := strings.Join(zero.NarrowNames(), " or ")
	switch {
	case c.In8Bits("optimizer") && !c.UpdateRule().Narrow():
		return Refuse("Config.Int8 optimizer with Config.Optimizer %.80s: only the moments of %s have an 8-bit form; leave it out, or give Config.Optimizer %s", c.UpdateRule().Name, narrow, narrow)
	case c.In8Bits("gather") && strings.EqualFold(c.PrecisionName(), "fp32"):
		return Refuse("Config.Int8 gather with Config.Precision fp32: what is gathered would be all there is of the parameters; give Config.Precision bf16 or fp16, which keep fp32 masters")
	case c.In8Bits("matmul") && strings.EqualFold(c.PrecisionName(), "fp32"):
		return Refuse("Config.Int8 matmul with Config.Precision fp32: int8 products stand for 16-bit ones; give Config.Precision bf16 or fp16")
	}
	return nil
}

// BF16States tells whether the optimizer stores its moments and parameters in bf16, without
// fp32 masters.
func (c *Config) BF16States() bool { return strings.EqualFold(c.OptimizerDType, "bf16") }

// validStates refuses unknown types of optimizer states, and combinations that are not
// possible.
func validStates(c *Config) error {
	bf16, narrow := c.BF16States(), strings.Join(zero.NarrowNames(), " or ")
	switch {
	case c.OptimizerDType != "" && !bf16 && !strings.EqualFold(c.OptimizerDType, "fp32"):
		return Refuse("Config.OptimizerDType %.80q: use fp32 or bf16", c.OptimizerDType)
	case bf16 && !c.UpdateRule().Narrow():
		return Refuse("Config.OptimizerDType bf16 with Config.Optimizer %.80s: only %s has that form; leave it out, or give Config.Optimizer %s", c.UpdateRule().Name, narrow, narrow)
	case c.StochasticRounding && !c.UpdateRule().Narrow():
		return Refuse("Config.StochasticRounding with Config.Optimizer %.80s: it is for Config.OptimizerDType bf16, which only %s has; leave it out, or give Config.Optimizer %s", c.UpdateRule().Name, narrow, narrow)
	case !bf16 && c.StochasticRounding:
		return Refuse("Config.StochasticRounding without Config.OptimizerDType bf16: fp32 states lose nothing that it would keep; give both or neither")
	case !bf16:
	case !c.StochasticRounding:
		return Refuse("Config.OptimizerDType bf16 without Config.StochasticRounding: rounded to nearest, updates below a parameter's last place are lost; give both")
	case !strings.EqualFold(c.PrecisionName(), "bf16"):
		return Refuse("Config.OptimizerDType bf16 with Config.Precision %.80s: parameters without a master rest in bf16; give Config.Precision bf16", c.PrecisionName())
	case c.In8Bits("optimizer"):
		return Refuse("Config.OptimizerDType bf16 with Config.Int8 optimizer: moments have 16 bits or 8; leave one of them out")
	case c.In8Bits("gather"):
		return Refuse("Config.OptimizerDType bf16 with Config.Int8 gather: what is gathered in 8 bits needs a master; leave one of them out")
	}
	return nil
}

// UpdateRule returns the update rule.
func (c *Config) UpdateRule() zero.Optimizer {
	name := strings.ToLower(c.Optimizer)
	if c.Own.Rule != nil {
		name = c.Own.Rule.Name
	}
	return zero.Optimizer{Name: name, Rule: c.Own.Rule, Beta1: c.Beta1, Beta2: c.Beta2, Eps: c.Eps, Decay: c.WeightDecay,
		Trust: c.Trust, AdaptAll: c.AdaptAll, Nesterov: c.Nesterov, LossScale: c.ScalePolicy(), Int8: c.In8Bits("optimizer"), BF16: c.BF16States()}
}
