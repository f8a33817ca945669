package spillway

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/internal/hfmodel"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// build validates cfg, fills in what depends on the model, and plans.
func build(cfg *Config) (*plan.Plan, hfconfig.Config, error) {
	var none hfconfig.Config
	if err := cfg.Validate(); err != nil {
		return nil, none, err
	}
	h, err := modelConfig(cfg.Model)
	if err != nil {
		return nil, none, err
	}
	if cfg.Seq == 0 {
		cfg.Seq = min(256, h.Positions)
	}
	if cfg.Seq > h.Positions {
		return nil, none, fmt.Errorf("--seq %d is over the model's %d positions", cfg.Seq, h.Positions)
	}
	m, err := hfmodel.Config(h)
	if err != nil {
		return nil, none, fmt.Errorf("--model %s: %w", cfg.Model, err)
	}
	m.EmbdDropout, m.ResidDropout = cfg.Dropout, cfg.Dropout
	if m.Family == model.Llama && cfg.Dropout > 0 {
		return nil, none, fmt.Errorf("--dropout %g with a Llama: the architecture has no dropout; leave it out", cfg.Dropout)
	}
	var fwd plan.Forward
	if fwd.Train, err = model.Build(m, model.Train, cfg.Batch, cfg.Seq); err != nil {
		return nil, none, err
	}
	if cfg.EvalData != "" {
		if fwd.Eval, err = model.Build(m, model.Eval, cfg.Batch, cfg.Seq); err != nil {
			return nil, none, err
		}
	}
	if cfg.Generate {
		if fwd.Generate, err = model.Build(m, model.Generate, 1, cfg.Seq); err != nil {
			return nil, none, err
		}
	}
	again, err := recompute.Parse(cfg.Recompute)
	if err != nil {
		return nil, none, err
	}
	p, err := plan.Build(fwd, plan.Config{
		Ranks: cfg.Ranks, Stage: zero.Stage(cfg.Zero), Accum: cfg.Accum, Reproducible: cfg.Reproducible, Prefetch: cfg.Prefetch,
		Recompute: again, Freeze: cfg.Freeze, Optimizer: cfg.optimizer(), Clip: cfg.Clip, Target: graph.CPUTarget(),
		Capacity: [graph.NumSpaces]int64{graph.Device: cfg.DeviceMemory, graph.Host: cfg.HostMemory, graph.Disk: cfg.DiskMemory},
		Verify:   cfg.Poison,
	})
	return p, h, err
}

// fits returns nil if the plan is within its capacities, and otherwise the
// refusal with what would make it fit.
func fits(cfg Config, p *plan.Plan) error {
	err := p.Fit()
	if err == nil {
		return nil
	}
	ways, smallest := waysOut(cfg)
	if len(ways) == 0 {
		var refused *plan.DoesNotFit
		errors.As(err, &refused)
		return fmt.Errorf("%w; no stage, micro-batch or row length of this model on %d rank(s) fits: the smallest plan tried needs %s of %s memory",
			err, cfg.Ranks, plan.Bytes(smallest[refused.Space]), refused.Space)
	}
	return fmt.Errorf("%w; it fits with %s", err, strings.Join(ways, ", or with "))
}

// waysOut plans changes of the configuration, the cheapest in speed and the
// least intrusive first, and returns up to three that fit.
func waysOut(cfg Config) (ways []string, smallest [graph.NumSpaces]int64) {
	try := func(text string, change func(*Config)) {
		if len(ways) == 3 {
			return
		}
		c := cfg
		change(&c)
		p, _, err := build(&c)
		if err != nil {
			return
		}
		for sp, use := range p.Layout.Spaces {
			if smallest[sp] == 0 || use.Peak < smallest[sp] {
				smallest[sp] = use.Peak
			}
		}
		var refused *plan.DoesNotFit
		if !errors.As(p.Fit(), &refused) {
			ways = append(ways, text)
		}
	}
	for z := cfg.Zero + 1; z <= 3; z++ {
		try(fmt.Sprintf("--zero %d", z), func(c *Config) { c.Zero = z })
	}
	if cfg.Prefetch > 0 {
		try("--prefetch 0", func(c *Config) { c.Prefetch = 0 })
	}
	for batch, accum := cfg.Batch, cfg.Accum; batch > 1; {
		if batch%2 != 0 {
			batch, accum = 1, accum*batch
		} else {
			batch, accum = batch/2, accum*2
		}
		try(fmt.Sprintf("--batch %d --accum %d", batch, accum), func(c *Config) { c.Batch, c.Accum = batch, accum })
		try(fmt.Sprintf("--zero 3 --batch %d --accum %d", batch, accum), func(c *Config) { c.Zero, c.Batch, c.Accum = 3, batch, accum })
	}
	for ranks := cfg.Ranks * 2; ranks <= 64; ranks *= 2 {
		try(fmt.Sprintf("--zero 3 --ranks %d", ranks), func(c *Config) { c.Zero, c.Ranks = 3, ranks })
	}
	for seq := cfg.Seq / 2; seq >= 16; seq /= 2 {
		try(fmt.Sprintf("--zero 3 --batch 1 --prefetch 0 --seq %d", seq), func(c *Config) { c.Zero, c.Batch, c.Prefetch, c.Seq = 3, 1, 0, seq })
	}
	return ways, smallest
}
