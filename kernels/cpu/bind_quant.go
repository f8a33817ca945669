package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// int8 returns an operand of the given number of values, quantized to 8 bits.
func (b *binding) int8(q []byte, numbers int64) vec.Int8 {
	a := attr[graph.QuantAttr](b)
	return vec.Int8{Q: q, Block: int(a.Block), Len: int(numbers), Parts: int(a.Parts)}
}

func bindQuantize(b *binding) func() error {
	a := attr[graph.QuantAttr](b)
	var ranges []vec.Range
	if a.Shard.Len > 0 {
		ranges = []vec.Range{}
		spans, _ := b.spans(a.Shard)
		for _, s := range spans {
			ranges = append(ranges, vec.Range{Lo: s.Lo, Hi: s.Hi})
		}
	}
	x := b.gradient(0)
	q := b.int8(out[byte](b, 0), b.Program.Buf(b.Op.In[0]).Elems()/a.Parts)
	if b.err != nil {
		return nil
	}
	k, err := vec.NewQuantize8(q, x.f32, x.half, ranges)
	if err != nil {
		b.failf("%w", err)
		return nil
	}
	return b.run(k)
}

func bindDequantize(b *binding) func() error {
	n := b.Program.Buf(b.Op.Out[0].Buf).Elems()
	k := &vec.Dequantize8{Sum: b.Op.Kind == graph.DequantizeSum, Accumulate: b.accum(0), Sequential: attr[graph.QuantAttr](b).Order == graph.SumSequential, Present: b.Present}
	if !k.Sum {
		n /= attr[graph.QuantAttr](b).Parts
	}
	k.From = b.int8(in[byte](b, 0), n)
	if k.As = b.asOut(0); k.As != vec.NoHalf {
		k.Y16 = out[uint16](b, 0)
	} else {
		k.Y = out[float32](b, 0)
	}
	if b.hasOut(1) {
		k.Squares = out[int64](b, 1)
	}
	return b.run(k)
}

// int8Product does the same as product with both factors quantised first: a by rows, w by columns
// of the product.
func (b *binding) int8Product(s gemm.Spec, e gemm.Epilogue, a, w []uint16, c []byte, bias []uint16) func() error {
	k := b.matmul(s, e)
	work := b.work()
	if b.err != nil {
		return nil
	}
	as := b.asIn(0)
	left := &vec.Int8Matrix{X: a, As: as, Rows: s.M, Cols: s.K}
	right := &vec.Int8Matrix{X: w, As: as, Rows: s.K, Cols: s.N, ByColumn: true}
	if s.TransB {
		right.Rows, right.Cols, right.ByColumn = s.N, s.K, false
	}
	left.Codes, right.Codes = take[byte](&work, int64(s.M)*int64(s.K)), take[byte](&work, int64(s.K)*int64(s.N))
	left.Scales, right.Scales = take[float32](&work, int64(s.M)), take[float32](&work, int64(s.N))
	pool, rest := b.pool, []byte(work)
	return func() error {
		if err := left.Run(pool); err != nil {
			return err
		}
		if err := right.Run(pool); err != nil {
			return err
		}
		return k.RunScaled(pool, left.Codes, right.Codes, left.Scales, right.Scales, c, bias, rest)
	}
}
