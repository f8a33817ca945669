package gemm

import "unsafe"

// packRows packs strip i of the chunk's A, slivers of mr rows.
func (p *Product) packRows(i int) {
	s := side{base: p.a, ld: p.lda, width: p.kernels.mr, kMajor: p.spec.TransA, isA: true}
	s.from = p.m0 + i*p.cut.tileRows
	s.to = min(s.from+p.cut.tileRows, p.m1)
	dst := unsafe.Add(p.packA, 4*p.depth*i*p.cut.tileRows)
	if p.kernels.tiles() {
		p.packTiles(dst, &s)
		return
	}
	p.pack(dst, &s)
	if p.kernels.form == formFlipped {
		p.kernels.flip(dst, ceil(s.to-s.from, s.width)*s.width*p.depth)
	}
}

// packCols packs strip i of the chunk's B, slivers of nr columns.
func (p *Product) packCols(i int) {
	s := side{base: p.b, ld: p.ldb, width: p.kernels.nr, kMajor: !p.spec.TransB}
	s.from = p.n0 + i*p.cut.tileCols
	s.to = min(s.from+p.cut.tileCols, p.n1)
	dst := unsafe.Add(p.packB, 4*p.depth*i*p.cut.tileCols)
	p.pack(dst, &s)
	if p.kernels.form == formFlipped {
		for c := s.from; c < s.to; c += s.width {
			p.kernels.offset(unsafe.Add(p.offsets, 4*(c-p.n0)), unsafe.Add(dst, 4*p.depth*(c-s.from)), p.depth)
		}
	}
}

// side is a strip of A or B to pack: lanes [from,to), which are rows of A or
// columns of B.
type side struct {
	base     unsafe.Pointer // the matrix
	ld       int            // bytes between stored rows
	from, to int
	width    int  // lanes of a sliver
	kMajor   bool // stored rows are k; else they are lanes
	isA      bool
}

// pack packs a strip: one sliver after the other, unit u of lane l at word
// u·width + l. Lanes past the strip's last hold copies of it or zeros; nothing
// reads them into C.
func (p *Product) pack(dst unsafe.Pointer, s *side) {
	switch p.kernels.form {
	case formF32:
		p.packWords(dst, s)
	case formWide:
		p.packWide(dst, s)
	case formPairs:
		p.packPairs(dst, s)
	default:
		p.packUnits(dst, s)
	}
}

// rowsAtOnce is how many stored rows are packed before going back for the next
// sliver, so that few pages are open at a time.
const rowsAtOnce = 16

func (p *Product) packWords(dst unsafe.Pointer, s *side) {
	if !s.kMajor {
		for l := s.from; l < s.to; l += s.width {
			p.kernels.transpose(dst, unsafe.Add(s.base, l*s.ld+4*p.k0), 4*s.width, s.ld, min(s.width, s.to-l), p.depth, s.width)
			dst = unsafe.Add(dst, 4*p.depth*s.width)
		}
		return
	}
	for k := 0; k < p.depth; k += rowsAtOnce {
		n := min(rowsAtOnce, p.depth-k)
		src := unsafe.Add(s.base, (p.k0+k)*s.ld)
		for l := s.from; l < s.to; l += s.width {
			p.kernels.copy(unsafe.Add(dst, 4*((l-s.from)*p.depth+k*s.width)), unsafe.Add(src, 4*l), 4*s.width, s.ld, n, min(s.width, s.to-l), s.width)
		}
	}
}

// packWide packs 16-bit floats as float32, through a buffer of converted rows.
func (p *Product) packWide(dst unsafe.Pointer, s *side) {
	var buffer [16 * maxTileRows]float32
	buf := unsafe.Pointer(&buffer)
	if !s.kMajor {
		const run = 128 // elements of a lane: 32 lanes fit
		for l := s.from; l < s.to; l += s.width {
			lanes := min(s.width, s.to-l)
			for k := 0; k < p.depth; k += run {
				n := min(run, p.depth-k)
				for i := range lanes {
					p.kernels.widen(p.spec.In, unsafe.Add(buf, 4*run*i), unsafe.Add(s.base, (l+i)*s.ld+2*(p.k0+k)), n)
				}
				p.kernels.transpose(unsafe.Add(dst, 4*k*s.width), buf, 4*s.width, 4*run, lanes, n, s.width)
			}
			dst = unsafe.Add(dst, 4*p.depth*s.width)
		}
		return
	}
	for k := 0; k < p.depth; k += rowsAtOnce {
		n := min(rowsAtOnce, p.depth-k)
		for i := range n {
			p.kernels.widen(p.spec.In, unsafe.Add(buf, 4*maxTileRows*i), unsafe.Add(s.base, (p.k0+k+i)*s.ld+2*s.from), s.to-s.from)
		}
		for l := s.from; l < s.to; l += s.width {
			p.kernels.copy(unsafe.Add(dst, 4*((l-s.from)*p.depth+k*s.width)), unsafe.Add(buf, 4*(l-s.from)), 4*s.width, 4*maxTileRows, n, min(s.width, s.to-l), s.width)
		}
	}
}

// elements returns the chunk's first element of k, and how many it has.
func (p *Product) elements() (first, n int) {
	first = p.k0 * p.kernels.group
	return first, min(p.k1*p.kernels.group, p.spec.K) - first
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
	step := rowsAtOnce / g
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
	// Units of 32 rows first, as a sliver of B; then 16 units of each row.
	const part = 128
	var buffer [32 * part]uint32
	buf := unsafe.Pointer(&buffer)
	for l := s.from; l < s.to; l += 32 {
		sliver := side{base: s.base, ld: s.ld, from: l, to: min(l+32, s.to), width: 32}
		for u := 0; u < p.depth; u += part {
			depth := min(part, p.depth-u)
			p.interleave(buf, &sliver, first+u*g, n-u*g, depth, 0)
			for b := 0; b < depth; b += 16 {
				p.kernels.transpose(unsafe.Add(dst, 128*(u+b)), unsafe.Add(buf, 128*b), 64, 128, 16, 32, 16)
			}
		}
		dst = unsafe.Add(dst, 128*p.depth)
	}
}

// packPairs packs bytes as pairs of int16, for CPUs without byte products.
func (p *Product) packPairs(dst unsafe.Pointer, s *side) {
	first, n := p.elements()
	lane, next := s.ld, 1
	if s.kMajor {
		lane, next = 1, s.ld
	}
	unsigned := s.isA && p.spec.In == U8S8
	for l := s.from; l < s.to; l += s.width {
		for i := range s.width {
			src := unsafe.Add(s.base, min(l+i, s.to-1)*lane+first*next)
			for k := range 2 * p.depth {
				var v int16
				if k < n {
					v = int16(*(*int8)(unsafe.Add(src, k*next)))
					if unsigned {
						v &= 0xff
					}
				}
				*(*int16)(unsafe.Add(dst, 4*(k/2*s.width+i)+k%2*2)) = v
			}
		}
		dst = unsafe.Add(dst, 4*p.depth*s.width)
	}
}
