// Package search looks for configurations: the fastest that fits the caps, what makes
// one fit that does not, and what is best computed again. It is pure: a Spec goes in,
// Specs with their plans and predicted times come out, and nothing is read or written.
// How choices are typed, and the sentences about them, are its callers'.
package search

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Shape is what the programs of a job depend on beside the job.
type Shape struct {
	Batch, Seq int // rows of a micro-batch of a rank, tokens of a row
	// Layers replaces the model's number of repeated blocks where it is not 0: searches
	// plan few of many that are alike.
	Layers    int
	Precision precision.Precision
}

// Job is what a search can't change. Its methods are called by several goroutines.
type Job interface {
	// At returns the forward programs of a shape, and what package plan takes beside
	// them; of that the search replaces what a Spec has of its own. The error is of a
	// shape that the job refuses.
	At(Shape) (plan.Spec, error)
	// Outside returns what a rank's process needs of each space outside its arenas, in
	// bytes, with what the plan was told of it.
	Outside(*plan.Plan) [graph.NumSpaces]int64
}

// Spec is a configuration: what a search may choose, and the job. A search changes
// copies of it.
type Spec struct {
	Job   Job
	Plans *plan.Shared // what plans have in common; nil: a search makes its own

	Ranks, ShardSize int
	Tensor           int           // neighbouring ranks that have the same data, as the Job plans them; 0: 1
	Pipeline         int           // stages of layers, as the Job plans them; 0: 1
	Schedule         mesh.Schedule // of the Pipeline, as the Job plans it
	Stage            int           // of ZeRO
	Batch, Seq       int           // as Shape's
	Accum            int
	// Shares are the micro-batches of each rank in a step; nil: Accum. Rows are those of a
	// step; 0: all that Accum, Batch and Ranks give.
	Shares []int
	Rows   int
	// Shapes are those that steps have, this one the first; nil: this one alone. What has
	// several keeps its ranks and its micro-batch.
	Shapes     []graph.StepShape
	LayerOrder bool // where there are several micro-batches
	Prefetch   int
	Precision  precision.Precision
	Recompute  recompute.Options
	Auto       bool // Recompute is to be chosen: as little as the cap on device memory asks for
	Offload    offload.Options
	// Disk says that there is a disk tier.
	Disk bool
	// Capacity caps each memory space of a rank in bytes, 0: no cap; Outside is what the
	// rank's device and caches take of each.
	Capacity, Outside [graph.NumSpaces]int64

	Layers int  // repeated blocks of the model; 0 or 1: none repeat
	Frozen bool // some parameters are not trained: layers differ
	// AutoOn is the machine by whose rates Auto chooses for so many ranks; nil: the
	// one that the time is predicted on.
	AutoOn   func(ranks int) *cost.Machine
	variant  *Variant // whose Job it is; nil: the job as asked for
	moreHost int64    // bytes a rank of a server with more memory; 0: as asked for
	// measurer has what configurations of the job came to, for the search that Auto asks for; nil: none.
	measurer *searcher
	// OrderChosen says that a search chose LayerOrder against what was asked for.
	OrderChosen bool
}

// dataRanks is the number of ranks with data of their own.
func (s *Spec) dataRanks() int { return s.Ranks / max(s.Tensor, 1) / max(s.Pipeline, 1) }

// highest is the highest stage of ZeRO: a pipeline shards neither parameters nor gradients.
func (s *Spec) highest() int {
	if s.Pipeline > 1 {
		return 1
	}
	return 3
}

// inLayers says whether each block runs all micro-batches before the next one.
func (s *Spec) inLayers() bool { return s.Accum > 1 && s.LayerOrder }

// Forecast is a plan with its predicted time.
type Forecast struct {
	Spec Spec // with Recompute as it was chosen
	Plan *plan.Plan
	Step *cost.Run // of section "step"; of a pipeline that of the stage that ends last
	// Stages are the runs of a pipeline's stages.
	Stages []*cost.Run
	// Chosen is what Spec.Auto came to; nil: it was not asked for.
	Chosen *Chosen

	on *cost.Machine // what Step was predicted on
}

// Fits says whether the plan is within its caps.
func (f *Forecast) Fits() bool { return f.Plan.Fit() == nil }

// TokensPerSecond is the predicted speed of all ranks together.
func (f *Forecast) TokensPerSecond() float64 {
	s := &f.Spec
	rows := float64(s.dataRanks()) * float64(s.Batch) * float64(s.Accum)
	if s.Rows > 0 {
		rows = float64(s.Rows)
	}
	return rows * float64(s.Seq) / f.Step.Seconds
}

