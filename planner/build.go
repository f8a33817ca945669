package planner

import (
	"context"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/search"
	"github.com/spillway-ml/spillway/zero"
)

// spec returns the configuration in the form of package search. machine predicts the time of a
// step; nil: no time is predicted.
func (p planner) spec(machine *cost.Machine) (search.Spec, error) {
	c := &p.Config
	conf, err := p.passes()
	if err != nil {
		return search.Spec{}, err
	}
	if on := machine; c.Pipelined() {
		if on == nil {
			on = PlannedHardware(c).Machine(c.Ranks)
		}
		if on.Cores == 0 { // a GPU's rates are constants; a CPU's may have been measured
			p.dividing = on
		}
	}
	s := search.Spec{
		Job: p, Plans: &p.shared.Shared,
		Ranks: c.Ranks, ShardSize: c.ShardSize, Tensor: c.Tensor, Pipeline: c.Pipeline, Schedule: c.TurnsOfStages(), Stage: c.Zero,
		Batch: c.Batch, Seq: c.Seq, Accum: c.Accum, Shares: c.Shares(), Shapes: c.StepShapes(), SameRows: c.GlobalBatch > 0, LayerOrder: c.AsksLayers(), Prefetch: c.Prefetch,
		Precision: conf.Precision, Recompute: conf.Recompute, Auto: c.RecomputeAuto(), Offload: conf.Offload, Disk: c.Disk != "",
		Capacity: conf.Capacity, Outside: conf.Outside, Layers: p.Shape.Layers, Frozen: len(c.Freeze) > 0 || c.LoRA.Active(),
	}
	if rows := c.StepRows(); rows != c.DataRanks()*c.Accum*c.Batch {
		s.Rows = rows
	}
	s.Offload.Chunk = 0
	// The choice of auto on a CPU must not depend on the measured speed of this machine.
	if machine != nil && machine.Cores > 0 {
		s.AutoOn = search.CPUHardware(c.ComputeThreads()).Machine
	}
	return s, nil
}

// Spec returns a request in the form of package search: see planner.spec.
func (q Request) Spec(machine *cost.Machine) (search.Spec, error) {
	p, err := q.resolve()
	if err != nil {
		return search.Spec{}, err
	}
	return p.spec(machine)
}

// At returns the input of package plan for micro-batches of a shape.
func (p planner) At(sh search.Shape) (at plan.Spec, err error) {
	q := p.Request
	q.Batch, q.Seq = sh.Batch, sh.Seq
	q.GlobalBatch, q.BatchSchedule, q.RankShares = 0, nil, nil // the search decides the rows of each rank
	if !strings.EqualFold(q.PrecisionName(), sh.Precision.String()) {
		q.Precision = sh.Precision.String()
		if err := q.Validate(); err != nil {
			return at, err
		}
	}
	if at.Forward, err = p.forward(&q, sh.Layers); err != nil {
		return at, err
	}
	at.Config, err = q.passes()
	at.Config.Dividing = p.dividing
	return at, err
}

// Outside returns the bytes, by space, that a rank's process needs outside the arenas of a plan.
func (p planner) Outside(of *plan.Plan) [graph.NumSpaces]int64 {
	c := p.Config
	c.Ranks = of.Config.Ranks
	return outside(&c, of)
}

// forward builds the forward programs of a request. layers replaces the model's number of layers
// unless it is 0.
func (p planner) forward(c *Request, layers int) (fwd plan.Forward, err error) {
	if c.Own.Model != nil {
		return config.OwnForward(&c.Config, p.shared)
	}
	m := p.Shape
	if layers > 0 {
		m.Layers = layers
	}
	if _, n, _ := c.FirstLayers(); n > 0 && n != p.Shape.Layers {
		return fwd, config.Refuse("Config.Stages %.80q: it has layers 0 to %d, and the model has %d", c.Stages, n-1, p.Shape.Layers)
	}
	if err := m.Validate(); err != nil {
		return fwd, fmt.Errorf("Config.Model %s: %w", c.Model, err)
	}
	m.EmbdDropout, m.ResidDropout = c.Dropout, c.Dropout
	m.Documents = c.Packs()
	if !m.Arch().Dropout && c.Dropout > 0 {
		return fwd, config.Refuse("Config.Dropout %g with Config.Model %s: model_type %s has no dropout; leave it out", c.Dropout, c.Model, m.Family)
	}
	if fwd.Train, err = p.shared.Model(m, model.Train, c.Batch, c.Seq); err != nil {
		return fwd, err
	}
	if c.Evaluates() {
		if fwd.Eval, err = p.shared.Model(m, model.Eval, c.Batch, c.Seq); err != nil {
			return fwd, err
		}
	}
	if c.Generate {
		err = generationForward(p.shared, &fwd, m, c)
	}
	return fwd, err
}

