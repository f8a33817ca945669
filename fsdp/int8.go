package fsdp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
)

// Quantised collectives (after Wang et al., "ZeRO++: Extremely Efficient Collective Communication
// for Giant Model Training", 2023), in blocks of 256 elements counted from each parameter's start.
// Codes and scales share one buffer, so one transfer moves both:
//
//	gather   shard ─ quantize → send ─ all_gather → recv ─ dequantize → whole
//	reduce   whole ─ quantize → send ─ all_to_all → recv ─ dequantize_sum → part [─ all_gather → whole]
//
// A rank uses the quantised form also for its own shard and its own gradient, as the other ranks
// do. If nothing is gathered, the values are quantised and dequantised in place. With sums leaf by
// leaf a single rank quantises its leaves as several ranks do. Parameters rounded to 16 bits do not
// change when they are quantised a second time, so the number of times does not matter. Therefore
// every stage has the same bits.

// quantised adds buffers and operations for the quantised values of one unit.
type quantised struct {
	p     *graph.Program
	unit  int
	pass  graph.Pass
	micro int
}

// buffer adds a buffer for quantised values: parts parts of n values each.
func (q quantised) buffer(name string, parts, n int64) graph.BufID {
	bytes := graph.QuantAttr{Block: graph.QuantBlock, Parts: parts}.Bytes(n)
	return q.p.AddBuffer(graph.Buffer{Name: name + "/" + q.p.Units[q.unit].Name, DType: graph.U8, Shape: []int64{bytes},
		Class: graph.Communication, Life: graph.LifePhase, Unit: q.unit})
}

// parts returns the number of ranks along an axis, 1 for axis −1.
func (q quantised) parts(axis int) int64 {
	if axis < 0 {
		return 1
	}
	return int64(q.p.Mesh[axis].Size)
}

func (q quantised) op(kind graph.Kind, name string, in, out graph.BufID, mode graph.Mode, attr any) graph.Op {
	op := newOp(kind, graph.MicroName(q.p.Units[q.unit].Name+"/"+name, q.micro), graph.Comm, q.pass, q.unit, []graph.BufID{in}, []graph.Out{{Buf: out, Mode: mode}}, attr)
	op.Micro = q.micro
	return op
}

// gather returns the operations that compute a unit's complete value from the ranks' shards,
// quantised and dequantised. With axis −1 there is one rank, and shard is the complete value.
func (q quantised) gather(suffix string, shard, whole graph.BufID, axis int) []graph.Op {
	parts := q.parts(axis)
	n := q.p.Units[q.unit].FlatLen / parts
	attr := graph.QuantAttr{Block: graph.QuantBlock, Parts: 1, Shard: graph.ShardAttr{Unit: q.unit, Axis: axis, Len: n}}
	send := q.buffer("send", 1, n)
	ops := []graph.Op{q.op(graph.Quantize, "quantize"+suffix, shard, send, graph.Write, attr)}
	recv := send
	if axis >= 0 {
		recv = q.buffer("recv", parts, n)
		ops = append(ops, q.op(graph.AllGather, "all_gather"+suffix, send, recv, graph.Write, graph.GroupAttr{Axis: axis}))
	}
	attr.Parts, attr.Shard = parts, graph.ShardAttr{}
	return append(ops, q.op(graph.Dequantize, "dequantize"+suffix, recv, whole, graph.Write, attr))
}

// reduce returns the operations that sum the rank's part of a whole gradient over the ranks of an
// axis, in the given order, quantised. squares, if given, accumulates the squares of the addends.
// With axis −1 the rank's own gradient is the only addend.
func (q quantised) reduce(whole graph.BufID, into graph.Out, axis int, order graph.SumOrder, squares ...graph.Out) []graph.Op {
	parts, n := q.parts(axis), q.p.Units[q.unit].FlatLen
	attr := graph.QuantAttr{Block: graph.QuantBlock, Parts: parts, Shard: graph.ShardAttr{Unit: q.unit, Axis: -1, Len: n}}
	send := q.buffer("send", parts, n/parts)
	ops := []graph.Op{q.op(graph.Quantize, "quantize_grad", whole, send, graph.Write, attr)}
	recv := send
	if axis >= 0 {
		recv = q.buffer("recv", parts, n/parts)
		ops = append(ops, q.op(graph.AllToAll, "all_to_all", send, recv, graph.Write, graph.GroupAttr{Axis: axis}))
	}
	attr.Shard, attr.Order = graph.ShardAttr{}, order
	sum := q.op(graph.DequantizeSum, "sum_grad", recv, into.Buf, into.Mode, attr)
	sum.Out = append(sum.Out, squares...)
	return append(ops, sum)
}

// validateInt8 returns an error if the options quantise values for which this is not possible.
func (o Options) validateInt8(p *graph.Program) error {
	if o.Int8Gather && o.Optimizer.BF16 {
		return fmt.Errorf("fsdp: a quantised gather needs masters, and states in bf16 have none")
	}
	for i := range p.Params {
		q := &p.Params[i]
		if o.Int8Gather && !q.Frozen && p.Buf(q.Value).DType == graph.F32 {
			return fmt.Errorf("fsdp: parameter %q is f32, and a quantised gather needs a master beside what the model computes with", q.Name)
		}
	}
	return nil
}
