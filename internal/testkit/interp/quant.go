package interp

import (
	"encoding/binary"
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// quantised is a quantised operand with n numbers in each part.
type quantised struct {
	a graph.QuantAttr
	q []uint8
	n int
}

func (q quantised) part() int { return len(q.q) / int(q.a.Parts) }

func (q quantised) code(part, i int) *uint8 { return &q.q[part*q.part()+i] }

func (q quantised) scale(part, block int) []byte {
	return q.q[(part+1)*q.part()-4*(q.n/int(q.a.Block))+4*block:][:4]
}

func (c *call[T]) quantised(id graph.BufID, n int) quantised {
	v, err := c.w.U8(c.rank, id)
	c.note(err)
	return quantised{attr[graph.QuantAttr](c), v, n}
}

func quantize[T num.Float](c *call[T]) {
	x := c.in(0)
	q := c.quantised(c.output(0), len(x.v)/int(attr[graph.QuantAttr](c).Parts))
	if c.err != nil {
		return
	}
	real := make([]bool, len(x.v)) // not padding
	if q.a.Shard.Len > 0 {
		c.shard(q.a.Shard, func(i int, _ element) { real[i] = true })
	} else {
		fill(real, true)
	}
	size := int(q.a.Block)
	for b := 0; b < len(x.v); b += size {
		top, finite := float32(graph.QuantFloor), true
		for i := b; i < b+size; i++ {
			if v := math.Abs(float64(x.v[i])); real[i] {
				top = max(top, float32(v))
				finite = finite && !math.IsNaN(v) && !math.IsInf(v, 0)
			}
		}
		part, at := b/q.n, b%q.n
		scale, inverse := top/127, 127/top
		if !finite {
			scale = float32(math.NaN())
		}
		for i := b; i < b+size; i++ {
			*q.code(part, at+i-b) = 0
			if real[i] && finite {
				*q.code(part, at+i-b) = uint8(int8(math.RoundToEven(float64(float32(x.v[i]) * inverse))))
			}
		}
		binary.NativeEndian.PutUint32(q.scale(part, at/size), math.Float32bits(scale))
	}
}

func dequantize[T num.Float](c *call[T]) {
	x := c.out(0)
	sum := c.op.Kind == graph.DequantizeSum
	n := len(x.v)
	if !sum {
		n /= int(attr[graph.QuantAttr](c).Parts)
	}
	q := c.quantised(c.input(0), n)
	if c.err != nil {
		return
	}
	parts := make([][]float32, q.a.Parts)
	for p := range parts {
		parts[p] = make([]float32, n)
		for i := range parts[p] {
			scale := math.Float32frombits(binary.NativeEndian.Uint32(q.scale(p, i/int(q.a.Block))))
			parts[p][i] = float32(int8(*q.code(p, i))) * scale
		}
	}
	if sum && c.present != nil {
		for i, p := range c.present {
			parts[i] = parts[p]
		}
		parts = parts[:len(c.present)]
	}
	if len(c.op.Out) > 1 {
		acc := c.outI64(1)
		for _, part := range parts {
			for at := 0; at < len(part) && c.err == nil; at += graph.QuantBlock {
				squareBlock(acc, part[at:at+graph.QuantBlock])
			}
		}
	}
	for i := range x.v {
		switch {
		case sum && q.a.Order == graph.SumSequential:
			v := parts[0][i]
			if c.accum(0) {
				v = float32(x.v[i]) + v
			}
			for _, part := range parts[1:] {
				v += part[i]
			}
			x.v[i] = T(v)
		case sum:
			c.store(0, &x.v[i], T(treeSum(parts, i)))
		default:
			x.v[i] = T(parts[i/n][i%n])
		}
	}
}

// int8Product writes or adds the product of a (M,K) and b, (K,N) or transposed (N,K), both
// quantised along K.
func (c *call[T]) int8Product(a, b, y tensor[T], bias []T, transB bool) {
	if c.err != nil {
		return
	}
	depth := a.cols
	left, lefts := codes(a.rows, depth, func(i, k int) float32 { return float32(a.v[i*depth+k]) })
	right, rights := codes(y.cols, depth, func(j, k int) float32 {
		if transB {
			return float32(b.v[j*depth+k])
		}
		return float32(b.v[k*y.cols+j])
	})
	for i := range a.rows {
		for j := range y.cols {
			var sum int32
			for k := range depth {
				sum += int32(left[i*depth+k]) * int32(right[j*depth+k])
			}
			v := float32(float32(sum) * lefts[i])
			v = float32(v * rights[j])
			if bias != nil {
				v += float32(bias[j])
			}
			c.store(0, &y.v[i*y.cols+j], T(v))
		}
	}
}

// codes returns the codes and scales of rows of n numbers.
func codes(rows, n int, at func(row, i int) float32) (codes []int8, scales []float32) {
	codes = make([]int8, rows*n)
	for r := range rows {
		top, finite := float32(graph.QuantFloor), true
		for i := range n {
			v := math.Abs(float64(at(r, i)))
			top = max(top, float32(v))
			finite = finite && !math.IsNaN(v) && !math.IsInf(v, 0)
		}
		scales = append(scales, top/127)
		if !finite {
			scales[r] = float32(math.NaN())
			continue
		}
		for i := range n {
			codes[r*n+i] = int8(math.RoundToEven(float64(float32(at(r, i) * (127 / top)))))
		}
	}
	return codes, scales
}
