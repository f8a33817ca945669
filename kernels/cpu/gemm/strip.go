package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// part computes a part of a tile, which begins with a sliver, in strips.
func (p *Product) part(x area) {
	if x.i0 == x.i1 {
		return
	}
	switch {
	case p.spec.Out.size() == 4:
		c := unsafe.Add(p.c, x.i0*p.ldc+4*x.j0)
		step := p.depth
		if p.kernels.level == level.AVX2 && !p.cut.direct {
			step = KC // so that A's block of it stays in the second-level cache
		}
		for k := 0; k < p.depth; k += step {
			for j := x.j0; j < x.j1; j += p.kernels.nr {
				s := area{x.i0, x.i1, j, min(j+p.kernels.nr, x.j1)}
				if p.spec.Symmetric && j > s.i0 { // the first sliver of rows that reaches the diagonal
					s.i0 += (j - s.i0) / p.kernels.mr * p.kernels.mr
				}
				p.strip(s, unsafe.Add(c, (s.i0-x.i0)*p.ldc+4*(j-x.j0)), p.ldc, k, min(k+step, p.depth))
			}
		}
	case p.cut.depth == p.cut.units:
		p.narrowTile(x)
	default:
		// A strip's sums lie without gaps: rows of a chunk apart they would share a few
		// sets of the first-level cache.
		ld := 4 * p.kernels.nr
		for j := x.j0; j < x.j1; j += p.kernels.nr {
			s := area{x.i0, x.i1, j, min(j+p.kernels.nr, x.j1)}
			p.narrowStrip(s, unsafe.Add(p.sums, 4*(j-p.n0)*p.cut.rows+(x.i0-p.m0)*ld), ld)
		}
	}
}

// narrowTile computes a tile of 16-bit elements through sums on the stack.
func (p *Product) narrowTile(x area) {
	var sums [maxTileRows * maxNR]float32
	ld := 4 * p.kernels.nr
	for j := x.j0; j < x.j1; j += p.kernels.nr {
		p.narrowStrip(area{x.i0, x.i1, j, min(j+p.kernels.nr, x.j1)}, unsafe.Pointer(&sums), ld)
	}
}

// narrowStrip computes a strip of 16-bit elements through float32 sums, ld
// bytes between their rows.
func (p *Product) narrowStrip(s area, sums unsafe.Pointer, ld int) {
	c := unsafe.Add(p.c, s.i0*p.ldc+2*s.j0)
	if p.spec.Accumulate && p.k0 == 0 && !p.spec.scaled() {
		for i := range s.i1 - s.i0 {
			p.kernels.widen(p.spec.Out, unsafe.Add(sums, i*ld), unsafe.Add(c, i*p.ldc), s.j1-s.j0)
		}
	}
	p.strip(s, sums, ld, 0, p.depth)
	if p.last && p.spec.scaled() {
		p.scale(s, c, sums, ld)
	}
	if p.last {
		p.kernels.narrow(p.spec.Out, c, sums, p.ldc, ld, s.i1-s.i0, s.j1-s.j0)
	}
}

// scale makes the int32 sums of a strip its float32 elements; c is where the old ones
// lie.
func (p *Product) scale(s area, c, sums unsafe.Pointer, ld int) {
	n := s.j1 - s.j0
	var biases [maxTileCols]float32
	var old [maxNR]float32
	bias, cols := biases[:n], p.scales[1][s.j0:s.j1]
	if p.bias != nil {
		bias = unsafe.Slice((*float32)(p.biasOf(s.j0, s.j1, &biases)), n)
	}
	rows := p.scales[0][s.i0:s.i1]
	done := p.kernels.scaleRows(sums, unsafe.Pointer(&cols[0]), unsafe.Pointer(&bias[0]), unsafe.Pointer(&rows[0]), ld, s.i1-s.i0, n)
	for i := range s.i1 - s.i0 {
		row := unsafe.Add(sums, i*ld)
		from, to, r := unsafe.Slice((*int32)(row), n), unsafe.Slice((*float32)(row), n), rows[i]
		for j := 0; !done && j < n; j++ {
			x := float32(float32(from[j]) * r)
			x = float32(x * cols[j])
			to[j] = x + bias[j]
		}
		if p.spec.Accumulate {
			p.kernels.widen(p.spec.Out, unsafe.Pointer(&old), unsafe.Add(c, i*p.ldc), n)
			for j := range to {
				to[j] += old[j]
			}
		}
	}
}

