package config

import (
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// EpilogueSet returns Config.Epilogues as a set; zero means the target's default. The names must
// have been validated.
func (c *Config) EpilogueSet() (set graph.Epilogues) {
	for _, name := range c.Epilogues {
		switch strings.ToLower(name) {
		case "default":
		case "none":
			set |= graph.NoEpilogues
		case "all":
			set |= graph.NoEpilogues | c.DeviceTarget().CUDA.Epilogues
		default:
			for _, e := range graph.EpilogueNames {
				if strings.EqualFold(name, e.Name) {
					set |= graph.NoEpilogues | e.Set
				}
			}
		}
	}
	return set
}

// EpiloguesChosen returns the names of the epilogues of the run's products if they differ from the
// device's default; otherwise "". They affect the bits of results.
func (c *Config) EpiloguesChosen() string {
	t := c.DeviceTarget()
	if !c.In16Bits() || c.In8Bits("matmul") || t.Epilogues(c.EpilogueSet()) == t.Epilogues(0) {
		return ""
	}
	return t.Epilogues(c.EpilogueSet()).String()
}

func (c *Config) In16Bits() bool { return !strings.EqualFold(c.PrecisionName(), "fp32") }

// validEpilogues refuses unknown names, and epilogues that no product of the run could have.
func validEpilogues(c *Config) error {
	alone := []string{"default", "none", "all"}
	known := slices.Clone(alone)
	for _, e := range graph.EpilogueNames {
		known = append(known, e.Name)
	}
	for _, name := range c.Epilogues {
		switch name = strings.ToLower(name); {
		case !slices.Contains(known, name):
			return Refuse("Config.Epilogues %.80q: use default, none, all, or some of %s", name, strings.Join(known[len(alone):], ", "))
		case len(c.Epilogues) > 1 && slices.Contains(alone, name):
			return Refuse("Config.Epilogues %s with other names: default, none and all must be the only name", name)
		}
	}
	set, t := c.EpilogueSet(), c.DeviceTarget()
	fp32 := func(p string) bool { return strings.EqualFold(p, "fp32") }
	switch {
	case set&^graph.NoEpilogues == 0 && !slices.ContainsFunc(c.Epilogues, func(s string) bool { return strings.EqualFold(s, "all") }):
	case t.CUDA.Epilogues == 0:
		return Refuse("Config.Epilogues %s with Config.Device %.80s: only a GPU's products have epilogues that are chosen; leave it out, or give Config.Device cuda", strings.Join(c.Epilogues, ","), c.Device)
	case !c.In16Bits(), slices.ContainsFunc(c.Allow, fp32):
		return Refuse("Config.Epilogues %s with Config.Precision fp32: only 16-bit products have epilogues that are chosen; give Config.Precision bf16 or fp16, or leave it out", strings.Join(c.Epilogues, ","))
	case c.In8Bits("matmul"):
		return Refuse("Config.Epilogues %s with Config.Int8 matmul: products of int8 have no epilogues; leave one of them out", strings.Join(c.Epilogues, ","))
	}
	return nil
}
