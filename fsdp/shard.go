package fsdp

import (
	"fmt"
	"iter"
	"slices"
	"strconv"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Options of the sharding rewrite.
type Options struct {
	Stage        zero.Stage
	Axis         int               // mesh axis to shard over; along the other axis, if any, ranks hold replicas
	Accum        int               // rounds of micro-batches in a step, at least 1
	InLayers     bool              // layer order: one phase runs all micro-batches, and its backward accumulates their gradients
	Reproducible bool              // sums go leaf by leaf (graph.Gradient), so their bits do not depend on stage and number of ranks
	Shares       []int             // by rank: micro-batches in a step, at most Accum (Reproducible only); nil: Accum on every rank
	Shapes       []graph.StepShape // all shapes of steps, that of Accum and Shares first; nil: only that one
	Prefetch     int               // how many stretches of use ahead parameters are gathered; 0: none
	Optimizer    zero.Optimizer
	Clip         float64 // largest global gradient norm; 0: off
	Reduce32     bool    // gradients of 16-bit parameters are sent and stored in f32
	Noise        bool    // with sums leaf by leaf, the squares of the leaves are summed too
	Int8Gather   bool    // parameters with a master are gathered, and used, in quantised form
	Int8Reduce   bool    // gradients are sent quantised along the shard axis
	Base         Base    // type in which frozen units are stored
}

// validate returns an error for invalid options that package plan does not check.
func (o Options) validate(p *graph.Program) error {
	if err := o.validateShares(p); err != nil {
		return err
	}
	for _, shape := range o.Shapes {
		of := o
		of.Accum, of.Shares = shape.Rounds, shape.Shares
		if err := of.validateShares(p); err != nil {
			return err
		}
		if shape.Rounds < 1 || shape.Rounds > o.Accum || o.InLayers {
			return fmt.Errorf("fsdp: steps of %d rounds beside those of %d, in layer order: %v; want at least 1, no more than the first, and micro order", shape.Rounds, o.Accum, o.InLayers)
		}
	}
	return o.validateInt8(p)
}

// replicas returns the mesh axis along which ranks hold replicas; −1 for none.
func (o Options) replicas(p *graph.Program) int {
	for i, a := range p.Mesh {
		if i != o.Axis && a.Name != graph.TensorAxis && a.Name != graph.PipelineAxis {
			return i
		}
	}
	return -1
}

// validateShares returns an error if the shares do not fit the ranks and rounds.
func (o Options) validateShares(p *graph.Program) error {
	if o.Shares != nil && (len(o.Shares) != p.DataRanks() || slices.Min(o.Shares) < 1 || slices.Max(o.Shares) != o.Accum) {
		return fmt.Errorf("fsdp: shares %v of %d ranks and %d rounds: each rank needs a share of at least 1 micro-batch, and the largest share must be the number of rounds", o.Shares, p.DataRanks(), o.Accum)
	}
	return nil
}

// Shard lays out a program for the ranks of one mesh axis. p has a section "train" (one phase:
// forward and backward of a micro-batch) and forward-only sections. The result has flat parameters
// and states, complete or in shards, and a graph.Gradient for each trained unit. Its sections are
// "init", "step" (its micro-steps) in every form that "train" has, the parts of "update", and the
// forward-only sections. A later pass places the parts of "update" (zero.Optimizer.Section). Later
// passes add the communication:
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
	if err := o.validate(p); err != nil {
		return nil, err
	}
	ranks := p.Mesh[o.Axis].Size
	q := flatten(splitRules(p, o.Optimizer), ranks, o.Int8Reduce || o.leaves(ranks))
	if ranks == 1 {
		o.Stage = zero.Replicate
	}
	s := &sharder{p: q, o: o, ranks: ranks, replicas: 1, replicate: -1, units: make([]unitBufs, len(q.Units)), squares: graph.NoBuf}
	if axis := o.replicas(q); axis >= 0 {
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

type unitBufs struct {
	value      graph.BufID // the complete value, as in the package's note
	valueShard graph.BufID // the rank's own part of value
	master     graph.BufID // f32 parameters of that part, if value has 16 bits; else NoBuf
	states     []graph.BufID
	scales     []graph.BufID // by state: scales of a state in 8 bits
}

type sharder struct {
	p     *graph.Program
	o     Options
	ranks int // number of ranks along the shard axis
	units []unitBufs

	losses leafLosses

	squares graph.BufID // exact sum of the squares of this rank's parts of the leaves; NoBuf if not summed

	replicas  int // number of ranks along the other axis, 1 if there is none
	replicate int // that axis; −1 if its ranks are not replicas, as along a tensor axis
}

// stage returns the stage of a unit: a unit that stays whole is laid out as at stage 0.
func (s *sharder) stage(u int) zero.Stage {
	if whole(&s.p.Units[u], s.ranks) {
		return zero.Replicate
	}
	return s.o.Stage
}

func (s *sharder) shardLen(u int) int64 { return s.p.Units[u].FlatLen / int64(s.ranks) }

// part returns the attribute for the part of unit u that a rank holds.
func (s *sharder) part(u int, sharded bool) graph.ShardAttr {
	if sharded {
		return graph.ShardAttr{Unit: u, Axis: s.o.Axis, Len: s.shardLen(u)}
	}
	return graph.ShardAttr{Unit: u, Axis: -1, Len: s.p.Units[u].FlatLen}
}

// shardBuffer returns a rank's part of a flat buffer of unit u. Its padding is the mean over the
// ranks.
func (s *sharder) shardBuffer(name string, dtype graph.DType, class graph.Class, life graph.Life, u int, sharded bool) graph.Buffer {
	used := usedElems(&s.p.Units[u])
	n := s.p.Units[u].FlatLen
	global := n
	var place graph.Placement
	if sharded {
		n = s.shardLen(u)
		used = s.share(u, class)
		place = graph.Sharded
	}
	b := flatBuffer(name, dtype, class, life, u, n, used)
	b.Global = []int64{global}
	b.Place = make([]graph.Placement, len(s.p.Mesh))
	b.Place[s.o.Axis] = place
	return b
}

func newOp(kind graph.Kind, name string, stream graph.StreamID, pass graph.Pass, unit int, in []graph.BufID, out []graph.Out, attr any) graph.Op {
	return graph.Op{Kind: kind, Name: name, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf, Attr: attr, Stream: stream, Pass: pass, Unit: unit}
}

func (s *sharder) group() graph.GroupAttr { return graph.GroupAttr{Axis: s.o.Axis} }

// stepSections expands a micro-batch into the sections of a step in the same form. Shapes that
// differ only in the number of repetitions of a phase share one section.
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

// rounds are consecutive rounds in which the same ranks have a micro-batch.
type rounds struct{ first, repeat int }

// runs divides rounds [from, to) at each change of the set of ranks with a micro-batch, and names
// the parts.
func runs(shares []int, name string, from, to int) iter.Seq2[string, rounds] {
	return func(yield func(string, rounds) bool) {
		for first := from; first < to; {
			end := first + 1
			for end < to && len(graph.PresentIn(shares, end)) == len(graph.PresentIn(shares, first)) {
				end++
			}
			part := name
			if first > from {
				part += "." + strconv.Itoa(first)
			}
			if !yield(part, rounds{first, end - first}) {
				return
			}
			first = end
		}
	}
}

// updateSection returns the update of all trained units as a section of parts. A later pass decides
// where they run and moves them into the step. The section is empty if nothing is trained.
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
		t.After = s.wholeAgain(u)
		targets = append(targets, t)
	}
	if len(targets) == 0 {
		return graph.Section{}
	}
	sec := s.o.Optimizer.Section(s.p, targets, s.o.Clip)
	ph := graph.Phase{Name: "out", Kind: graph.UpdateOut, Repeat: 1}
	w := graph.NewEditor(&ph)
	s.toHost(w, "grad_norm/out", s.p.GradNorm, graph.PortGradNorm, graph.Update)
	s.observeScale(w)
	w.Commit()
	sec.Phases = append(sec.Phases, ph)
	return sec
}
