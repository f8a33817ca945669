package train

import (
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// epilogues are Config.Epilogues as a set; zero: the target's default. Validate has
// refused what it does not know.
func (c *Config) epilogues() (set graph.Epilogues) {
	for _, name := range c.Epilogues {
		switch strings.ToLower(name) {
		case "default":
		case "none":
			set |= graph.NoEpilogues
		case "all":
			set |= graph.NoEpilogues | c.target().CUDA.Epilogues
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

// epiloguesChosen are the epilogues of the run's products where they are not its
// device's default, by name; "" where they are. They decide bits.
func (c *Config) epiloguesChosen() string {
	t := c.target()
	if !c.has16() || c.int8("matmul") || t.Epilogues(c.epilogues()) == t.Epilogues(0) {
		return ""
	}
	return t.Epilogues(c.epilogues()).String()
}

// Epilogues are what the plan's 16-bit products on a GPU do besides multiplying, by name,
// of what changes bits; "" where there are no such products.
func (f *Forecast) Epilogues() string {
	t := f.Config.target()
	if !f.Config.has16() || t.CUDA.Epilogues == 0 || f.Config.int8("matmul") {
		return ""
	}
	return t.Epilogues(f.Config.epilogues()).String()
}

// epilogueNotes say that the bits are those of a choice, and what was asked for by name that
// the model has no place for.
func (f *Forecast) epilogueNotes() (notes []string) {
	c := &f.Config
	if e := c.epiloguesChosen(); e != "" {
		notes = append(notes, "Config.Epilogues "+e+": the bits of this choice, the same at every stage, and not those of the default")
	}
	for _, e := range graph.EpilogueNames {
		asked := slices.ContainsFunc(c.Epilogues, func(s string) bool { return strings.EqualFold(s, e.Name) })
		if asked && f.Plan != nil && !f.Plan.Program.HasKind(e.Kind) {
			notes = append(notes, "Config.Epilogues "+e.Name+": no product of this run has it, and nothing changes by it")
		}
	}
	return notes
}

func (c *Config) has16() bool { return !strings.EqualFold(c.precision(), "fp32") }

// validEpilogues refuses names that are unknown, and epilogues that no product of the run
// would have.
func validEpilogues(c *Config) error {
	alone := []string{"default", "none", "all"}
	known := slices.Clone(alone)
	for _, e := range graph.EpilogueNames {
		known = append(known, e.Name)
	}
	for _, name := range c.Epilogues {
		switch name = strings.ToLower(name); {
		case !slices.Contains(known, name):
			return refuse("Config.Epilogues %.80q: use default, none, all, or some of %s", name, strings.Join(known[len(alone):], ", "))
		case len(c.Epilogues) > 1 && slices.Contains(alone, name):
			return refuse("Config.Epilogues %s beside others: it stands alone", name)
		}
	}
	set, t := c.epilogues(), c.target()
	fp32 := func(p string) bool { return strings.EqualFold(p, "fp32") }
	switch {
	case set&^graph.NoEpilogues == 0 && !slices.ContainsFunc(c.Epilogues, func(s string) bool { return strings.EqualFold(s, "all") }):
	case t.CUDA.Epilogues == 0:
		return refuse("Config.Epilogues %s with Config.Device %.80s: only a GPU's products have epilogues that are chosen; leave it out, or give Config.Device cuda", strings.Join(c.Epilogues, ","), c.Device)
	case !c.has16(), slices.ContainsFunc(c.Allow, fp32):
		return refuse("Config.Epilogues %s with Config.Precision fp32: only 16-bit products have epilogues that are chosen; give Config.Precision bf16 or fp16, or leave it out", strings.Join(c.Epilogues, ","))
	case c.int8("matmul"):
		return refuse("Config.Epilogues %s with Config.Int8 matmul: products of int8 have no epilogues; leave one of them out", strings.Join(c.Epilogues, ","))
	}
	return nil
}