// passes returns the configuration of the passes for a request.
func (cfg *Request) passes() (conf plan.Config, err error) {
	var again recompute.Options
	if !cfg.RecomputeAuto() {
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
	away.Chunk = cfg.OffloadChunk
	prec, err := precision.Parse(cfg.PrecisionName())
	if err != nil {
		return conf, err
	}
	stages, _, err := cfg.FirstLayers()
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
		Ranks: cfg.Ranks, Stage: zero.Stage(cfg.Zero), Accum: cfg.Accum, Shares: cfg.Shares(), Shapes: cfg.StepShapes(), LayerOrder: cfg.InLayers(), Reproducible: cfg.Reproducible, Prefetch: cfg.Prefetch, Serial: cfg.Serial(),
		Recompute: again, Offload: away, Freeze: freeze, LoRA: cfg.LoRA, Base: cfg.BaseType(), Optimizer: cfg.UpdateRule(), Clip: cfg.Clip, Target: cfg.DeviceTarget(),
		Capacity:      [graph.NumSpaces]int64{graph.Device: cfg.DeviceMemory, graph.Host: cfg.HostMemory, graph.Disk: cfg.DiskMemory},
		SkipNonFinite: cfg.SkipsNonFinite(), Noise: cfg.Reproducible && !cfg.Pipelined() && !cfg.Inference && !strings.EqualFold(cfg.Device, "cuda") && cfg.DeviceTarget().Name == graph.CPUTarget().Name,
		Precision: prec, Reduce32: cfg.Reduce32(), ShardSize: cfg.ShardSize, Tensor: cfg.Tensor, Slices: cfg.Slices(),
		Pipeline: cfg.Pipeline, Stages: stages, Schedule: cfg.TurnsOfStages(),
		Int8Gather: cfg.In8Bits("gather"), Int8Reduce: cfg.In8Bits("reduce"),
		Int8:        precision.Int8{Activations: cfg.In8Bits("activations"), Matmul: cfg.In8Bits("matmul")},
		Epilogues:   cfg.EpilogueSet(),
		CachePrefix: cfg.FrozenCache.Bytes > 0, Rows: int64(cfg.Batch),
		Outside: outside,
		Verify:  cfg.Verify,
	}, nil
}

// Build plans the run that cfg describes, without allocating any of it. If a capacity is too small,
// the error wraps a *plan.DoesNotFit.
func Build(ctx context.Context, cfg config.Config) (*plan.Plan, error) {
	return Request{Config: cfg}.Plan(ctx)
}

func (q Request) Plan(ctx context.Context) (*plan.Plan, error) {
	p, r, err := q.Build(ctx)
	if err != nil {
		return nil, err
	}
	return p, r.Fits(ctx, p, PlannedHardware(&r.Config))
}

// Build resolves a request and plans it.
func (q Request) Build(ctx context.Context) (*plan.Plan, *Resolved, error) {
	r, s, err := q.settle(ctx)
	if err != nil {
		return nil, nil, err
	}
	p, err := search.Plan(ctx, s)
	if err == nil {
		err = stage(&r.Config, p)
	}
	return p, r.Resolved, err
}

// settle resolves a request and makes the choice of recompute auto.
func (q Request) settle(ctx context.Context) (r planner, s search.Spec, err error) {
	if r, err = q.resolve(); err != nil {
		return r, s, err
	}
	if s, err = r.spec(nil); err != nil || !s.Auto {
		return r, s, err
	}
	chosen, err := search.Choose(ctx, s, PlannedHardware(&r.Config).Machine(r.Ranks))
	if err != nil {
		return r, s, err
	}
	s.Recompute, s.Auto = chosen.Recompute, false
	return r.choosing(chosen), s, nil
}

// generationForward adds the programs of generation, with Batch rows if the run does only
// inference, else with one. Only the CPU has kernels that cache keys and values. On GPUs each token
// is a forward of one row over all tokens.
func generationForward(sh *config.Shared, fwd *plan.Forward, m model.Config, cfg *Request) (err error) {
	rows := 1
	if cfg.Inference {
		rows = cfg.Batch
	}
	if cfg.WholeGeneration || cfg.DeviceTarget().Name != graph.CPUTarget().Name {
		fwd.Generate, err = sh.Model(m, model.Generate, 1, cfg.Seq)
		return err
	}
	if fwd.Generate, err = sh.Model(m, model.Prompt, rows, cfg.Seq); err == nil {
		fwd.Next, err = sh.Model(m, model.Next, rows, cfg.Seq)
	}
	return err
}
