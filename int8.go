package spillway

import (
	"fmt"
	"slices"
	"strings"
)

// int8Switches are what Config.Int8 may list; those that are false are not built.
var int8Switches = map[string]bool{"optimizer": true, "gather": false, "reduce": false, "activations": false, "matmul": false}

// int8 tells whether a switch of 8 bits is on.
func (c *Config) int8(name string) bool {
	return slices.ContainsFunc(c.Int8, func(s string) bool { return strings.EqualFold(s, name) })
}

// validInt8 refuses switches that are unknown or not built, and what they can't be
// combined with.
func validInt8(c *Config) error {
	for _, s := range c.Int8 {
		built, known := int8Switches[strings.ToLower(s)]
		if !known {
			return fmt.Errorf("--int8 %.80q: use optimizer", s)
		}
		if !built {
			return fmt.Errorf("--int8 %s is not built yet; optimizer is", s)
		}
	}
	if !c.int8("optimizer") {
		return nil
	}
	if !strings.EqualFold(c.Optimizer, "adamw") {
		return fmt.Errorf("--int8 optimizer with --optimizer %.80s: only adamw's moments have an 8-bit form", c.Optimizer)
	}
	return nil
}
