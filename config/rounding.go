package config

import (
	"slices"
	"strings"
)

var bf16Roundings = []string{"", "native", "portable"}

// PortableBF16 says whether sums of bf16 products round by the rule that is the same on every
// CPU.
func (c *Config) PortableBF16() bool { return strings.EqualFold(c.BF16Rounding, "portable") }

// validRounding refuses a rounding rule for products that the run doesn't have.
func validRounding(c *Config) error {
	bf16 := func(p string) bool { return strings.EqualFold(p, "bf16") }
	switch {
	case !c.PortableBF16():
	case !strings.EqualFold(c.Device, "cpu"):
		return Refuse("Config.BF16Rounding portable with Config.Device %.80s: it is a rule of the CPU's products; leave it out, or give Config.Device cpu", c.Device)
	case !bf16(c.PrecisionName()) && !slices.ContainsFunc(c.Allow, bf16):
		return Refuse("Config.BF16Rounding portable with Config.Precision %.80s: products of other types have the same bits on every CPU; leave it out, or give Config.Precision bf16", c.PrecisionName())
	}
	return nil
}
