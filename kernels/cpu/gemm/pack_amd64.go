package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// This file packs for AVX2, and in the forms that only amd64 has instructions for: units of two
// 16-bit floats or four bytes (AVX-512), and tile registers (AMX).

// packForm packs a strip of such a form.
func (p *Product) packForm(dst unsafe.Pointer, s *side) {
	if p.kernels.level == level.AVX2 {
		p.packAVX2(dst, s)
		return
	}
	if p.kernels.tiles() && s.isA {
		p.packTiles(dst, s)
		return
	}
	p.packUnits(dst, s)
	if p.kernels.form != formFlipped {
		return
	}
	if s.isA {
		flipAVX512(dst, ceil(s.to-s.from, s.width)*s.width*p.depth)
		return
	}
	for c := s.from; c < s.to; c += s.width {
		offsetAVX512(unsafe.Add(p.offsets, 4*(c-p.n0)), unsafe.Add(dst, 4*p.depth*(c-s.from)), p.depth)
	}
}

// packUnits packs two 16-bit floats or four bytes a unit. Elements past K are
// zeros.
func (p *Product) packUnits(dst unsafe.Pointer, s *side) {
	g, size := p.kernels.group, p.spec.In.size()
	first, n := p.elements()
	for l := s.from; l < s.to && !s.kMajor; l += s.width {
		lanes := min(s.width, s.to-l)
		src := unsafe.Add(s.base, l*s.ld+size*first)
		p.kernels.transpose(dst, src, 4*s.width, s.ld, lanes, n/g, s.width)
		rest := unsafe.Add(dst, 4*s.width*(n/g))
		clear(unsafe.Slice((*byte)(rest), 4*s.width*(p.depth-n/g)))
		if n%g > 0 {
			for i := range lanes {
				from := unsafe.Slice((*byte)(unsafe.Add(src, i*s.ld+4*(n/g))), size*(n%g))
				copy(unsafe.Slice((*byte)(unsafe.Add(rest, 4*i)), 4), from)
			}
		}
		dst = unsafe.Add(dst, 4*p.depth*s.width)
	}
	if s.kMajor {
		p.interleave(dst, s, first, n, p.depth, 4*p.depth*s.width)
	}
}

// interleave packs n elements of k from first on, as depth units, of a strip
// whose stored rows are k; slivers are sliver bytes apart.
func (p *Product) interleave(dst unsafe.Pointer, s *side, first, n, depth, sliver int) {
	g, size := p.kernels.group, p.spec.In.size()
	var tail [4 * 64]byte // the rows of one unit of one sliver, zeros past K
	const step = 8
	for u := 0; u < depth; u += step {
		units := max(0, min(step, n/g-u))
		for l := s.from; l < s.to; l += s.width {
			to := unsafe.Add(dst, (l-s.from)/s.width*sliver+4*u*s.width)
			lanes := min(s.width, s.to-l)
			if units > 0 {
				p.kernels.interleave(to, unsafe.Add(s.base, (first+u*g)*s.ld+size*l), 4*s.width, s.ld, units, lanes, s.width)
			}
			for v := u + units; v < min(u+step, depth); v++ {
				clear(tail[:])
				for k := v * g; k < min(n, v*g+g); k++ {
					from := unsafe.Add(s.base, (first+k)*s.ld+size*l)
					copy(tail[64*(k-v*g):][:64], unsafe.Slice((*byte)(from), size*lanes))
				}
				p.kernels.interleave(unsafe.Add(to, 4*(v-u)*s.width), unsafe.Pointer(&tail), 4*s.width, 64, 1, lanes, s.width)
			}
		}
	}
}

// packTiles packs a strip of A for tile registers: slivers of 32 rows, in
// blocks of 16 units, 64 bytes a row. Elements past K are zeros.
func (p *Product) packTiles(dst unsafe.Pointer, s *side) {
	g, size := p.kernels.group, p.spec.In.size()
	first, n := p.elements()
	if !s.kMajor {
		whole := n / (16 * g)
		for l := s.from; l < s.to; l++ {
			row := unsafe.Add(dst, (l-s.from)/32*128*p.depth+(l-s.from)%32*64)
			src := unsafe.Add(s.base, l*s.ld+size*first)
			if whole > 0 {
				p.kernels.copy(row, src, 32*64, 64, whole, 16, 16)
			}
			if rest := n - whole*16*g; rest > 0 {
				block := unsafe.Slice((*byte)(unsafe.Add(row, whole*32*64)), 64)
				clear(block)
				copy(block, unsafe.Slice((*byte)(unsafe.Add(src, whole*64)), size*rest))
			}
		}
		return
	}
	// 16 units of k of all rows first, as slivers of B, then turned sliver by
	// sliver: whole lines of A are read.
	var buffer [16 * maxTileRows]uint32
	buf := unsafe.Pointer(&buffer)
	rows := side{base: s.base, ld: s.ld, from: s.from, to: s.to, width: 32}
	for u := 0; u < p.depth; u += 16 {
		p.interleave(buf, &rows, first+u*g, n-u*g, 16, 16*128)
		for i := range ceil(s.to-s.from, 32) {
			p.kernels.transpose(unsafe.Add(dst, 128*(i*p.depth+u)), unsafe.Add(buf, 16*128*i), 64, 128, 16, 32, 16)
		}
	}
}

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
