package fsdp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// allocate adds the resident buffers and the graph.Gradient of every unit.
func (s *sharder) allocate() error {
	p := s.p
	gradBase := map[int]graph.BufID{}
	for i := range p.Buffers {
		if v := p.Buffers[i].View; v != nil && p.Buf(v.Base).Class == graph.Gradients && p.Buf(v.Base).Unit >= 0 {
			gradBase[p.Buf(v.Base).Unit] = v.Base
		}
	}
	for u := range p.Units {
		s.units[u] = unitBufs{value: graph.NoBuf, valueShard: graph.NoBuf, master: graph.NoBuf}
		if p.Units[u].FlatLen == 0 {
			continue
		}
		if based, err := s.allocateBase(u); err != nil {
			return err
		} else if !based {
			s.allocateValue(u)
		}
		if grad, ok := gradBase[u]; ok {
			if err := s.allocateTrained(u, grad); err != nil {
				return err
			}
		}
	}
	return nil
}

// allocateValue adds the parameters with which the model computes: only the shard, or the complete
// value, of which a rank updates its own part from stage 1 on.
func (s *sharder) allocateValue(u int) {
	unit, b, stage := &s.p.Units[u], &s.units[u], s.stage(u)
	b.value = unit.Value.Buf
	switch {
	case stage.ShardsParams():
		b.valueShard = s.p.AddBuffer(s.shardBuffer("shard/"+unit.Name, s.p.Buf(b.value).DType, graph.Parameters, graph.LifeRun, u, true))
		unit.Value = graph.State{Name: "value", Buf: b.valueShard, Axis: s.o.Axis, Len: s.shardLen(u)}
	case stage.ShardsStates():
		b.valueShard = ownPart(s.p, b.value, u, s.o.Axis)
	default:
		b.valueShard = b.value
	}
	unit.Compute = unit.Value
}

// allocateTrained adds the buffers that a trained unit has in addition to its value.
func (s *sharder) allocateTrained(u int, grad graph.BufID) error {
	p, unit, b := s.p, &s.p.Units[u], &s.units[u]
	dtype := p.Buf(b.value).DType
	unit.Grad = s.way(u, grad, dtype)
	if s.o.Optimizer.BF16 && dtype != graph.BF16 {
		return fmt.Errorf("fsdp: unit %q is %v; states in bf16 go with parameters in bf16", unit.Name, dtype)
	}
	if dtype != graph.F32 && !s.o.Optimizer.BF16 {
		s.allocateMaster(u, b)
	}
	rule := s.o.Optimizer.Of(p, u)
	for _, name := range rule.States {
		id, scales, err := s.addState(name, u)
		if err != nil {
			return err
		}
		b.states = append(b.states, id)
		if scales != graph.NoBuf {
			b.scales = append(b.scales, scales)
		}
		part := s.part(u, s.stage(u).ShardsStates())
		unit.States = append(unit.States, graph.State{Name: name, Buf: id, Axis: part.Axis, Len: part.Len})
	}
	for _, name := range rule.PerParam {
		n := int64(len(unit.Segments))
		id := p.AddBuffer(graph.Buffer{Name: name + "/" + unit.Name, DType: graph.F32, Shape: []int64{n}, Class: graph.Optimizer, Life: graph.LifeRun, Unit: u})
		b.states = append(b.states, id)
		unit.States = append(unit.States, graph.State{Name: name, Buf: id, Axis: -1, Len: n, PerParam: true})
	}
	return nil
}

// addState adds a flat optimizer state of a unit: f32, bf16, or 8-bit values with their scales,
// whose blocks are never split between shards.
func (s *sharder) addState(name string, u int) (buf, scales graph.BufID, err error) {
	b := s.shardBuffer(name+"/"+s.p.Units[u].Name, graph.F32, graph.Optimizer, graph.LifeRun, u, s.stage(u).ShardsStates())
	if s.o.Optimizer.BF16 {
		b.Pad, b.DType = b.Pad/b.DType.Size()*graph.BF16.Size(), graph.BF16
	}
	if !s.o.Optimizer.Int8 {
		return s.p.AddBuffer(b), graph.NoBuf, nil
	}
	b.Pad = quantisedPad(b.Elems(), b.Pad/b.DType.Size())
	b.DType = graph.U8
	return s.p.AddQuantized(b, graph.QuantBlock)
}

