package train

import (
	"context"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
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

// spec is the configuration as a search takes it, for a machine on which the time of a
// step is predicted; nil: none is.
func (p planner) spec(machine *cost.Machine) (search.Spec, error) {
	c := &p.Config
	conf, err := p.passes()
	if err != nil {
		return search.Spec{}, err
	}
	s := search.Spec{
		Job: p, Plans: &p.shared.Shared,
		Ranks: c.Ranks, ShardSize: c.ShardSize, Stage: c.Zero, Batch: c.Batch, Seq: c.Seq, Accum: c.Accum, LayerOrder: c.asksLayers(), Prefetch: c.Prefetch,
		Precision: conf.Precision, Recompute: conf.Recompute, Auto: c.recomputeAuto(), Offload: conf.Offload, Disk: c.Disk != "",
		Capacity: conf.Capacity, Outside: conf.Outside, Layers: p.model.Layers, Frozen: len(c.Freeze) > 0,
	}
	s.Offload.Chunk = 0
	// What auto comes to on a CPU must not depend on what was measured of this one.
	if machine != nil && machine.Cores > 0 {
		s.AutoOn = search.CPUHardware(c.threads()).Machine
	}
	return s, nil
}

// At is what package plan takes for micro-batches of a shape.
func (p planner) At(sh search.Shape) (at plan.Spec, err error) {
	q := p.request
	q.Batch, q.Seq = sh.Batch, sh.Seq
	if !strings.EqualFold(q.precision(), sh.Precision.String()) {
		q.Precision = sh.Precision.String()
		if err := q.Validate(); err != nil {
			return at, err
		}
	}
	if at.Forward, err = p.forward(&q, sh.Layers); err != nil {
		return at, err
	}
	at.Config, err = q.passes()
	return at, err
}

// Outside is what a rank's process needs outside the arenas of a plan.
func (p planner) Outside(of *plan.Plan) [graph.NumSpaces]int64 {
	c := p.Config
	c.Ranks = of.Config.Ranks
	return c.outside(of)
}

// forward builds the programs of a request, of so many layers where they are not 0.
func (p planner) forward(c *request, layers int) (fwd plan.Forward, err error) {
	if c.Own.Model != nil {
		return ownForward(&c.Config, p.shared)
	}
	h := p.model
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
	if fwd.Train, err = p.shared.model(m, model.Train, c.Batch, c.Seq); err != nil {
		return fwd, err
	}
	if c.evaluates() {
		if fwd.Eval, err = p.shared.model(m, model.Eval, c.Batch, c.Seq); err != nil {
			return fwd, err
		}
	}
	if c.Generate {
		err = p.shared.generation(&fwd, m, c)
	}
	return fwd, err
}

// passes is what the passes take of a request beside the programs.
func (cfg *request) passes() (conf plan.Config, err error) {
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
		Epilogues:   cfg.epilogues(),
		CachePrefix: cfg.FrozenCache.Bytes > 0, Rows: int64(cfg.Batch),
		Outside: outside,
		Verify:  cfg.poison,
	}, nil
}

// build resolves a request and plans it.
func (q request) build(ctx context.Context) (*plan.Plan, *resolved, error) {
	r, s, err := q.settle(ctx)
	if err != nil {
		return nil, nil, err
	}
	p, err := search.Plan(ctx, s)
	if err == nil {
		err = r.stage(p)
	}
	return p, r.resolved, err
}

// settle resolves a request, with what is to be computed again chosen.
func (q request) settle(ctx context.Context) (r planner, s search.Spec, err error) {
	if r, err = q.resolve(); err != nil {
		return r, s, err
	}
	if s, err = r.spec(nil); err != nil || !s.Auto {
		return r, s, err
	}
	chosen, err := search.Choose(ctx, s, plannedHardware(&r.Config).Machine(r.Ranks))
	if err != nil {
		return r, s, err
	}
	s.Recompute, s.Auto = chosen.Recompute, false
	return r.choosing(chosen), s, nil
}

// generation adds the programs of generation. Keys and values are kept where
// there are kernels for it: on the CPU in fp32. Elsewhere each token is a forward
// over all.
func (sh *shared) generation(fwd *plan.Forward, m model.Config, cfg *request) (err error) {
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
