package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// This file has the forms that only amd64 has instructions for: units of two
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

// tileDepth is the depth, in units, after which a tile register of C goes back
// to memory: measured; slivers of A and B fit the first-level cache.
func tileDepth(in Type) int {
	if in == BF16 {
		return 128
	}
	return 256
}

// tileStrip is strip for kernels of tile registers. An element's sum goes on
// over blocks of K from C's old value, so that it too depends on K alone.
func (p *Product) tileStrip(s area, c unsafe.Pointer, ldc int) {
	const edge = 32 // rows and columns of a kernel
	tileKC := tileDepth(p.spec.In)
	rows, cols := s.i1-s.i0, s.j1-s.j0
	whole, rest := rows/edge, rows%edge
	t := tile{ldb: 4 * edge, ldc: ldc}
	a := unsafe.Add(p.packA, 4*p.depth*(s.i0-p.m0))
	t.row, t.block, t.step = 64, 64*edge, 4*p.depth*edge
	perUnit := 4 * edge // bytes of a sliver of A
	if p.directA() {
		a = unsafe.Add(p.a, s.i0*p.lda+4*p.k0)
		t.row, t.block, t.step, perUnit = p.lda, 64, edge*p.lda, 4
	}
	b := unsafe.Add(p.packB, 4*p.depth*(s.j0-p.n0))
	// The kernel goes over whole blocks of K in one call, and then over the last one.
	for k, times := 0, 0; k < p.depth; k += tileKC * times {
		units := min(tileKC, p.depth-k)
		times = (p.depth - k) / units
		part := func(first, n, rows int) {
			t.k, t.times, t.n, t.add = units/16, times, n, 0
			if p.spec.Accumulate && !p.spec.scaled() || p.k0+k > 0 {
				t.add = 1
			}
			t.a, t.b = unsafe.Add(a, perUnit*k+first*t.step), unsafe.Add(b, 4*edge*k)
			t.c = unsafe.Add(c, first*edge*ldc)
			t.next = uintptr(t.b) + uintptr(4*edge*units)
			t.configure(rows, cols)
			p.kernels.microTiles(&t, rows, cols)
		}
		if whole > 0 {
			part(0, whole, edge)
		}
		if rest > 0 {
			part(whole, 1, rest)
		}
	}
	if p.last && p.bias != nil && !p.spec.scaled() {
		var bias [maxTileCols]float32
		biasAVX512(c, p.biasOf(s.j0, s.j1, &bias), ldc, rows, 1<<cols-1)
	}
}

// microTiles computes up to 32 rows of each sliver of t, up to 32 columns.
func (s *kernels) microTiles(t *tile, rows, cols int) {
	switch s.in {
	case BF16:
		bf16AMX(t, rows, cols)
	case S8:
		s8AMX(t, rows, cols)
	case U8S8:
		u8AMX(t, rows, cols)
	}
}

// interleave joins the elements of consecutive source rows in units; cols of
// width lanes are read, the others are zeros.
func (s *kernels) interleave(dst, src unsafe.Pointer, ds, ss, units, cols, width int) {
	if s.group == 2 {
		interleave16AVX512(dst, src, ds, ss, units, 1<<cols-1, 1<<width-1)
	} else {
		interleave8AVX512(dst, src, ds, ss, units, 1<<cols-1, 1<<width-1)
	}
}
