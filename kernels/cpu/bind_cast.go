package cpu

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

var halves = map[graph.DType]vec.Half{graph.BF16: vec.BF16, graph.F16: vec.F16}

// bindCast converts f32 to 16 bits or 16 bits to f32. It rejects bf16 ⇄ f16, which no program uses,
// and sums rounded to 16 bits.
func bindCast(b *binding) func() error {
	src, dst := b.Program.Buf(b.Op.In[0]).DType, b.Program.Buf(b.Op.Out[0].Buf).DType
	switch {
	case src != graph.F32 && dst != graph.F32:
		b.failf("%v to %v; the CPU converts from or to f32", src, dst)
		return nil
	case dst != graph.F32 && b.accum(0):
		b.failf("accumulates into %v; the CPU accumulates in f32", dst)
		return nil
	case dst != graph.F32:
		return b.run(&vec.Narrow{To: halves[dst], Src: in[float32](b, 0), Dst: out[uint16](b, 0)})
	}
	from, to, pool := in[uint16](b, 0), out[float32](b, 0), b.pool
	if !b.accum(0) {
		return b.run(&vec.Widen{From: halves[src], Src: from, Dst: to})
	}
	// Widen one block at a time into scratch of the binding, so that a sum needs no workspace as
	// large as its operands.
	const block = 4096
	wide := make([]float32, min(block, len(from)))
	widen, add := &vec.Widen{From: halves[src]}, &vec.Scale[float32]{Factor: 1, Accumulate: true}
	return func() error {
		for lo := 0; lo < len(from); lo += block {
			hi := min(lo+block, len(from))
			widen.Src, widen.Dst = from[lo:hi], wide[:hi-lo]
			if err := widen.Run(pool); err != nil {
				return err
			}
			add.X, add.Y = wide[:hi-lo], to[lo:hi]
			if err := add.Run(pool); err != nil {
				return err
			}
		}
		return nil
	}
}

// low returns the 16-bit copy of the parameters that an update writes as output i; nil if there is
// none.
func (b *binding) low(i int) ([]uint16, vec.Half) {
	if !b.hasOut(i) {
		return nil, vec.NoHalf
	}
	return out[uint16](b, i), halves[b.Program.Buf(b.Op.Out[i].Buf).DType]
}

// copies prepares the rounding of a rank's updated spans to output i.
func (b *binding) copies(spans []kernels.Span, p []float32, i int) []vec.Narrow {
	low, as := b.low(i)
	if low == nil || b.err != nil {
		return nil
	}
	var list []vec.Narrow
	for _, s := range spans {
		list = append(list, vec.Narrow{To: as, Src: p[s.Lo:s.Hi], Dst: low[s.Lo:s.Hi]})
	}
	return list
}

func bindOverflowCheck(b *binding) func() error {
	acc, flag := in[int64](b, 0), out[int32](b, 0)
	if _, err := exact.Of(acc); err != nil {
		b.failf("operand acc: %w", err)
	}
	return func() error {
		flag[0] = 0
		if v := exact.Accumulator(acc).Float64(); math.IsNaN(v) || math.IsInf(v, 0) {
			flag[0] = 1
		}
		return nil
	}
}

func bindLossScaleUpdate(b *binding) func() error {
	a := attr[graph.LossScaleAttr](b)
	flag, state := in[int32](b, 0), out[float64](b, 0)
	return func() error {
		if flag[0] != 0 {
			if inRow := 1 - min(state[graph.ScaleClean], 0); inRow < float64(a.Hysteresis) {
				state[graph.ScaleClean] = -inRow
				return nil
			}
			state[graph.ScaleValue] = max(a.Floor, float64(state[graph.ScaleValue]*a.Backoff))
			state[graph.ScaleClean] = 0
			return nil
		}
		state[graph.ScaleClean] = max(state[graph.ScaleClean], 0) + 1
		if state[graph.ScaleClean] >= float64(a.Interval) {
			state[graph.ScaleValue] *= a.Growth
			state[graph.ScaleClean] = 0
		}
		return nil
	}
}

// bindSumParts adds the consecutive parts of its input into the output.
func bindSumParts(b *binding) func() error {
	sequential := attr[graph.SumPartsAttr](b).Order == graph.SumSequential
	if b.Program.Buf(b.Op.Out[0].Buf).DType == graph.F64 {
		return b.run(&vec.SumParts64{Dst: out[float64](b, 0), Parts: in[float64](b, 0), Sequential: sequential, Accumulate: b.accum(0)})
	}
	k := &vec.SumParts{Dst: out[float32](b, 0), As: b.asIn(0), Sequential: sequential, Accumulate: b.accum(0)}
	if k.As != vec.NoHalf {
		k.Half = in[uint16](b, 0)
	} else {
		k.Parts = in[float32](b, 0)
	}
	if b.hasOut(1) {
		spans, _ := b.spans(graph.ShardAttr{Unit: b.Op.Unit, Axis: -1, Len: int64(len(k.Dst))})
		k.Squares = &vec.Squares{Acc: out[int64](b, 1)}
		for _, s := range spans {
			k.Squares.Spans = append(k.Squares.Spans, vec.Range{Lo: s.Lo, Hi: s.Hi})
		}
	}
	return b.run(k)
}
