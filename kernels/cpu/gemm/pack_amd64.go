package gemm

import "unsafe"

// packing is what AVX2 makes units of 32 bits of.
type packing uint8

const (
	packF32  packing = iota
	packBF16         // widened to float32
	packF16
	packS8 // two bytes of consecutive k, widened to int16
	packU8
)

func (p *Product) packing(isA bool) packing {
	switch p.spec.In {
	case BF16:
		return packBF16
	case F16:
		return packF16
	case S8:
		return packS8
	case U8S8:
		if isA {
			return packU8
		}
		return packS8
	}
	return packF32
}

// packAVX2 packs a strip. Whole slivers, and whole blocks of 8 units of lanes, are
// converted where they lie; the edges from a copy that is filled up with zeros.
func (p *Product) packAVX2(dst unsafe.Pointer, s *side) {
	u, width, step := p.packing(s.isA), s.width, 4*p.depth*s.width
	first, n := p.elements()
	size, group := p.spec.In.size(), p.kernels.group
	if !s.kMajor {
		for l := s.from; l < s.to; l += width {
			for g := 0; g < width; g += 8 {
				lane := min(l+g, s.to-1)
				src := unsafe.Add(s.base, lane*s.ld+size*first)
				u.transpose(unsafe.Add(dst, 4*g), src, 4*width, s.ld, min(8, s.to-lane), size*n, min(8, width-g), size*group)
			}
			dst = unsafe.Add(dst, step)
		}
		return
	}
	slivers, rest := (s.to-s.from)/width, (s.to-s.from)%width
	for k := 0; k < p.depth; k += rowsAtOnce {
		units := min(rowsAtOnce, p.depth-k)
		whole := min(units, n/group-k)
		src, to := unsafe.Add(s.base, (first+k*group)*s.ld+size*s.from), unsafe.Add(dst, 4*k*width)
		if whole > 0 && slivers > 0 {
			u.copy(width, to, src, step, s.ld, whole, slivers)
		}
		if whole > 0 && rest > 0 {
			u.copyEdge(width, unsafe.Add(to, slivers*step), unsafe.Add(src, size*slivers*width), s.ld, whole*group, size*rest, group)
		}
		for i := 0; whole < units && i*width < s.to-s.from; i++ { // half of a pair
			lanes := min(width, s.to-s.from-i*width)
			u.copyEdge(width, unsafe.Add(to, i*step+4*whole*width), unsafe.Add(src, whole*group*s.ld+i*width), s.ld, 1, lanes, group)
		}
	}
}

// transpose packs lanes of so many bytes, units of size bytes, of up to 8 stored rows;
// lanes of missing rows repeat the last.
func (u packing) transpose(dst, src unsafe.Pointer, ds, ss, rows, bytes, lanes, size int) {
	blocks := bytes / (8 * size)
	if blocks > 0 {
		u.transposeBlocks(dst, src, ds, ss, rows, blocks, lanes)
	}
	done := 8 * size * blocks
	if done == bytes {
		return
	}
	var raw [8][32]byte
	var units [8][8]float32
	for i := range rows {
		copy(raw[i][:], unsafe.Slice((*byte)(unsafe.Add(src, i*ss+done)), bytes-done))
	}
	u.transposeBlocks(unsafe.Pointer(&units), unsafe.Pointer(&raw), 32, 32, rows, 1, 8)
	for k := range ceil(bytes-done, size) {
		copy(unsafe.Slice((*float32)(unsafe.Add(dst, (8*blocks+k)*ds)), lanes), units[k][:])
	}
}

// copyEdge packs at most rowsAtOnce units of a sliver from the first bytes of stored
// rows, group of which are a unit.
func (u packing) copyEdge(width int, dst, src unsafe.Pointer, ss, rows, bytes, group int) {
	var raw [64 * rowsAtOnce]byte
	ld := 64 / group
	for i := range rows {
		copy(raw[i*ld:][:ld], unsafe.Slice((*byte)(unsafe.Add(src, i*ss)), bytes))
	}
	u.copy(width, dst, unsafe.Pointer(&raw), 0, ld, ceil(rows, group), 1)
}

// copy packs slivers of width units of k-major rows; see copy6F32AVX2.
func (u packing) copy(width int, dst, src unsafe.Pointer, step, ss, rows, slivers int) {
	if width == 6 {
		u.copy6(dst, src, step, ss, rows, slivers)
	} else {
		u.copy16(dst, src, step, ss, rows, slivers)
	}
}
