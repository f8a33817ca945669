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

// Chosen describes the recomputation that Spec.Auto chose.
type Chosen struct {
	Recompute recompute.Options
	Outcome   Outcome
	// Need is the bytes of device memory that a rank needs, and Capacity its cap, if the Outcome is
	// Nothing.
	Need, Capacity int64
	// If the Outcome is Some, Buffers of AllBuffers activations are recomputed, Bytes of a
	// micro-batch. Slower is the time of the step divided by that without recomputation.
	Buffers, AllBuffers int
	Bytes               int64
	Slower              float64
}

// Outcome is the result of Spec.Auto.
type Outcome int

// Outcomes.
const (
	NoCap      Outcome = iota // nothing is recomputed: device memory has no cap
	Nothing                   // nothing needs to be recomputed
	Some                      // some buffers are recomputed
	Everything                // everything is recomputed: with less it does not fit
	NotEnough                 // everything is recomputed, and that alone does not make it fit
)

// Forecast is a plan with its predicted time.
type Forecast struct {
	Spec Spec // with the chosen Recompute
	Plan *plan.Plan
	Step *cost.Run // of section "step"; in a pipeline, of the stage that ends last
	// Stages are the runs of a pipeline's stages.
	Stages []*cost.Run
	// Chosen describes the choice of Spec.Auto; nil: it was not asked for.
	Chosen *Chosen

	on *cost.Machine // the machine for which Step was predicted
}

// Fits reports whether the plan is within its caps.
func (f *Forecast) Fits() bool { return f.Plan.Fit() == nil }

// TokensPerSecond returns the predicted speed of all ranks together.
func (f *Forecast) TokensPerSecond() float64 {
	s := &f.Spec
	rows := float64(s.dataRanks()) * float64(s.Batch) * float64(s.Accum)
	if s.Rows > 0 {
		rows = float64(s.Rows)
	}
	return rows * float64(s.Seq) / f.Step.Seconds
}

// Of predicts the time of a section of the plan. repeats is the number of repetitions of its
// repeating phase; 0: as planned (graph.Program.StepOf).
func (f *Forecast) Of(sec *graph.Section, repeats int) (*cost.Run, error) {
	return cost.Simulate(f.Plan.Program.Alone(sec, repeats), sec.Name, f.on)
}

// ops returns the number of operations of a step's program, or of one of its micro-batches; −1: of
// all.
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

// depth is the extent to which a configuration is planned.
type depth int

const (
	whole  depth = iota
	early        // as whole, but a *plan.DoesNotFit where the largest sum of live buffers is over a cap
	bounds       // lower bounds of the peaks alone, fit or not
)

// Predict plans a configuration and predicts the time of a step on a machine. A plan that does not
// fit is not an error. As in all searches, the error is ctx's once that is canceled.
func Predict(ctx context.Context, s Spec, m *cost.Machine) (*Forecast, error) {
	return predict(ctx, s, m, 0, whole)
}

// predict is Predict to a given depth, for a model with the given number of layers; 0: its own
// number.
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

// longest returns the run of the stage that ends last; of equal ones, the one that computes most.
func longest(runs []*cost.Run) *cost.Run {
	return slices.MaxFunc(runs, func(a, b *cost.Run) int {
		return cmp.Or(cmp.Compare(a.Seconds, b.Seconds), cmp.Compare(a.Busy[graph.Compute], b.Busy[graph.Compute]))
	})
}

// Plan plans a configuration whose Recompute is chosen.
func Plan(ctx context.Context, s Spec) (*plan.Plan, error) { return s.build(ctx, 0, whole) }

// Choose makes the choice of recomputation on a machine, if Spec.Auto asks for it.
func Choose(ctx context.Context, s Spec, m *cost.Machine) (*Chosen, error) {
	c, _, err := chooseRecompute(ctx, s, m)
	return c, err
}

// build plans a configuration to a given depth, for a model with the given number of layers; 0: its
// own number.
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

// Passes returns the input of package plan for a configuration whose Recompute is chosen.
func (s *Spec) Passes() (plan.Spec, error) { return s.passes(0) }

// passes returns the input of package plan for a model with the given number of layers; 0: its own.
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
