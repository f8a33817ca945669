package graph

import "fmt"

// QuantBlock is the number of elements that share a scale, counted from a parameter's start.
const QuantBlock = 256

// AddQuantized adds a buffer of quantised values and their scales. b describes the values
// (I8 or U8, a whole number of blocks). The buffer that holds both takes b's name, space,
// class, life, unit and padding.
func (p *Program) AddQuantized(b Buffer, block int64) (values, scales BufID, err error) {
	n := b.Elems()
	if b.DType != I8 && b.DType != U8 || block < 1 || n%block != 0 {
		return NoBuf, NoBuf, fmt.Errorf("graph: buffer %s: %d values of %v in blocks of %d; want i8 or u8 in whole blocks", b.Name, n, b.DType, block)
	}
	both := b
	both.DType, both.Shape, both.Global = U8, []int64{n + n/block*F32.Size()}, nil
	root := p.AddBuffer(both)
	part := func(name string, d DType, n, at int64, s ScaleOf) BufID {
		v := b
		v.Name, v.DType, v.Shape, v.Pad, v.Global, v.Place = b.Name+name, d, []int64{n}, 0, nil, nil
		v.View, v.Scale = &View{Base: root, Offset: at}, s
		return p.AddBuffer(v)
	}
	values = part("/values", b.DType, n, 0, ScaleOf{})
	return values, part("/scales", F32, n/block, n, ScaleOf{values, block}), nil
}

// ScalesOf returns the scales of quantised values; NoBuf where the buffer has none.
func (p *Program) ScalesOf(values BufID) BufID {
	for id := range p.Buffers {
		if s := p.Buffers[id].Scale; s.Block > 0 && s.Of == values {
			return BufID(id)
		}
	}
	return NoBuf
}

// Scales maps every buffer of quantised values to its scales.
func (p *Program) Scales() map[BufID]BufID {
	scales := map[BufID]BufID{}
	for id := range p.Buffers {
		if s := p.Buffers[id].Scale; s.Block > 0 {
			scales[s.Of] = BufID(id)
		}
	}
	return scales
}
