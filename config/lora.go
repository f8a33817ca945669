package config

import (
	"strings"

	"github.com/spillway-ml/spillway/fsdp"
)

// validLoRA refuses invalid adapters, and combinations that are not possible.
func validLoRA(c *Config) error {
	if !c.LoRA.Active() {
		return nil
	}
	if err := c.LoRA.Validate(); err != nil {
		return Refuse("Config.LoRA %s: %w", asGiven(c.LoRA.String()), err)
	}
	if len(c.Freeze) > 0 {
		return Refuse("Config.LoRA with Config.Freeze: the whole model is frozen beside its adapters; leave Config.Freeze out")
	}
	return nil
}

// validBase refuses unknown types of the frozen base, and combinations that are not possible.
func validBase(c *Config) error {
	if c.Base == "" {
		return nil
	}
	b, err := fsdp.ParseBase(c.Base)
	switch {
	case err != nil:
		return Refuse("Config.Base %w", err)
	case !c.LoRA.Active():
		return Refuse("Config.Base %s needs Config.LoRA: it is what the frozen parameters beside adapters rest in", b)
	case b == fsdp.BaseBF16 && strings.EqualFold(c.PrecisionName(), "fp16"):
		return Refuse("Config.Base bf16 with Config.Precision fp16: neither type holds the other's numbers; use Config.Base fp32 or int8, or Config.Precision bf16")
	}
	return nil
}

// BaseType returns Base as the type that the passes use. The value must have been validated.
func (c *Config) BaseType() fsdp.Base {
	b, _ := fsdp.ParseBase(c.Base)
	return b
}
