package graph

import "fmt"

// buffers does the checks that need resolved views. A buffer of bytes (U8) may hold views of any
// type.
func (v *verifier) buffers() error {
	p := v.p
	for id := range p.Buffers {
		b, g := &p.Buffers[id], v.regions.Of[id]
		if b.Place != nil && len(b.Place) != len(p.Mesh) {
			return fmt.Errorf("buffer %s: %d placements, want one for each of %d mesh axes", p.bufName(BufID(id)), len(b.Place), len(p.Mesh))
		}
		if err := p.checkGlobal(b); err != nil {
			return fmt.Errorf("buffer %s: %w", p.bufName(BufID(id)), err)
		}
		if b.View == nil {
			continue
		}
		base := p.Buf(b.View.Base)
		if base.DType != b.DType && base.DType != U8 {
			return fmt.Errorf("buffer %s: is %v, its base %s %v; a view has the type of its base, or one of bytes",
				p.bufName(BufID(id)), b.DType, p.bufName(b.View.Base), base.DType)
		}
		if size := b.DType.Size(); g.Lo%size != 0 || b.View.RankStride%size != 0 {
			return fmt.Errorf("buffer %s: starts at byte %d, with a rank stride of %d, want multiples of the %d bytes of %v",
				p.bufName(BufID(id)), g.Lo, b.View.RankStride, size, b.DType)
		}
	}
	for _, id := range p.HostBuffers() {
		if root := p.Buf(v.regions.Of[id].Root); root.Life != LifeRun {
			return fmt.Errorf("buffer %s: lives for a %v, want run: the host uses it between sections", root.Name, root.Life)
		}
	}
	return nil
}

// checkGlobal checks a buffer's global shape against its own shape and its placements.
func (p *Program) checkGlobal(b *Buffer) error {
	if len(b.Global) == 0 {
		return nil
	}
	global, parts := elemsOf(b.Global), int64(1)
	for axis, place := range b.Place {
		if place == Sharded {
			parts *= int64(p.Mesh[axis].Size)
		}
	}
	if b.Elems()*parts != global {
		return fmt.Errorf("%d elements on each of %d ranks that have a part each, want the %d of global shape %v", b.Elems(), parts, global, b.Global)
	}
	return nil
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
			return fmt.Errorf("buffer %s: lies in %s and the values %s in %s, want views of one buffer",
				name, p.bufName(v.regions.Of[id].Root), values, p.bufName(v.regions.Of[s.Of].Root))
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
