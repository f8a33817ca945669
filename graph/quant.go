package graph

import (
	"fmt"
	"slices"
)

// QuantBlock is the number of elements that share a scale, counted from a parameter's start.
const QuantBlock = 256

// ScaleOf, in a buffer of scales, names the buffer of quantised values to which they belong:
// scale k is for values [k·Block, (k+1)·Block). Both are views of one buffer, so that they
// have one home, one lifetime and one place in an arena:
//
//	exp_avg/h.0         u8  (n + 4·n/256)
//	exp_avg/h.0/values  u8  (n)       view at 0
//	exp_avg/h.0/scales  f32 (n/256)   view at n, scale of exp_avg/h.0/values
//
// A part of the values has a matching part of the scales: views of both, tied in the same
// way. An operation on quantised values has the scales as a separate operand
// (Operand.ScaleOf). Check rejects scales that belong to other values.
type ScaleOf struct {
	Of    BufID // the values
	Block int64 // values for each scale; 0: the buffer does not hold scales
}

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

// scales checks the buffers that are tied to quantised values as their scales.
func (v *verifier) scales() error {
	p := v.p
	scaled := map[BufID]BufID{}
	for id := range p.Buffers {
		b, s := &p.Buffers[id], p.Buffers[id].Scale
		if s == (ScaleOf{}) {
			continue
		}
		name := p.bufName(BufID(id))
		if s.Of < 0 || int(s.Of) >= len(p.Buffers) || s.Of == BufID(id) {
			return fmt.Errorf("buffer %s: is the scale of buffer %d, want another of the program's %d", name, s.Of, len(p.Buffers))
		}
		values, q := p.bufName(s.Of), p.Buf(s.Of)
		other, twice := scaled[s.Of]
		switch {
		case s.Block < 1:
			return fmt.Errorf("buffer %s: is the scale of %s for %d values each, want at least 1", name, values, s.Block)
		case b.DType != F32 || q.DType != I8 && q.DType != U8:
			return fmt.Errorf("buffer %s: %v scales of %s, which is %v, want f32 scales of i8 or u8", name, b.DType, values, q.DType)
		case q.Elems()%s.Block != 0 || b.Elems() != q.Elems()/s.Block:
			return fmt.Errorf("buffer %s: %d scales of the %d values of %s, want one for each %d", name, b.Elems(), q.Elems(), values, s.Block)
		case twice:
			return fmt.Errorf("buffers %s and %s are both the scales of %s", p.bufName(other), name, values)
		case v.regions.Of[id].Root != v.regions.Of[s.Of].Root:
			return fmt.Errorf("buffer %s: lies in %s and the values %s in %s, want views of one buffer", name, p.bufName(v.regions.Of[id].Root), values, p.bufName(v.regions.Of[s.Of].Root))
		case v.regions.overlap(v.regions.Of[id], v.regions.Of[s.Of]):
			return fmt.Errorf("buffer %s: overlaps %s, whose scales it has", name, values)
		}
		scaled[s.Of] = BufID(id)
	}
	for values, scales := range scaled {
		if err := v.samePart(values, scales, scaled); err != nil {
			return err
		}
	}
	return nil
}

// samePart checks that the scales of a part of quantised values are the matching part of all
// scales.
func (v *verifier) samePart(values, scales BufID, scaled map[BufID]BufID) error {
	p := v.p
	q, s := p.Buf(values).View, p.Buf(scales).View
	if q == nil {
		return nil
	}
	whole, ok := scaled[q.Base]
	if !ok {
		return nil
	}
	block, size := p.Buf(scales).Scale.Block, F32.Size()
	if s.Base != whole || s.Offset*block != q.Offset*size || s.RankStride*block != q.RankStride*size || q.RankStride != 0 && s.Axis != q.Axis {
		return fmt.Errorf("buffer %s: is not the part of %s that goes with %s of %s", p.bufName(scales), p.bufName(whole), p.bufName(values), p.bufName(q.Base))
	}
	return nil
}

// scaled checks that quantised operands come with their own scales, and that other operands
// come without.
func (c *checker) scaled() {
	hasScales := func(o Operand) bool { return o.ScaleOf != "" }
	if !slices.ContainsFunc(c.inOps, hasScales) && !slices.ContainsFunc(c.outOps, hasScales) {
		return
	}
	type operand struct {
		o  *Operand
		id BufID
	}
	var all []operand
	for i := range c.inOps {
		all = append(all, operand{&c.inOps[i], c.op.in(i)})
	}
	for k := range c.outOps {
		all = append(all, operand{&c.outOps[k], c.op.out(k)})
	}
	for _, s := range all {
		if s.o.ScaleOf == "" || c.err != nil {
			continue
		}
		for _, v := range all {
			if v.o.Name != s.o.ScaleOf || v.id == NoBuf {
				continue
			}
			d := c.p.Buffers[v.id].DType
			quantised := d == I8 || d == U8
			switch {
			case quantised && s.id == NoBuf:
				c.failf("operand %s is missing, and %s (%s) is %v", s.o.Name, v.o.Name, c.p.Buffers[v.id].Name, d)
			case !quantised && s.id != NoBuf:
				c.failf("operand %s (%s) has scales of %s (%s), which is %v", s.o.Name, c.p.Buffers[s.id].Name, v.o.Name, c.p.Buffers[v.id].Name, d)
			case quantised && (c.p.Buffers[s.id].Scale.Block == 0 || c.p.Buffers[s.id].Scale.Of != v.id):
				c.failf("operand %s (%s) is not the scales of %s (%s)", s.o.Name, c.p.Buffers[s.id].Name, v.o.Name, c.p.Buffers[v.id].Name)
			case quantised && c.p.Buffers[s.id].Scale.Block != s.o.Per:
				c.failf("operand %s (%s) has a scale for each %d values, want %d", s.o.Name, c.p.Buffers[s.id].Name, c.p.Buffers[s.id].Scale.Block, s.o.Per)
			}
		}
	}
}
