package train

import (
	"context"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/internal/hfmodel"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/search"
	"github.com/spillway-ml/spillway/zero"
)

// resolved is a configuration with what its model and folders say, read once: plans and
// searches over it open no file. It is never written again.
type resolved struct {
	cfg    Config // with Seq, and the tokenizer that text is read with, filled in
	model  hfconfig.Config
	shared *shared
}

// resolve validates a configuration and reads what it names.
func resolve(cfg Config) (*resolved, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	given := cfg.shared
	if cfg.shared == nil {
		cfg.shared = &shared{}
	}
	sh := cfg.shared
	h, err := cfg.modelShape()
	cfg.shared = given // what a run's plans share is not kept with its Config
	if err != nil {
		return nil, err
	}
	if cfg.Seq == 0 {
		cfg.Seq = min(256, h.Positions)
	}
	if cfg.Seq > h.Positions {
		return nil, refuse("Config.Seq %d is over the model's %d positions", cfg.Seq, h.Positions)
	}
	if cfg.Tokenizer == "" && cfg.readsText() {
		cfg.Tokenizer = modelTokenizer(&cfg, h.Vocab)
	}
	r := &resolved{cfg: cfg, model: h, shared: sh}
	return r, nil
}

// spec is the configuration as a search takes it, for a machine on which the time of a
// step is predicted; nil: none is.
func (r *resolved) spec(machine *cost.Machine) (search.Spec, error) {
	c := &r.cfg
	conf, err := r.passes(c)
	if err != nil {
		return search.Spec{}, err
	}
	s := search.Spec{
		Job: r, Plans: &r.shared.Shared,
		Ranks: c.Ranks, ShardSize: c.ShardSize, Stage: c.Zero, Batch: c.Batch, Seq: c.Seq, Accum: c.Accum, LayerOrder: c.asksLayers(), Prefetch: c.Prefetch,
		Precision: conf.Precision, Recompute: conf.Recompute, Auto: c.recomputeAuto(), Offload: conf.Offload, Disk: c.Disk != "",
		Capacity: conf.Capacity, Outside: conf.Outside, Layers: r.model.Layers, Frozen: len(c.Freeze) > 0,
	}
	s.Offload.Chunk = 0
	// What auto comes to on a CPU must not depend on what was measured of this one.
	if machine != nil && machine.Cores > 0 {
		s.AutoOn = search.CPUHardware(c.threads()).Machine
	}
	return s, nil
}

// At is what package plan takes for micro-batches of a shape.
func (r *resolved) At(sh search.Shape) (at plan.Spec, err error) {
	c := r.cfg
	c.Batch, c.Seq = sh.Batch, sh.Seq
	if !strings.EqualFold(c.precision(), sh.Precision.String()) {
		c.Precision = sh.Precision.String()
		if err := c.Validate(); err != nil {
			return at, err
		}
	}
	if at.Forward, err = r.forward(&c, sh.Layers); err != nil {
		return at, err
	}
	at.Config, err = r.passes(&c)
	return at, err
}

// Outside is what a rank's process needs outside the arenas of a plan.
func (r *resolved) Outside(p *plan.Plan) [graph.NumSpaces]int64 {
	c := r.cfg
	c.Ranks = p.Config.Ranks
	return c.outside(p)
}

// forward builds the programs of a configuration, of so many layers where they are not
// 0.
func (r *resolved) forward(c *Config, layers int) (fwd plan.Forward, err error) {
	if c.Own.Model != nil {
		own := *c
		own.shared = r.shared
		return ownForward(&own)
	}
	h := r.model
	if layers > 0 {
		h.Layers = layers
	}
	m, err := hfmodel.Config(h)
	if err != nil {
		return fwd, fmt.Errorf("Config.Model %s: %w", c.Model, err)
	}
	m.EmbdDropout, m.ResidDropout = c.Dropout, c.Dropout
	if m.Family == model.Llama && c.Dropout > 0 {
		return fwd, refuse("Config.Dropout %g with a Llama: the architecture has no dropout; leave it out", c.Dropout)
	}
	if fwd.Train, err = r.shared.model(m, model.Train, c.Batch, c.Seq); err != nil {
		return fwd, err
	}
	if c.evaluates() {
		if fwd.Eval, err = r.shared.model(m, model.Eval, c.Batch, c.Seq); err != nil {
			return fwd, err
		}
	}
	if c.Generate {
		err = r.shared.generation(&fwd, m, c)
	}
	return fwd, err
}

