package fsdp

import (
	"fmt"
	"strconv"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Shard lays out a program for the ranks of one mesh axis. p has a section "train" (one phase:
// forward and backward of a micro-batch) and forward-only sections. The result has flat parameters
// and states, whole or in shards, and a graph.Gradient for each trained unit. Its sections are
// "init", "step" (its micro-steps) in every form that "train" has, the parts of "update", which a
// later pass places (zero.Optimizer.Section), and the forward-only sections. Later passes add the
// communication:
//
//	stage   after the last micro-step's backward of u      after the update of u
//	        (Accumulate, Reduce)                           (here; stage 3: Unshard)
//	0       all_reduce(grad/u)                             –
//	1       reduce_scatter(grad/u) in place                all_gather(value/u) in place
//	2       every micro-step: reduce_scatter → reduced/u   all_gather(value/u) in place
//	3       as 2                                           –; all_gather before each stretch
//
// With Reproducible, sums go leaf by leaf at every stage (way.go), and an evaluation has as many
// micro-batches as a step.
//
// Along a mesh's second axis ranks hold replicas (HSDP): the result of a shard group's reduction
// is all-reduced over that axis once a step. Gathers and norms use only the shard axis.
//
// A unit with less than 256 elements a rank stays whole: every rank stores and updates it as at
// stage 0, and it is never gathered. Its gradients are all-reduced as often as the stage reduces
// other units' gradients, in the same order of summation.
//
// With one rank nothing is sharded: every stage equals stage 0 without collectives along the shard
// axis.
//
// Parameters of 16 bits (package precision) get an f32 master in the shard. A section "refresh"
// recomputes them from the master after the host has written it.
func Shard(p *graph.Program, o Options) (*graph.Program, error) {
	if err := o.Validate(p); err != nil {
		return nil, err
	}
	if p.SectionOf(graph.SectionTrain, graph.FormWhole).Micro() == nil {
		return nil, fmt.Errorf("fsdp: the program has no section \"train\" of one phase")
	}
	ranks := p.Mesh[o.Axis].Size
	q, err := Flatten(splitRules(p, o.Optimizer), ranks, o.Int8Reduce || o.leaves(ranks))
	if err != nil {
		return nil, err
	}
	if ranks == 1 {
		o.Stage = zero.Replicate
	}
	s := &sharder{p: q, o: o, ranks: ranks, replicas: 1, replicate: -1, units: make([]unitBufs, len(q.Units)), squares: graph.NoBuf}
	if axis, _ := o.replicas(q); axis >= 0 {
		if s.replicas = q.Mesh[axis].Size; s.replicas > 1 {
			s.replicate = axis
		}
	}
	if o.Noise && o.leaves(ranks) {
		s.squares = q.AddBuffer(graph.Buffer{Name: "squares", DType: graph.I64, Shape: []int64{zero.ExactLimbs}, Class: graph.Workspace, Life: graph.LifeStep, Unit: -1})
	}
	if err := s.allocate(); err != nil {
		return nil, err
	}
	s.splitLoss()
	s.sections()
	return q, nil
}

// sections replaces the program's sections by those of a sharded run.
func (s *sharder) sections() {
	var sections []graph.Section
	for _, sec := range []graph.Section{s.initSection(), s.refreshSection()} {
		if len(sec.Phases[0].Ops) > 0 {
			sections = append(sections, sec)
		}
	}
	for i := range s.p.Sections {
		sec := &s.p.Sections[i]
		if sec.Kind == graph.SectionTrain {
			sections = append(sections, s.stepSections(sec)...)
			if sec.Form == graph.FormWhole {
				if update := s.updateSection(); len(update.Phases) > 0 {
					sections = append(sections, update)
				}
			}
			continue
		}
		sections = append(sections, s.forwardSection(sec))
	}
	s.p.Sections = sections
}

// stepSections expands a micro-batch into the sections of a step in the same form. Shapes that
// differ only in how often a phase repeats share one section.
func (s *sharder) stepSections(train *graph.Section) []graph.Section {
	own := graph.Program{Sections: []graph.Section{s.stepSection(train, graph.StepShape{Rounds: s.o.Accum, Shares: s.o.Shares})}}
	for _, shape := range s.o.Shapes {
		if sec, _ := own.StepOf(train.Form, shape); sec == nil {
			sec := s.stepSection(train, shape)
			sec.Name += "-" + strconv.Itoa(len(own.Sections)+1)
			own.Sections = append(own.Sections, sec)
		}
	}
	return own.Sections
}

// stepSection expands a micro-batch into the phases of a step of one shape.
func (s *sharder) stepSection(train *graph.Section, shape graph.StepShape) graph.Section {
	sec := graph.NewSection(graph.SectionStep, train.Form)
	sec.Shares = shape.Shares
	phase := func(name string, round, repeat int, first, last bool) {
		ph := graph.Phase{Name: name, Kind: graph.MicroPhase, First: first, Last: last, Repeat: repeat, Round: round, Ops: train.Phases[0].Ops}
		s.observeLoss(&ph, first, last)
		s.observeSquares(&ph, first, last)
		sec.Phases = append(sec.Phases, ph)
	}
	k := shape.Rounds
	if k == 1 || s.o.InLayers {
		phase("only", 0, 1, true, true)
		return sec
	}
	phase("first", 0, 1, true, false)
	for name, round := range runs(shape.Shares, "middle", 1, k-1) {
		phase(name, round.first, round.repeat, false, false)
	}
	phase("last", k-1, 1, false, true)
	return sec
}

// updateSection returns the update of all trained units as a section of parts, which the pass
// that decides where they run moves into the step. It is empty if nothing is trained.
func (s *sharder) updateSection() graph.Section {
	var targets []zero.Target
	for u := range s.p.Units {
		b := s.units[u]
		way := s.p.Units[u].Grad
		if way == nil {
			continue
		}
		t := zero.Target{Unit: u, Name: s.p.Units[u].Name, Shard: s.part(u, s.stage(u).ShardsStates()), Grad: way.Update, Value: b.valueShard, States: b.states, Scales: b.scales, Low: graph.NoBuf}
		if b.master != graph.NoBuf {
			t.Value, t.Low = b.master, b.valueShard
		}
		switch {
		case s.stage(u).ShardsParams():
		case s.o.Int8Gather:
			t.After = s.wholeAgain(u)
		case s.stage(u).ShardsStates():
			t.After = []graph.Op{newOp(graph.AllGather, t.Name+"/all_gather", graph.Comm, graph.Update, u,
				[]graph.BufID{b.valueShard}, []graph.Out{{Buf: b.value}}, s.group())}
		}
		targets = append(targets, t)
	}
	if len(targets) == 0 {
		return graph.Section{}
	}
	sec := s.o.Optimizer.Section(s.p, targets, s.o.Clip)
	ph := graph.Phase{Name: "out", Kind: graph.UpdateOut, Repeat: 1}
	w := graph.NewEditor(&ph)
	if host := s.p.Port(graph.PortGradNorm); host != graph.NoBuf {
		w.Append(graph.NewCopy("grad_norm/out", s.p.GradNorm, host, graph.CopyOut, graph.Update, -1))
	}
	s.observeScale(w)
	w.Commit()
	sec.Phases = append(sec.Phases, ph)
	return sec
}
