package fsdp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// allocate makes the resident buffers of every unit, and decides its gradients' way.
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

// allocateValue makes what the model computes with: the whole value, of which a rank
// updates its own part from stage 1 on, or the shard alone.
func (s *sharder) allocateValue(u int) {
	unit, b, stage := &s.p.Units[u], &s.units[u], s.stage(u)
	b.value = unit.Value.Buf
	switch {
	case stage.ShardsParams():
		b.valueShard = s.p.AddBuffer(s.shardBuffer("shard/"+unit.Name, s.p.Buf(b.value).DType, graph.Parameters, graph.LifeRun, u, true))
		unit.Value = graph.State{Name: "value", Buf: b.valueShard, Axis: s.o.Axis, Len: s.shardLen(u)}
	case stage.ShardsStates():
		b.valueShard = s.own(b.value, u)
	default:
		b.valueShard = b.value
	}
	unit.Compute = unit.Value
}

// allocateTrained makes what a unit that is trained has beside its value.
func (s *sharder) allocateTrained(u int, grad graph.BufID) error {
	p, unit, b := s.p, &s.p.Units[u], &s.units[u]
	dtype := p.Buf(b.value).DType
	var err error
	if unit.Grad, err = s.way(u, grad, dtype); err != nil {
		return err
	}
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

// addState makes one of the optimizer's flat states of a unit: f32, or values in 8
// bits and their scales, whose blocks no shard cuts.
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

// share is what of unit u's elements a rank holds in the mean over ranks. It is
// rounded up along the units' running sum, so that a class's units add up to
// ⌈Ψ/N⌉, the formula of ZeRO for the whole model: rounded one by one they would
// exceed it by up to an element a unit.
func (s *sharder) share(u int, class graph.Class) int64 {
	var before int64
	for v := range u {
		// Parameters are everybody's; gradients and states the trainable units' only.
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

// own returns the view of the rank's own part of a whole flat buffer.
func (s *sharder) own(flat graph.BufID, u int) graph.BufID {
	return ownPart(s.p, flat, u, s.o.Axis)
}

// allocateMaster makes the f32 parameters of which the unit's are a 16-bit copy.
// The host initialises, loads and saves them.
func (s *sharder) allocateMaster(u int, b *unitBufs) {
	unit := &s.p.Units[u]
	part := s.part(u, s.stage(u).ShardsStates())
	b.master = s.p.AddBuffer(s.shardBuffer("master/"+unit.Name, graph.F32, graph.Optimizer, graph.LifeRun, u, part.Axis >= 0))
	unit.Value = graph.State{Name: "value", Buf: b.master, Axis: part.Axis, Len: part.Len}
}

// initSection gives the optimizer states, and the padding of parameters, their
// first values; the host writes the parameters themselves afterwards.
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
		switch {
		case s.stage(u).ShardsParams():
		case s.o.Int8Gather:
			for _, op := range s.wholeAgain(u) {
				w.Append(op)
			}
		case b.value != b.valueShard:
			w.Append(newOp(graph.AllGather, name+"/all_gather", graph.Comm, graph.Update, u,
				[]graph.BufID{b.valueShard}, []graph.Out{{Buf: b.value}}, s.group()))
		}
	}
	w.Commit()
	return graph.NewSection(graph.SectionRefresh, graph.FormWhole, ph)
}

// wholeAgain returns the operations by which the whole value of a unit becomes what
// its ranks' shards quantised are.
func (s *sharder) wholeAgain(u int) []graph.Op {
	b, axis := &s.units[u], -1
	if s.stage(u).ShardsStates() {
		axis = s.o.Axis
	}
	return quantised{p: s.p, unit: u, pass: graph.Update}.gather("", b.valueShard, b.value, axis)
}
