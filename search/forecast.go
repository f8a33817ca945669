package search

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Chosen is what Spec.Auto came to.
type Chosen struct {
	Recompute recompute.Options
	Outcome   Outcome
	// Need is what a rank takes of device memory in bytes, and Capacity its cap, of
	// Nothing.
	Need, Capacity int64
	// Buffers of AllBuffers activations are computed again, Bytes of a micro-batch, and
	// the step takes so many times as long: of Some.
	Buffers, AllBuffers int
	Bytes               int64
	Slower              float64
}

// Outcome is how Spec.Auto ended.
type Outcome int

// Outcomes.
const (
	NoCap      Outcome = iota // nothing is computed again: device memory has no cap
	Nothing                   // nothing needs to be
	Some                      // some buffers are
	Everything                // with less it does not fit
	NotEnough                 // everything is, and that alone does not make it fit
)

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

// ops are the operations of a step's program, or those of one of its micro-batches; −1: of all.
func (f *Forecast) ops(micro int) (n int) {
	if sec := f.Plan.Program.SectionOf(graph.SectionStep, graph.FormWhole); sec != nil {
		for _, ph := range sec.Phases {
			for i := range ph.Ops {
				if micro < 0 || ph.Ops[i].Micro == micro {
					n++
				}
			}
		}
	}
	return n
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
