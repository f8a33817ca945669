package fsdp

import (
	"math/bits"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// blockElems divides the starts of parameters and the ends of shards, in elements.
const blockElems = 256

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// flatten lays out the parameters of each unit in a flat parameter that splits evenly over shards
// ranks. Param.Value and Param.Grad become views into value/u and grad/u. Frozen parameters get
// separate units, so that a unit has gradients and states for all of its parameters or for none.
//
// A unit with less than blockElems elements a rank is not sharded (whole): its flat length is a
// multiple of blockElems only. If exchanged is set, its gradients are exchanged in equal parts:
// the length is then also a multiple of the odd part of the number of ranks, so that each rank
// sends a whole number of bytes.
func flatten(p *graph.Program, shards int, exchanged bool) *graph.Program {
	q := p.Clone()
	splitFrozen(q)
	splitShared(q)
	members := make([][]int, len(q.Units))
	for i, prm := range q.Params {
		members[prm.Unit] = append(members[prm.Unit], i)
	}
	for u := range q.Units {
		unit := &q.Units[u]
		unit.Segments = nil
		var at, used int64
		for _, i := range members[u] {
			n := q.LocalElems(&q.Params[i])
			unit.Segments = append(unit.Segments, graph.Segment{Param: i, Len: n, Flat: at})
			at = roundUp(at+n, blockElems)
			used += n
		}
		unit.FlatLen = roundUp(at, blockElems*int64(shards))
		if !exchanged && whole(unit, shards) {
			unit.FlatLen = roundUp(at, blockElems*int64(shards>>bits.TrailingZeros(uint(shards))))
		}
		if unit.FlatLen == 0 {
			continue
		}
		first := &q.Params[members[u][0]] // the types of all parameters of the unit, and of their gradients
		value := q.AddBuffer(flatBuffer("value/"+unit.Name, q.Buf(first.Value).DType, graph.Parameters, graph.LifeRun, u, unit.FlatLen, used))
		unit.Value = graph.State{Name: "value", Buf: value, Axis: -1, Len: unit.FlatLen}
		unit.Compute = unit.Value
		grad := graph.NoBuf
		if !unit.Frozen {
			grad = q.AddBuffer(flatBuffer("grad/"+unit.Name, q.Buf(first.Grad).DType, graph.Gradients, graph.LifeStep, u, unit.FlatLen, used))
		}
		for _, s := range unit.Segments {
			prm := &q.Params[s.Param]
			intoFlat(q, prm.Value, value, s.Flat)
			if prm.Grad != graph.NoBuf {
				intoFlat(q, prm.Grad, grad, s.Flat)
			}
		}
	}
	return q
}

// whole says whether every rank stores the complete unit, because with shards of complete blocks
// some ranks would have no element of it.
func whole(u *graph.Unit, shards int) bool {
	if len(u.Segments) == 0 {
		return false
	}
	last := u.Segments[len(u.Segments)-1]
	return roundUp(last.Flat+last.Len, blockElems) < blockElems*int64(shards)
}

// Blocks returns the number of blocks of each unit. A unit is sharded over at most this number of
// ranks.
func Blocks(p *graph.Program) []int {
	list := make([]int, len(p.Units))
	for i := range p.Params {
		prm := &p.Params[i]
		list[prm.Unit] += int(roundUp(p.LocalElems(prm), blockElems) / blockElems)
	}
	return list
}

func flatBuffer(name string, dtype graph.DType, class graph.Class, life graph.Life, unit int, elems, used int64) graph.Buffer {
	return graph.Buffer{Name: name, DType: dtype, Shape: []int64{elems}, Class: class, Life: life, Unit: unit,
		Pad: (elems - used) * dtype.Size()}
}

func intoFlat(p *graph.Program, id, flat graph.BufID, elem int64) {
	p.Buf(id).View = &graph.View{Base: flat, Offset: elem * p.Buf(id).DType.Size()}
}

// splitFrozen moves the frozen parameters of partly frozen units into new units
// "<unit>.frozen".
func splitFrozen(p *graph.Program) {
	splitUnits(p, ".frozen", func(i int) (moves, stays bool) { return p.Params[i].Frozen, !p.Params[i].Frozen })
	for i := range p.Params {
		if p.Params[i].Frozen {
			p.Units[p.Params[i].Unit].Frozen = true
		}
	}
}

// splitShared splits units in which only some parameters are cut over the tensor axis. It moves the
// parameters that are equal on all ranks of the axis into units "<unit>.whole". The squares of
// their gradients count once, on the first rank of that axis.
func splitShared(p *graph.Program) {
	splitUnits(p, ".whole", func(i int) (moves, stays bool) { return p.Params[i].Split == nil, p.Params[i].Split != nil })
}

// splitRules moves parameters that the optimizer's second rule updates into separate units
// "<unit>.rest", if their unit also has other parameters.
func splitRules(p *graph.Program, o zero.Optimizer) *graph.Program {
	if !o.Splits() {
		return p
	}
	q := p.Clone()
	splitUnits(q, ".rest", func(i int) (moves, stays bool) {
		apart := o.Apart(q, i)
		return !q.Params[i].Frozen && apart, !q.Params[i].Frozen && !apart
	})
	return q
}

// splitUnits moves parameters to new units of the same block, named with the suffix, if others of
// their unit stay.
func splitUnits(p *graph.Program, suffix string, of func(param int) (moves, stays bool)) {
	moving, staying := make([]bool, len(p.Units)), make([]bool, len(p.Units))
	for i := range p.Params {
		m, s := of(i)
		u := p.Params[i].Unit
		moving[u], staying[u] = moving[u] || m, staying[u] || s
	}
	to := map[int]int{}
	for u := range moving {
		if moving[u] && staying[u] {
			to[u] = len(p.Units)
			p.Units = append(p.Units, graph.Unit{Name: p.Units[u].Name + suffix, Block: p.Units[u].Block, Stage: p.Units[u].Stage, Frozen: p.Units[u].Frozen})
		}
	}
	for i := range p.Params {
		if unit, ok := to[p.Params[i].Unit]; ok {
			if m, _ := of(i); m {
				p.Params[i].Unit = unit
			}
		}
	}
}

// usedElems returns the number of elements of a unit that are not padding.
func usedElems(u *graph.Unit) (n int64) {
	for _, s := range u.Segments {
		n += s.Len
	}
	return n
}
