package fsdp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Gradients of 16-bit parameters. They travel and rest in 16 bits, sums over
// micro-steps in f32:
//
//	Reduce32                as f32 parameters' do: the backward writes f32
//	1 micro-step            16 bits throughout
//	more, reduced each      the backward writes 16 bits, which are reduced and then
//	(stages 2, 3;           added to the rank's f32 sum:
//	 reproducible)            grad/u ─ reduce ─ cast, adding → accum/u
//	more, reduced once      the backward adds to f32; the sum is cast and reduced:
//	(stages 0, 1)             grad/u ─ cast → wire/u ─ reduce
//
// A sum that is all-reduced over replicas is cast to wire/u for that as well. The
// update reads wire/u where there is one.

// Grads32 says whether the backward must write 16-bit parameters' gradients in
// f32 (precision.Options.Grads32). shards is the size of the shard axis.
func Grads32(o Options, shards int) bool {
	if shards == 1 {
		o.Stage = zero.Replicate
	}
	s := sharder{o: o, ranks: shards}
	return o.Reduce32 || o.Accum > 1 && !o.Stage.ShardsGrads() && !s.everyMicroStep()
}

// everyMicroStep says that gradients are reduced in every micro-step though the
// stage does not ask for it.
func (s *sharder) everyMicroStep() bool {
	return s.o.Reproducible && s.ranks > 1 && s.o.Accum > 1
}

var noBufs = unitBufs{value: graph.NoBuf, grad: graph.NoBuf, reduced: graph.NoBuf, valueShard: graph.NoBuf, master: graph.NoBuf,
	gradShard: graph.NoBuf, wire: graph.NoBuf, update: graph.NoBuf, extra: graph.NoBuf}

// allocateGrads makes what a unit's gradients are reduced into.
func (s *sharder) allocateGrads(u int, b *unitBufs) error {
	p, o, name := s.p, s.o, s.p.Units[u].Name
	value, written := p.Buf(b.value).DType, p.Buf(b.grad).DType
	travels := value
	if o.Reduce32 {
		travels = graph.F32
	}
	each := o.Accum > 1 && (o.Stage.ShardsGrads() || s.everyMicroStep())
	once := o.Accum > 1 && !each
	switch want := Grads32(o, s.ranks) || value == graph.F32; {
	case want && written != graph.F32:
		return fmt.Errorf("fsdp: unit %q: gradients are %v, want f32: they travel so, or micro-steps accumulate in them", name, written)
	case !want && written != value:
		return fmt.Errorf("fsdp: unit %q: gradients are %v, want %v, in which they travel", name, written, value)
	}
	unsharded := func() { p.Buf(b.grad).Class, p.Buf(b.grad).Life = graph.Unsharded, graph.LifePhase }
	sharded := o.Stage.ShardsStates()
	switch {
	case written != graph.F32 && each:
		unsharded()
		b.reduced = p.AddBuffer(s.shardBuffer("accum/"+name, graph.F32, graph.Gradients, graph.LifeStep, u, sharded))
		b.gradShard = b.reduced
		if s.replicas > 1 {
			b.wire = p.AddBuffer(s.shardBuffer("wire/"+name, travels, graph.Gradients, graph.LifeStep, u, sharded))
		}
	case o.Stage.ShardsGrads():
		unsharded()
		b.reduced = p.AddBuffer(s.shardBuffer("reduced/"+name, written, graph.Gradients, graph.LifeStep, u, true))
		b.gradShard = b.reduced
	case travels != written && once && s.ranks*s.replicas > 1:
		b.gradShard = b.grad
		b.wire = p.AddBuffer(flatBuffer("wire/"+name, travels, graph.Gradients, graph.LifeStep, u, p.Units[u].FlatLen, usedElems(&p.Units[u])))
	case sharded:
		b.gradShard = s.own(b.grad, u)
	default:
		b.gradShard = b.grad
	}
	b.update = b.gradShard
	if b.wire != graph.NoBuf {
		b.update = b.wire
		if sharded && p.Buf(b.wire).Elems() == p.Units[u].FlatLen {
			b.update = s.own(b.wire, u)
		}
	}
	return nil
}

// halves says that a unit's gradients are summed over micro-steps in another
// type than they travel in.
func (s *sharder) halves(u int) bool {
	b := &s.units[u]
	return b.wire != graph.NoBuf || b.reduced != graph.NoBuf && s.p.Buf(b.reduced).DType != s.p.Buf(b.grad).DType
}

