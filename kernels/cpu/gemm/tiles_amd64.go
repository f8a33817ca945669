package gemm

import "unsafe"

// This file computes tiles of C in tile registers (AMX).

// rowTiles computes the part of a tile of C that is whole tile registers of 32×32, and
// returns its rows and columns: none where no kernel does that. An element's sum is that
// of tileStrip, whose order of K it has; only here a tile stays in registers over the
// whole depth, and rows of A are outermost.
func (p *Product) rowTiles(x area) (rows, cols int) {
	const edge = 32
	rows, cols = (x.i1-x.i0)&^(edge-1), (x.j1-x.j0)&^(edge-1)
	wide := p.spec.Out == F32
	if !p.wholeTiles() || rows == 0 || cols == 0 {
		return 0, 0
	}
	var sums [edge*edge + 16]float32
	var biases [maxTileCols]float32
	t := tile{ldb: 4 * edge, k: p.depth / 16, n: cols / edge, stepB: 4 * p.depth * edge, ldc: p.ldc, stepC: 4 * edge}
	if p.k0 > 0 || p.spec.Accumulate && !p.spec.scaled() {
		t.add = 1
	}
	if !wide {
		t.ldc, t.stepC = 4*edge, 0
	}
	bias := p.rowBias(x.j0, x.j0+cols, &biases)
	t.configure(edge, edge)
	t.row, t.block = 64, 64*edge
	for i := x.i0; i < x.i0+rows; i += edge {
		t.a = unsafe.Add(p.packA, 4*p.depth*(i-p.m0))
		if p.directA() {
			t.a, t.row, t.block = unsafe.Add(p.a, i*p.lda+4*p.k0), p.lda, 64
		}
		t.b = unsafe.Add(p.packB, 4*p.depth*(x.j0-p.n0))
		switch {
		case wide:
			t.c = unsafe.Add(p.c, i*p.ldc+4*x.j0)
			bf16RowF32AMX(&t)
			continue
		case p.cut.depth == p.cut.units:
			t.c = unsafe.Pointer(&sums)
			t.c = unsafe.Add(t.c, -uintptr(t.c)&(align-1))
		default: // as strips have them
			t.c, t.stepC = unsafe.Add(p.sums, 4*(x.j0-p.n0)*p.cut.rows+4*edge*(i-p.m0)), 4*edge*p.cut.rows
		}
		if p.last {
			t.out, t.ldo, t.bias = unsafe.Add(p.c, i*p.ldc+2*x.j0), p.ldc, bias
			if p.spec.scaled() {
				t.rowScales, t.colScales = unsafe.Pointer(&p.scales[0][i]), unsafe.Pointer(&p.scales[1][x.j0])
			}
		}
		if p.spec.In == S8 {
			s8RowAMX(&t)
		} else {
			bf16RowAMX(&t)
		}
	}
	if wide && p.last && p.bias != nil {
		for j := x.j0; j < x.j0+cols; j += edge {
			biasAVX512(unsafe.Add(p.c, x.i0*p.ldc+4*j), p.biasOf(j, j+edge, &biases), p.ldc, rows, 1<<edge-1)
		}
	}
	return rows, cols
}

// wholeTiles says that a kernel computes rows of whole tiles of this product.
func (p *Product) wholeTiles() bool {
	switch {
	case !p.kernels.tiles():
		return false
	case p.spec.In == BF16 && p.spec.Out == F32:
		return true
	case p.spec.Out != BF16 || p.spec.Accumulate:
		return false
	}
	return p.spec.In == BF16 || p.spec.In == S8
}

// rowBias is the bias of columns [j0, j1) behind the last of K, in to if it must be; nil
// where nothing is added.
func (p *Product) rowBias(j0, j1 int, to *[maxTileCols]float32) unsafe.Pointer {
	switch {
	case p.bias != nil:
		return p.biasOf(j0, j1, to)
	case p.spec.scaled():
		return unsafe.Pointer(to)
	}
	return nil
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
