package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// packRows packs strip i of the chunk's A, slivers of mr rows.
func (p *Product) packRows(i int) {
	s := side{base: p.a, ld: p.lda, width: p.kernels.mr, kMajor: p.spec.TransA, isA: true}
	s.from = p.m0 + i*p.cut.tileRows
	s.to = min(s.from+p.cut.tileRows, p.m1)
	dst := unsafe.Add(p.packA, 4*p.depth*i*p.cut.tileRows)
	p.pack(dst, &s)
}

// packCols packs strip i of the chunk's B, slivers of nr columns.
func (p *Product) packCols(i int) {
	s := side{base: p.b, ld: p.ldb, width: p.kernels.nr, kMajor: !p.spec.TransB}
	s.from = p.n0 + i*p.cut.tileCols
	s.to = min(s.from+p.cut.tileCols, p.n1)
	dst := unsafe.Add(p.packB, 4*p.depth*i*p.cut.tileCols)
	p.pack(dst, &s)
}

// pack packs a strip: one sliver after the other, unit u of lane l at word
// u·width + l. Lanes past the strip's last hold copies of it or zeros; nothing
// reads them into C.
func (p *Product) pack(dst unsafe.Pointer, s *side) {
	switch form := p.kernels.form; {
	case p.kernels.level == level.AVX2:
		p.packForm(dst, s)
	case form == formF32:
		p.packWords(dst, s)
	case form == formWide:
		p.packWide(dst, s)
	case form == formPairs:
		p.packPairs(dst, s)
	default:
		p.packForm(dst, s)
	}
}

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