// reduceHalves is reduceGrads for such a unit. It returns what must be done
// before the memory of the unit's whole gradient is free.
func (s *sharder) reduceHalves(w *graph.Editor, g gradSpan, first, last bool) []*graph.Node {
	b := &s.units[g.unit]
	if b.reduced == graph.NoBuf { // reduced once
		if !first {
			accumulate(w, s.p, b.grad)
		}
		if last {
			s.insert(w, g, graph.Cast, "wire", b.grad, graph.Out{Buf: b.wire}, nil)
			s.reduceWhole(w, g, b.wire, b.update, true)
		}
		return nil
	}
	part := b.grad
	if s.o.Stage.ShardsStates() {
		part = s.own(b.grad, g.unit)
	}
	s.reduceWhole(w, g, b.grad, part, false)
	mode := graph.Accum
	if first {
		mode = graph.Write
	}
	done := s.insert(w, g, graph.Cast, "accumulate", part, graph.Out{Buf: b.reduced, Mode: mode}, nil)
	if last && b.wire != graph.NoBuf {
		s.insert(w, g, graph.Cast, "wire", b.reduced, graph.Out{Buf: b.wire}, nil)
		s.allReduceReplicas(w, g, b.wire, true)
	}
	return []*graph.Node{done}
}

// allocateMaster makes the f32 parameters of which the unit's are a 16-bit copy.
// The host initialises, loads and saves them.
func (s *sharder) allocateMaster(u int, b *unitBufs) {
	unit := &s.p.Units[u]
	part := s.part(u, s.o.Stage.ShardsStates())
	b.master = s.p.AddBuffer(s.shardBuffer("master/"+unit.Name, graph.F32, graph.Optimizer, graph.LifeRun, u, part.Axis >= 0))
	unit.Value = graph.State{Name: "value", Buf: b.master, Axis: part.Axis, Len: part.Len}
}

// refreshSection makes the 16-bit parameters anew from their masters, padding
// too: after the host has initialised or loaded those.
func (s *sharder) refreshSection() graph.Section {
	ph := graph.Phase{Name: "refresh", Repeat: 1}
	w := graph.NewEditor(&ph)
	for u := range s.units {
		b := &s.units[u]
		if b.master == graph.NoBuf {
			continue
		}
		name := s.p.Units[u].Name
		w.Append(newOp(graph.Cast, name+"/refresh", graph.Compute, graph.Update, u, []graph.BufID{b.master}, []graph.Out{{Buf: b.valueShard}}, nil))
		if b.value != b.valueShard && !s.o.Stage.ShardsParams() {
			w.Append(newOp(graph.AllGather, name+"/all_gather", graph.Comm, graph.Update, u,
				[]graph.BufID{b.valueShard}, []graph.Out{{Buf: b.value}}, s.group()))
		}
	}
	w.Commit()
	return graph.NewSection(graph.SectionRefresh, graph.FormWhole, ph)
}

// initScale gives the loss scale its first value.
func (s *sharder) initScale() []graph.Op {
	if s.p.Scaler == nil || s.p.Scaler.State == graph.NoBuf {
		return nil
	}
	slot := func(name string, i int64, v float64) graph.Op {
		state := s.p.Buf(s.p.Scaler.State)
		id := s.p.AddBuffer(graph.Buffer{Name: state.Name + "/" + name, DType: state.DType, Shape: []int64{1}, Space: state.Space,
			Class: state.Class, Life: state.Life, Unit: -1, View: &graph.View{Base: s.p.Scaler.State, Offset: i * state.DType.Size()}})
		return newOp(graph.Fill, "loss_scale/"+name, graph.Compute, graph.Update, -1, nil, []graph.Out{{Buf: id}}, graph.FillAttr{Value: v})
	}
	return []graph.Op{slot("value", graph.ScaleValue, graph.InitialLossScale), slot("clean", graph.ScaleClean, 0)}
}

// observeScale tells the host of the loss scale and of a skipped step.
func (s *sharder) observeScale(w *graph.Editor) {
	c := s.p.Scaler
	if c == nil {
		return
	}
	out := func(name string, from graph.BufID, port graph.Port) {
		if to := s.p.Port(port); to != graph.NoBuf {
			w.Append(graph.NewCopy(name, from, to, graph.CopyOut, graph.Update, -1))
		}
	}
	out("loss_scale/out", c.State, graph.PortScale)
	out("overflow/out", c.Overflow, graph.PortOverflow)
}