// passes is what the passes take of a configuration beside the programs.
func (r *resolved) passes(cfg *Config) (conf plan.Config, err error) {
	var again recompute.Options
	if !cfg.recomputeAuto() {
		if again, err = recompute.Parse(cfg.Recompute); err != nil {
			return conf, err
		}
	}
	if !again.Active() {
		again = recompute.Options{}
	}
	away, err := offload.Parse(cfg.Offload)
	if err != nil {
		return conf, err
	}
	away.Chunk = cfg.offloadChunk
	prec, err := precision.Parse(cfg.precision())
	if err != nil {
		return conf, err
	}
	freeze := cfg.Freeze
	if cfg.Inference {
		freeze = []string{"*"}
	}
	outside := cfg.Outside
	if cfg.FrozenCache.Bytes > 0 {
		outside[cfg.FrozenCache.Tier] += cfg.FrozenCache.Bytes
	}
	return plan.Config{
		Ranks: cfg.Ranks, Stage: zero.Stage(cfg.Zero), Accum: cfg.Accum, LayerOrder: cfg.inLayers(), Reproducible: cfg.Reproducible, Prefetch: cfg.Prefetch,
		Recompute: again, Offload: away, Freeze: freeze, Optimizer: cfg.optimizer(), Clip: cfg.Clip, Target: cfg.target(),
		Capacity:      [graph.NumSpaces]int64{graph.Device: cfg.DeviceMemory, graph.Host: cfg.HostMemory, graph.Disk: cfg.DiskMemory},
		SkipNonFinite: cfg.skipsNonFinite(),
		Precision:     prec, Reduce32: cfg.reduce32(), ShardSize: cfg.ShardSize,
		Int8Gather: cfg.int8("gather"), Int8Reduce: cfg.int8("reduce"),
		Int8:        precision.Int8{Activations: cfg.int8("activations"), Matmul: cfg.int8("matmul")},
		CachePrefix: cfg.FrozenCache.Bytes > 0, Rows: int64(cfg.Batch),
		Outside: outside,
		Verify:  cfg.Poison,
	}, nil
}

// build validates cfg, fills in what depends on the model, and plans. chosen is what
// was computed again for "auto"; nil: it was not asked for.
func build(ctx context.Context, cfg *Config) (p *plan.Plan, h hfconfig.Config, chosen *search.Chosen, err error) {
	r, s, chosen, err := settled(ctx, cfg)
	if err != nil {
		return nil, h, nil, err
	}
	if p, err = search.Plan(s); err == nil {
		err = cfg.stage(p)
	}
	return p, r.model, chosen, err
}

// settled resolves cfg, with what is to be computed again chosen, and fills in what it
// comes to.
func settled(ctx context.Context, cfg *Config) (r *resolved, s search.Spec, chosen *search.Chosen, err error) {
	if r, err = resolve(*cfg); err != nil {
		return nil, s, nil, err
	}
	if s, err = r.spec(nil); err != nil {
		return nil, s, nil, err
	}
	*cfg = r.cfg
	if s.Auto {
		if chosen, err = search.Choose(ctx, s, plannedHardware(cfg).Machine(cfg.Ranks)); err != nil {
			return nil, s, nil, err
		}
		s.Recompute, s.Auto = chosen.Recompute, false
		cfg.Recompute = chosen.Recompute.String()
	}
	return r, s, chosen, nil
}

// generation adds the programs of generation. Keys and values are kept where
// there are kernels for it: on the CPU in fp32. Elsewhere each token is a forward
// over all.
func (sh *shared) generation(fwd *plan.Forward, m model.Config, cfg *Config) (err error) {
	kind := model.Generate
	if !cfg.wholeGeneration && strings.EqualFold(cfg.precision(), "fp32") && cfg.target().Name == graph.CPUTarget().Name {
		kind = model.Prompt
		if fwd.Next, err = sh.model(m, model.Next, 1, cfg.Seq); err != nil {
			return err
		}
	}
	fwd.Generate, err = sh.model(m, kind, 1, cfg.Seq)
	return err
}
