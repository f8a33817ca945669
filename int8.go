package spillway

import (
	"fmt"
	"slices"
	"strings"
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
			return fmt.Errorf("--int8 %.80q: use %s", s, strings.Join(int8Switches, ", "))
		}
	}
	switch {
	case c.int8("optimizer") && !strings.EqualFold(c.Optimizer, "adamw"):
		return fmt.Errorf("--int8 optimizer with --optimizer %.80s: only adamw's moments have an 8-bit form", c.Optimizer)
	case c.int8("gather") && strings.EqualFold(c.precision(), "fp32"):
		return fmt.Errorf("--int8 gather with --precision fp32: what is gathered would be all there is of the parameters; give --precision bf16 or fp16, which keep fp32 masters")
	case c.int8("matmul") && strings.EqualFold(c.precision(), "fp32"):
		return fmt.Errorf("--int8 matmul with --precision fp32: int8 products stand for 16-bit ones; give --precision bf16 or fp16")
	case c.int8("reduce") && c.Reproducible:
		return fmt.Errorf("--int8 reduce with --reproducible: another number of ranks quantises other sums; leave one of them out")
	}
	return nil
}
