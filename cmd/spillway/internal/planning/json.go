package planning

import (
	"cmp"
	"strings"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// why returns the explanation of a plan.
func why(f *planner.Forecast) planWhy {
	e := planner.Explain(f)
	w := planWhy{Recompute: cmp.Or(f.Config.Recompute, "none"), Auto: cli.Flagged(f.Auto), Offload: f.Config.Offload,
		Recomputed: append([]planner.BufferGroup{}, e.Recomputed...), RecomputeSeconds: e.RecomputeSeconds,
		Parked: []planParked{}, Placed: []planPlaced{}, Notes: cli.Reasons(f)}
	for _, g := range e.Parked {
		w.Parked = append(w.Parked, planParked{g, g.Space.String()})
	}
	for _, p := range e.Placed {
		w.Placed = append(w.Placed, planPlaced{p.Class.String(), p.Space.String(), p.Units, p.Of, p.Bytes})
	}
	return w
}

// doc returns the report as a document.
func (r *planReport) doc() Doc {
	f, asked, best := r.flags, r.asked, r.best
	c := asked.Config
	doc := Doc{Version: Version, Command: f.question(), Model: planModel{c.Model, asked.Parameters()},
		Nodes: f.servers(&c), Ranks: c.Ranks, Batch: c.Batch, Accum: c.Accum, Seq: c.Seq,
		Precision: strings.ToLower(c.PrecisionName()), Requested: f.stageJSON(asked),
		Ways: []planWay{}, Changing: []planWay{}, Machine: f.machine, Effort: f.effort, Answer: f.answer}
	if f.gpuFound != nil {
		doc.GPU = f.gpuFound.Name
	}
	for _, s := range r.stages {
		doc.Stages = append(doc.Stages, f.stageJSON(s))
	}
	doc.Pipeline = r.pipeline()
	n := f.ranksAServer(&c)
	doc.Server = Server{Ranks: n, HostBytes: f.onServer(asked, graph.Host), Memory: f.nodeMemory}
	if f.server != nil {
		doc.Server.Memory, doc.Server.Source = n*f.server.Memory, f.server.Source
	}
	doc.Explanation, doc.Epilogues = why(asked), asked.Epilogues()
	answered := asked
	if a, _ := r.answer(); a != nil {
		answered = a.plan
		notes := cli.Reasons(a.plan)
		if best != nil && a.plan == best.Forecast {
			notes = cli.FlaggedAll(best.Reasons)
		}
		alters := a.way != nil && a.way.Cost == otherNumbers || a.plan.Config.PrecisionName() != c.PrecisionName()
		doc.Recommended = &planRecommended{planner.Shell(a.changes), alters, notes, f.stageJSON(a.plan)}
		doc.Run, _ = f.command(&a.plan.Config, a.changes)
	}
	if t := f.timeRange(answered); t != nil {
		doc.Time = &Time{t.Low, t.High, t.Rows, t.Text(), f.stack, t.Middle}
	}
	doc.Budget, doc.TokensPerSecond, doc.ProcessBytes = f.budget(answered), f.speedJSON(answered), f.process(answered)
	if f.plans != nil {
		doc.Effort = f.plans.Total()
	}
	for _, list := range r.wayLists() {
		to := &doc.Ways
		if list.changes {
			to = &doc.Changing
		}
		for _, way := range list.ways {
			*to = append(*to, planWay{cli.FlagText(way.Changes), list.changes, way.Cost, way.Slowdown,
				cli.Flagged(way.Note),
				f.stageJSON(way.Forecast)})
		}
	}
	if r.noWay != nil {
		doc.NoWay = r.nothing()
	}
	return doc
}

func (f *Flags) speedJSON(p *planner.Forecast) Speed {
	s := Speed{Predicted: p.TokensPerSecond()}
	s.Low, s.High = s.Predicted, s.Predicted
	if t := f.timeRange(p); t != nil {
		s.Low, s.High = s.Predicted/t.High, s.Predicted/t.Low
		if t.Middle > 0 {
			s.Predicted /= t.Middle
		}
	}
	return s
}

func (f *Flags) stageJSON(p *planner.Forecast) planStage {
	var batches []planBatch
	for _, b := range p.StepTimes() {
		batches = append(batches, planBatch{b.Rows, b.Accum, b.Step.Seconds})
	}
	return planStage{Zero: p.Config.Zero, Batches: batches, Fits: p.Fits, CommBytesPerStep: p.Plan.CommBytes,
		StepSeconds: p.Step.Seconds, StagingBytes: p.Plan.Config.Staging,
		TokensPerSecond: f.speedJSON(p), ProcessBytes: f.process(p),
		Device: spaceJSON(p, graph.Device), Host: spaceJSON(p, graph.Host), Disk: spaceJSON(p, graph.Disk)}
}

func spaceJSON(f *planner.Forecast, s graph.Space) Space {
	use := &f.Plan.Layout.Spaces[s]
	v := Space{PeakBytes: use.Peak, PeakAt: use.PeakAt, OutsideBytes: f.Plan.Config.Outside[s],
		ByClass: map[string]int64{}, ClassPeakBytes: map[string]int64{}}
	if limit := f.Plan.Config.Capacity[s]; limit > 0 {
		v.CapacityBytes = &limit
	}
	for c := range graph.NumClasses {
		v.ByClass[c.String()], v.ClassPeakBytes[c.String()] = use.ByClass[c], use.ClassPeak[c]
	}
	return v
}
