package fsdp

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Base is the type in which frozen units are stored. If the model computes with another type, the
// stored buffer is converted before each stretch of operations that use the block:
//
//	one rank, stages 0 to 2   base/u ─ dequantize → unshard/u
//	stage 3                   base/u (shard) ─ all_gather → recv ─ dequantize → unshard/u
//
// In int8, base/u has codes and a scale for every 256 of them, counted from a parameter's start
// (graph.Quantize). For 16 bits and f32 a cast replaces dequantize. The host quantises the values
// that it writes, so a unit is never stored completely in a wider type.
type Base uint8

// Types of Base.
const (
	baseAsComputed Base = iota
	baseFP32
	BaseBF16
	baseInt8
)

var baseNames = [...]string{baseAsComputed: "", baseFP32: "fp32", BaseBF16: "bf16", baseInt8: "int8"}

func (b Base) String() string { return baseNames[b] }

// ParseBase returns the type with the given name; "" is the type with which the model computes.
func ParseBase(name string) (Base, error) {
	for i, n := range baseNames {
		if strings.EqualFold(name, n) {
			return Base(i), nil
		}
	}
	for _, four := range []string{"4bit", "4-bit", "int4", "fp4", "nf4", "uint4"} {
		if strings.EqualFold(name, four) {
			return 0, fmt.Errorf("%s: 4 bits are not built; use fp32, bf16 or int8", four)
		}
	}
	return 0, fmt.Errorf("%.80q is not known; use fp32, bf16 or int8", name)
}

// dtype returns the DType of a base; computed is the type with which the model computes.
func (b Base) dtype(computed graph.DType) graph.DType {
	return [...]graph.DType{baseAsComputed: computed, baseFP32: graph.F32, BaseBF16: graph.BF16, baseInt8: graph.U8}[b]
}

// allocateBase adds the stored buffer of a frozen unit in the base's type. It reports whether this
// type differs from the one with which the model computes.
func (s *sharder) allocateBase(u int) (bool, error) {
	p, unit := s.p, &s.p.Units[u]
	computed := p.Buf(unit.Value.Buf).DType
	dtype := s.o.Base.dtype(computed)
	if !unit.Frozen || dtype == computed {
		return false, nil
	}
	part := s.part(u, s.stage(u).ShardsParams())
	b := s.shardBuffer("base/"+unit.Name, dtype, graph.Parameters, graph.LifeRun, u, part.Axis >= 0)
	id := graph.NoBuf
	if dtype != graph.U8 {
		id = p.AddBuffer(b)
	} else {
		b.Pad = quantisedPad(b.Elems(), b.Pad)
		var err error
		if id, _, err = p.AddQuantized(b, graph.QuantBlock); err != nil {
			return false, err
		}
	}
	unit.Value = graph.State{Name: "value", Buf: id, Axis: part.Axis, Len: part.Len}
	unit.Compute = unit.Value
	s.units[u].valueShard = id
	return true, nil
}

// quantisedPad returns the padding in bytes of n quantised elements and their scales, if pad of the
// elements are padding.
func quantisedPad(n, pad int64) int64 {
	blocks := func(n int64) int64 { return (n + graph.QuantBlock - 1) / graph.QuantBlock }
	return pad + (blocks(n)-blocks(n-pad))*graph.F32.Size()
}

// converted says whether a unit is stored in another type than the model computes with.
func converted(p *graph.Program, u *graph.Unit, param *graph.Param) bool {
	return u.Frozen && p.Buf(u.Compute.Buf).DType != p.Buf(param.Value).DType
}

// gatherBase returns the operations that compute a frozen unit's complete value from the values
// that the ranks store, in the type with which the model computes.
func gatherBase(p *graph.Program, u int, pass graph.Pass, suffix string, whole graph.BufID) []graph.Op {
	unit := &p.Units[u]
	rests, axis, parts := unit.Compute.Buf, unit.Compute.Axis, int64(1)
	dtype := p.Buf(rests).DType
	rests, _ = p.Resolve(rests, nil) // codes with their scales
	op := func(kind graph.Kind, name string, in, out graph.BufID, attr any) graph.Op {
		return newOp(kind, unit.Name+"/"+name+suffix, graph.Comm, pass, u, []graph.BufID{in}, []graph.Out{{Buf: out}}, attr)
	}
	var ops []graph.Op
	if axis >= 0 {
		parts = int64(p.Mesh[axis].Size)
		b := *p.Buf(rests)
		b.Name, b.Shape, b.Pad, b.Global, b.Place = "recv/"+unit.Name, []int64{parts * b.Elems()}, 0, nil, nil
		b.Class, b.Life = graph.Communication, graph.LifePhase
		recv := p.AddBuffer(b)
		ops = append(ops, op(graph.AllGather, "all_gather", rests, recv, graph.GroupAttr{Axis: axis}))
		rests = recv
	}
	if dtype == graph.U8 {
		return append(ops, op(graph.Dequantize, "dequantize", rests, whole, graph.QuantAttr{Block: graph.QuantBlock, Parts: parts}))
	}
	return append(ops, op(graph.Cast, "cast", rests, whole, nil))
}
