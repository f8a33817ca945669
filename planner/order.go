package planner

import (
	"context"
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// OrderCost is the cost of Config.Reproducible, compared with the same run without it.
type OrderCost struct {
	Leaves       int                    // micro-batches of a step
	Sums         int64                  // bytes per rank of the f32 sums and, if each rank has all, of their copy
	Peak         [graph.NumSpaces]int64 // bytes per rank, with minus without; may be negative
	Sent, Before int64                  // bytes per rank and step, with and without
	Seconds      float64                // predicted for a step, with minus without
	Staging      int64                  // bytes per CPU rank, outside the arena, that receive leaves over MPI
}

// OrderCost compares the forecast with a plan of the same run without Config.Reproducible; nil if
// it is off. machine must be that of the forecast.
func (f *Forecast) OrderCost(ctx context.Context, machine *cost.Machine) (*OrderCost, error) {
	c := f.Config
	if !c.Reproducible {
		return nil, nil
	}
	c.Reproducible = false
	c.GlobalBatch, c.BatchSchedule, c.RankShares = 0, nil, nil // each rank has as many micro-batches as the busiest
	other, err := Request{Config: c, Opened: f.of.Opened}.Predict(ctx, machine)
	if err != nil {
		return nil, fmt.Errorf("without Config.Reproducible: %w", err)
	}
	p := f.Plan.Largest(graph.Device).Program
	o := &OrderCost{Leaves: f.Config.Leaves(), Sent: f.Plan.CommBytes, Before: other.Plan.CommBytes,
		Seconds: f.Step.Seconds - other.Step.Seconds}
	if machine.Cores > 0 && !c.In8Bits("reduce") { // quantised leaves have a buffer in the arena
		o.Staging = stagingBytes(p)
	}
	for sp := range o.Peak {
		o.Peak[sp] = f.Plan.Layout.Spaces[sp].Peak - other.Plan.Layout.Spaces[sp].Peak
	}
	for u := range p.Units {
		if g := p.Units[u].Grad; g != nil && g.Leaves() {
			o.Sums += p.Buf(g.Home).Bytes()
			if g.Update != g.Home {
				o.Sums += p.Buf(g.Update).Bytes()
			}
		}
	}
	return o, nil
}

// String describes the cost in one sentence.
func (o *OrderCost) String() string {
	if o.Leaves == 1 {
		return "Config.Reproducible: a step is one micro-batch, so nothing is added and nothing costs more"
	}
	text := fmt.Sprintf("Config.Reproducible: gradients are summed over the step's %d micro-batches from left to right, the same bits at every number of ranks, in %s of fp32 sums; beside the run without: %s", o.Leaves, plan.Bytes(o.Sums), difference(o.Peak[graph.Device]))
	if n := o.Peak[graph.Host]; n != 0 {
		text += " and " + difference(n) + " of host"
	}
	text += fmt.Sprintf(" at the peak, %s sent a step for %s, about %+.3g s a step", plan.Bytes(o.Sent), plan.Bytes(o.Before), o.Seconds)
	if o.Staging > 0 {
		text += fmt.Sprintf("; leaves are added where they lie, over MPI out of %s of host memory", plan.Bytes(o.Staging))
	}
	return text
}

func difference(n int64) string {
	if n < 0 {
		return "−" + plan.Bytes(-n)
	}
	return "+" + plan.Bytes(n)
}