// share returns the number of unit u's elements that a rank holds, as the mean over ranks. It is
// rounded up along the running sum over units, so that the units of a class add up to ⌈Ψ/N⌉, the
// ZeRO formula for the complete model. If each were rounded up separately, the sum would be larger
// by up to one element a unit.
func (s *sharder) share(u int, class graph.Class) int64 {
	var before int64
	for v := range u {
		// All units have parameters; only trained units have gradients and states.
		if whole(&s.p.Units[v], s.ranks) {
			continue
		}
		if class == graph.Parameters || !s.p.Units[v].Frozen {
			before += usedElems(&s.p.Units[v])
		}
	}
	ceil := func(n int64) int64 { return (n + int64(s.ranks) - 1) / int64(s.ranks) }
	return ceil(before+usedElems(&s.p.Units[u])) - ceil(before)
}

// allocateMaster adds the f32 master of a unit's 16-bit parameters. The host initialises, loads
// and saves it.
func (s *sharder) allocateMaster(u int, b *unitBufs) {
	unit := &s.p.Units[u]
	part := s.part(u, s.stage(u).ShardsStates())
	b.master = s.p.AddBuffer(s.shardBuffer("master/"+unit.Name, graph.F32, graph.Optimizer, graph.LifeRun, u, part.Axis >= 0))
	unit.Value = graph.State{Name: "value", Buf: b.master, Axis: part.Axis, Len: part.Len}
}

// initSection initialises the optimizer states and the padding of parameters. The host writes the
// parameters themselves afterwards.
func (s *sharder) initSection() graph.Section {
	var ops []graph.Op
	fill := func(id graph.BufID, u int) {
		ops = append(ops, newOp(graph.Fill, s.p.Buf(id).Name+"/zero", graph.Compute, graph.Update, u, nil, []graph.Out{{Buf: id}}, graph.FillAttr{}))
	}
	for u := range s.p.Units {
		if s.p.Units[u].FlatLen == 0 {
			continue
		}
		value := s.p.Units[u].Value.Buf
		if s.p.Buf(value).DType == graph.U8 {
			value, _ = s.p.Resolve(value, nil) // with its scales
		}
		fill(value, u)
		for _, id := range s.units[u].states {
			root, _ := s.p.Resolve(id, nil) // with the scales of one in 8 bits
			fill(root, u)
		}
	}
	ops = append(ops, s.initScale()...)
	return graph.NewSection(graph.SectionInit, graph.FormWhole, graph.Phase{Name: "init", Repeat: 1, Ops: ops})
}

// refreshSection recomputes the 16-bit parameters and their padding from the masters, after the
// host has initialised or loaded these.
func (s *sharder) refreshSection() graph.Section {
	var ops []graph.Op
	for u, b := range s.units {
		if b.master == graph.NoBuf {
			continue
		}
		ops = append(ops, newOp(graph.Cast, s.p.Units[u].Name+"/refresh", graph.Compute, graph.Update, u, []graph.BufID{b.master}, []graph.Out{{Buf: b.valueShard}}, nil))
		ops = append(ops, s.wholeAgain(u)...)
	}
	return graph.NewSection(graph.SectionRefresh, graph.FormWhole, graph.Phase{Name: "refresh", Repeat: 1, Ops: ops})
}

// wholeAgain returns the operations that compute the complete value of a unit from its ranks'
// shards, quantised and dequantised with Int8Gather. It returns none at stage 3, or if each rank
// has the complete value.
func (s *sharder) wholeAgain(u int) []graph.Op {
	b, stage, axis := &s.units[u], s.stage(u), -1
	if stage.ShardsStates() {
		axis = s.o.Axis
	}
	switch {
	case stage.ShardsParams():
		return nil
	case s.o.Int8Gather:
		return quantised{p: s.p, unit: u, pass: graph.Update}.gather("", b.valueShard, b.value, axis)
	case axis < 0:
		return nil
	}
	return []graph.Op{newOp(graph.AllGather, s.p.Units[u].Name+"/all_gather", graph.Comm, graph.Update, u,
		[]graph.BufID{b.valueShard}, []graph.Out{{Buf: b.value}}, s.group())}
}
