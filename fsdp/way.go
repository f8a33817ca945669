package fsdp

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Gradients of f32 parameters are f32 throughout. Those of 16-bit parameters are sent and stored
// in 16 bits, and their sums over micro-steps are f32:
//
//	Reduce32                as for f32 parameters: the backward writes f32
//	1 micro-step            16 bits throughout
//	more, each reduced      the backward writes 16 bits, which are reduced and then
//	(stages 2, 3)           added to the rank's f32 sum:
//	                          grad/u ─ reduce ─ cast, accumulating → accum/u
//	more, reduced once      the backward accumulates in f32; the sum is cast and reduced:
//	(stages 0, 1; all in      grad/u ─ cast → wire/u ─ reduce
//	layer order)
//
// A unit that is not sharded is reduced as often as its stage requires. If that is every
// micro-step, its gradients, also f32 ones, are all-reduced in place and added to a complete
// accum/u.
//
// A sum that is all-reduced over replicas is also cast to wire/u for that.
//
// Reproducible sums do not depend on the number of ranks. A step's micro-batches are its leaves:
// leaf k·W + r is micro-step k on rank r of W. The sum of an element adds the leaves from left to
// right in f32, at every stage and on one rank:
//
//	grad/u ─ reduce_scatter, sequential → accum/u, the rank's part
//	grad/u ─ quantize ─ all_to_all ─ dequantize_sum, sequential → accum/u
//
// A leaf always has the type in which it would be sent, or is quantised, even if it is not sent.
// Each rank adds the leaves of its part. At stage 0 the parts are gathered into sum/u after the
// last micro-step.

// Grads32 says whether the backward must write 16-bit parameters' gradients in
// f32 (precision.Options.Grads32). shards is the size of the shard axis.
func Grads32(o Options, shards int) bool {
	if shards == 1 {
		o.Stage = zero.Replicate
	}
	return o.Reduce32 || o.Accum > 1 && !o.each(shards) && !o.leaves(shards)
}

// each says whether gradients are reduced over the ranks in every micro-step, as stages 2 and 3
// do, and then accumulated.
func (o Options) each(shards int) bool {
	return o.Accum > 1 && !o.InLayers && o.Stage.ShardsGrads()
}

// leaves says whether gradients are summed leaf by leaf. With a single leaf there is no sum.
func (o Options) leaves(shards int) bool { return o.Reproducible && o.Accum*shards > 1 }

// way returns the graph.Gradient of a unit and adds its buffers. whole is the buffer that the
// backward writes.
func (s *sharder) way(u int, whole graph.BufID, value graph.DType) *graph.Gradient {
	p, o, name, stage := s.p, s.o, s.p.Units[u].Name, s.stage(u)
	none := graph.NoBuf
	g := &graph.Gradient{Leaf: p.Buf(whole).DType, Wire: value, Order: graph.SumTree, Each: o.each(s.ranks), Axis: -1, Replicas: s.replicate,
		Parted: stage.ShardsStates(), Whole: whole, Part: none, Home: none, Sent: none, Squares: none}
	if s.ranks > 1 {
		g.Axis, g.Int8 = o.Axis, o.Int8Reduce
	}
	if o.Reduce32 {
		g.Wire = graph.F32
	}
	if o.leaves(s.ranks) {
		s.leafWay(u, g)
		return g
	}
	part := func(of graph.BufID) graph.BufID {
		if g.Parted {
			return ownPart(s.p, of, u, s.o.Axis)
		}
		return of
	}
	used := usedElems(&p.Units[u])
	switch low := g.Leaf != graph.F32; {
	case low && g.Each: // accumulated in a separate f32 sum
		g.Home = s.resident(u, "accum", graph.F32, g.Parted)
		if g.Replicas >= 0 {
			g.Sent = s.resident(u, "wire", g.Wire, g.Parted)
		}
		g.Part = part(whole)
	case g.Each && !g.Parted: // each gradient is reduced in place and added to a separate sum
		g.Home = s.resident(u, "accum", g.Leaf, false)
		g.Part = whole
	case stage.ShardsGrads() && g.Wire != g.Leaf: // the f32 sum of all micro-batches is sent in 16 bits
		g.Home = s.resident(u, "reduced", g.Wire, true)
		g.Sent = p.AddBuffer(flatBuffer("wire/"+name, g.Wire, graph.Unsharded, graph.LifePhase, u, p.Units[u].FlatLen, used))
	case stage.ShardsGrads(): // each reduction writes, or adds, directly to Home
		g.Home = s.resident(u, "reduced", g.Leaf, true)
	case g.Wire != g.Leaf && o.Accum > 1 && s.ranks*s.replicas > 1:
		g.Home = whole
		g.Sent = p.AddBuffer(flatBuffer("wire/"+name, g.Wire, graph.Gradients, graph.LifeStep, u, p.Units[u].FlatLen, used))
	default:
		g.Home = part(whole)
	}
	if root, _ := p.Resolve(g.Home, nil); root != whole { // whole is not needed after the reduction
		p.Buf(whole).Class, p.Buf(whole).Life = graph.Unsharded, graph.LifePhase
	}
	g.Update = g.Home
	if g.Sent != none && p.Buf(g.Sent).Life == graph.LifeStep {
		g.Update = g.Sent
		if g.Parted && p.Buf(g.Sent).Elems() == p.Units[u].FlatLen {
			g.Update = ownPart(s.p, g.Sent, u, s.o.Axis)
		}
	}
	return g
}

// resident adds a buffer of unit u that holds a sum of gradients until the update.
func (s *sharder) resident(u int, what string, dtype graph.DType, parted bool) graph.BufID {
	return s.p.AddBuffer(s.shardBuffer(what+"/"+s.p.Units[u].Name, dtype, graph.Gradients, graph.LifeStep, u, parted))
}

// leafWay completes the Gradient of a unit whose micro-batches' gradients are added in sequence, in
// the step's order. So the sum does not depend on the assignment of micro-batches to ranks.
func (s *sharder) leafWay(u int, g *graph.Gradient) {
	p := s.p
	g.Order, g.Each, g.Int8 = graph.SumSequential, true, s.o.Int8Reduce
	p.Buf(g.Whole).Class, p.Buf(g.Whole).Life = graph.Unsharded, graph.LifePhase
	g.Squares = s.squares
	g.Home = s.resident(u, "accum", graph.F32, g.Axis >= 0)
	g.Update = g.Home
	if g.Axis >= 0 && !g.Parted {
		g.Update = s.resident(u, "sum", graph.F32, false)
	}
}