// strip computes at most nr columns of a tile over depths [from, to) of the chunk,
// multiples of KC, into 32-bit elements of C at c, ldc bytes between rows.
func (p *Product) strip(s area, c unsafe.Pointer, ldc, from, to int) {
	if p.kernels.tiles() {
		p.tileStrip(s, c, ldc)
		return
	}
	mr, nr := p.kernels.mr, p.kernels.nr
	rows := s.i1 - s.i0
	whole, rest := rows/mr, rows%mr
	var bias [maxTileCols]float32
	t := tile{ldb: 4 * nr, ldc: ldc, step: 4 * p.depth * mr, mask: 1<<(s.j1-s.j0) - 1}
	a := unsafe.Add(p.packA, 4*p.depth*(s.i0-p.m0))
	b := unsafe.Add(p.packB, 4*p.depth*(s.j0-p.n0))
	packs := p.cut.onTheWay && p.fusedB() && p.first(s)
	if packs && (s.j1-s.j0 < nr || whole == 0) {
		p.kernels.copy(b, unsafe.Add(p.b, p.k0*p.ldb+4*s.j0), 4*nr, p.ldb, p.depth, s.j1-s.j0, nr)
		packs = false
	}
	if p.cut.direct {
		src := unsafe.Add(p.b, p.k0*p.ldb+4*s.j0)
		if s.j1-s.j0 == nr {
			b, t.ldb = src, p.ldb
		} else { // the kernel reads nr columns: of the last sliver, a padded copy
			b = p.packB
			p.kernels.copy(b, src, 4*nr, p.ldb, p.depth, s.j1-s.j0, nr)
		}
	}
	for k := from; k < to; k += KC {
		t.k = min(KC, p.depth-k)
		t.add = 0
		if p.spec.Accumulate && !p.spec.scaled() || p.k0+k > 0 {
			t.add = 1
		}
		t.bias = nil
		if k+t.k == p.depth {
			switch {
			case p.kernels.form == formFlipped:
				t.bias = unsafe.Add(p.offsets, 4*(s.j0-p.n0))
			case p.bias != nil && p.last && !p.spec.scaled():
				t.bias = p.biasOf(s.j0, s.j1, &bias)
			}
		}
		t.b = unsafe.Add(b, k*t.ldb)
		t.a, t.c = unsafe.Add(a, 4*k*mr), c
		done := 0
		if packs {
			done = p.packOnTheWay(&t, s, k, whole)
		}
		t.next, t.ahead = uintptr(t.b)+uintptr(t.k*t.ldb), 32
		if to < p.depth || from > 0 { // the next strip's block
			t.next = uintptr(t.b) + uintptr(4*p.depth*nr)
		}
		done += p.slivers(&t, done, whole-done, mr)
		p.slivers(&t, done, min(rest, 1), rest)
	}
}

// first says that the strip is the first to be computed of its columns.
func (p *Product) first(s area) bool {
	if p.spec.Symmetric { // one chunk: the strip that reaches the diagonal
		return s.i0 <= s.j0
	}
	return s.i0 == p.m0
}

// slivers computes n slivers of A of so many rows, the first of which is the
// first-th of t, and returns n.
func (p *Product) slivers(t *tile, first, n, rows int) int {
	if n > 0 {
		part := *t
		part.n = n
		part.a, part.c = unsafe.Add(t.a, first*t.step), unsafe.Add(t.c, first*p.kernels.mr*t.ldc)
		p.kernels.micro(&part, rows)
	}
	return n
}

// packOnTheWay computes the first slivers of A by a block of a strip of B, from
// depth k of the chunk on, of which the first packs it, and returns how many. The
// others bring nearer what is packed next: a line of each row of the same columns
// below, or of the columns to the right, and then its second line.
func (p *Product) packOnTheWay(t *tile, s area, k, slivers int) int {
	first := *t
	first.to, first.b, first.ldb, first.n = t.b, unsafe.Add(p.b, (p.k0+k)*p.ldb+4*s.j0), p.ldb, 1
	next := uintptr(first.b) + uintptr(t.k*p.ldb)
	if k+t.k == p.depth {
		next = uintptr(p.b) + uintptr(p.k0*p.ldb+4*s.j1)
	}
	first.next = next
	p.kernels.microPack(&first)
	t.ahead = p.ldb
	done := 1
	for line := range uintptr(2) {
		t.next = next + 64*line
		done += p.slivers(t, done, min(2, slivers-done), p.kernels.mr)
	}
	return done
}