// Of predicts the time of a section of the plan whose phase that repeats does so as often as
// given; 0: as planned (graph.Program.StepOf).
func (f *Forecast) Of(sec *graph.Section, repeats int) (*cost.Run, error) {
	return cost.Simulate(f.Plan.Program.Alone(sec, repeats), sec.Name, f.on)
}

// depth is how far a configuration is planned.
type depth int

const (
	whole  depth = iota
	early        // as whole, but a *plan.DoesNotFit where the largest sum of live buffers is over a cap
	bounds       // lower bounds of the peaks alone, fit or not
)

// Predict plans a configuration and predicts the time of a step on a machine. That the
// plan does not fit is no error here. The error is ctx's where that is canceled, as of
// all searches.
func Predict(ctx context.Context, s Spec, m *cost.Machine) (*Forecast, error) {
	return predict(ctx, s, m, 0, whole)
}

// predict is Predict of a model of so many layers, 0 for its own, to a depth.
func predict(ctx context.Context, s Spec, m *cost.Machine, layers int, to depth) (*Forecast, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var chosen *Chosen
	if s.Auto {
		rates := m
		if s.AutoOn != nil {
			rates = s.AutoOn(s.Ranks)
		}
		a, f, err := chooseRecompute(ctx, s, rates)
		if err != nil {
			return nil, err
		}
		if f != nil && rates == m {
			return f, nil
		}
		chosen, s.Recompute, s.Auto = a, a.Recompute, false
	}
	p, err := s.build(ctx, layers, to)
	if err != nil {
		return nil, err
	}
	runs, err := cost.SimulateStages(p.Programs(), "step", m)
	if err != nil {
		return nil, err
	}
	return &Forecast{Spec: s, Plan: p, Step: longest(runs), Stages: runs, Chosen: chosen, on: m}, nil
}

// longest is the run of the stage that ends last, of equal ones that which computes most.
func longest(runs []*cost.Run) *cost.Run {
	return slices.MaxFunc(runs, func(a, b *cost.Run) int {
		return cmp.Or(cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.Busy[graph.Compute], b.Busy[graph.Compute]))
	})
}

// Plan plans a configuration whose Recompute is chosen.
func Plan(ctx context.Context, s Spec) (*plan.Plan, error) { return s.build(ctx, 0, whole) }

// Choose finds what is best computed again where Spec.Auto asks for it, on a machine.
func Choose(ctx context.Context, s Spec, m *cost.Machine) (*Chosen, error) {
	c, _, err := chooseRecompute(ctx, s, m)
	return c, err
}

// build plans a configuration for a model of so many layers, 0 for its own, to a depth.
func (s *Spec) build(ctx context.Context, layers int, to depth) (*plan.Plan, error) {
	at, err := s.passes(layers)
	if err != nil {
		return nil, err
	}
	at.Early, at.BoundsOnly, at.Stop = to == early, to == bounds, ctx.Err
	p, err := s.Plans.Build(at.Forward, at.Config)
	if err != nil {
		return nil, err
	}
	p.Config.Outside = s.Job.Outside(p)
	return p, nil
}

// Passes is what package plan takes for a configuration whose Recompute is chosen.
func (s *Spec) Passes() (plan.Spec, error) { return s.passes(0) }

// passes is what package plan takes for a model of so many layers, 0 for its own.
func (s *Spec) passes(layers int) (plan.Spec, error) {
	if s.Auto {
		return plan.Spec{}, errors.New("search: recompute auto has not been resolved into a list of activations yet")
	}
	at, err := s.Job.At(Shape{s.Batch, s.Seq, layers, s.Precision})
	if err != nil {
		return at, err
	}
	c := &at.Config
	c.Shares, c.Shapes = s.Shares, s.Shapes
	c.Ranks, c.ShardSize, c.Accum, c.LayerOrder, c.Prefetch = s.Ranks, s.ShardSize, s.Accum, s.inLayers(), s.Prefetch
	c.Stage = zero.Stage(s.Stage)
	c.Precision, c.Capacity, c.Outside = s.Precision, s.Capacity, s.Outside
	chunk := c.Offload.Chunk
	c.Recompute, c.Offload = s.Recompute, s.Offload
	if c.Offload.Chunk = chunk; chunk == 0 && c.Offload.Active() {
		c.Offload.Chunk = plan.OffloadChunk(at.Forward.Train, at.Config)
	}
	return at, nil
}
