package exec

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// CUDA graphs. A device.Capturer can capture the kernels of a run of operations (graph.Runs) as
// one kernel, which costs the host a fraction of the separate launches. A step's phases are
// captured when they run for the second time, because the first run loads the kernels' code.
// Runs are on the compute stream and keep its order. Event waits and records stay outside the runs,
// so streams overlap as before. Copies, collectives and kernels on the host are still launched
// separately.

// launches returns the operations to enqueue for a phase.
func (e *Executor) launches(ph *phase) []operation {
	if !e.cfg.Graphs || !ph.captured.warm || ph.section.graph.Kind != graph.SectionStep {
		return ph.ops
	}
	if !ph.captured.done {
		ph.captured.done = true
		ops, err := e.capture(ph)
		if err != nil {
			e.cfg.Graphs = false
			if e.cfg.Warn != nil {
				e.cfg.Warn(fmt.Sprintf("the run goes on without CUDA graphs, an operation at a time: %v", err))
			}
			return ph.ops
		}
		ph.captured.ops = ops
	}
	return ph.captured.ops
}

// capture returns the phase's operations with each run captured as one kernel.
func (e *Executor) capture(ph *phase) ([]operation, error) {
	ops := slices.Clone(ph.ops)
	s, ok := e.streams[graph.Compute].(device.Capturer)
	if !ok {
		return ops, nil
	}
	captures := func(i int) bool {
		o := &ph.ops[i]
		return o.first || o.kernel != nil && s.Captures(o.kernel) && !slices.ContainsFunc(o.release, func(k device.Kernel) bool { return !s.Captures(k) })
	}
	var cuts []int
	if g := ph.section.gate; g.phase >= 0 && ph == &ph.section.phases[g.phase] {
		cuts = append(cuts, g.op)
		for _, h := range g.hoisted {
			cuts = append(cuts, h.at, h.at+1)
		}
	}
	for _, run := range graph.Runs(ph.graph.Ops, graph.Compute, graph.MinRun, captures, cuts) {
		var list []device.Kernel
		for _, i := range run {
			if ops[i].kernel != nil {
				list = append(append(list, ops[i].kernel), ops[i].release...)
			}
			ops[i].kernel, ops[i].release = nil, nil
		}
		last := &ops[run[len(run)-1]]
		k, err := s.Capture(fmt.Sprintf("%s … %s (%d operations in a CUDA graph)", ph.ops[run[0]].label(), last.op.Name, len(run)), list)
		if err != nil {
			return nil, err
		}
		last.kernel = k
	}
	return ops, nil
}
