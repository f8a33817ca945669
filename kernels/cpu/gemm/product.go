package gemm

import (
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Epilogue finishes tiles of C. Tile is called once for each element of C,
// after its sum and bias, while the tile is in cache: rows [r0,r1), columns
// [c0,c1). Calls come from several goroutines at once for different tiles, in
// any order; how C is cut into tiles is not defined.
type Epilogue interface{ Tile(r0, r1, c0, c1 int) }

// Product multiplies float32 matrices of one shape. Its calls allocate nothing.
// It holds the state of a call: one call at a time.
type Product struct {
	// Epilogue, if not nil, finishes each tile. Set it between calls.
	Epilogue Epilogue

	spec    Spec
	mem     [3]matrix
	cut     blocking
	kernels kernels

	a, b, c, bias unsafe.Pointer // of the call; bias may be nil
	packA, packB  unsafe.Pointer
	m0, m1        int // the chunk
	n0, n1        int
	k0, k1        int
	newA, newB    bool // the chunk's A, B are not yet packed
	gridRows      int  // tiles of the chunk
	gridCols      int
	packer        packTask
	computer      computeTask
}

type packTask struct{ p *Product }
type computeTask struct{ p *Product }

// New returns a Product of that shape.
func New(s Spec) (*Product, error) {
	p := new(Product)
	if err := p.Reset(s); err != nil {
		return nil, err
	}
	return p, nil
}

// Reset gives p another shape, without allocating. It keeps the Epilogue.
func (p *Product) Reset(s Spec) error { return p.reset(s, level.Current()) }

func (p *Product) reset(s Spec, l level.Level) error {
	if err := s.Validate(); err != nil {
		return err
	}
	*p = Product{Epilogue: p.Epilogue, spec: s, mem: s.stored(), cut: s.blocking(), kernels: kernelsOf(l)}
	p.packer.p, p.computer.p = p, p
	return nil
}

// Spec returns the shape.
func (p *Product) Spec() Spec { return p.spec }

// Run computes C = A·B, or C += A·B, then adds bias (N) to every row of C
// unless bias is nil, then lets the Epilogue see the result. work is scratch of
// at least Workspace bytes with any content. C must overlap neither A, B, bias
// nor work.
func (p *Product) Run(pl *pool.Pool, a, b, c, bias []float32, work []byte) error {
	for i, v := range [3][]float32{a, b, c} {
		if err := p.mem[i].holds(len(v)); err != nil {
			return err
		}
	}
	if err := p.spec.holdsBias(bias != nil, len(bias)); err != nil {
		return err
	}
	var need int64
	if p.cut.sizeA > 0 {
		need = p.cut.sizeA + p.cut.sizeB + align
	}
	if int64(len(work)) < need {
		return fmt.Errorf("gemm: the workspace has %d bytes; M %d, N %d, K %d need %d", len(work), p.spec.M, p.spec.N, p.spec.K, need)
	}
	if p.spec.M == 0 || p.spec.N == 0 {
		return nil
	}
	out := c[:p.mem[2].elements()]
	for i, v := range [3][]float32{a, b, bias} {
		if overlap(out, v) {
			return fmt.Errorf("gemm: C overlaps %s", [3]string{"A", "B", "bias"}[i])
		}
	}
	p.a, p.b, p.c, p.bias = unsafe.Pointer(unsafe.SliceData(a)), unsafe.Pointer(unsafe.SliceData(b)), unsafe.Pointer(unsafe.SliceData(c)), unsafe.Pointer(unsafe.SliceData(bias))
	if bias == nil {
		p.bias = nil
	}
	if p.spec.K == 0 {
		p.noDepth(c, bias)
		return nil
	}
	w := unsafe.Pointer(unsafe.SliceData(work))
	p.packA = unsafe.Add(w, -uintptr(w)&(align-1))
	p.packB = unsafe.Add(p.packA, p.cut.sizeA)
	p.run(pl)
	p.a, p.b, p.c, p.bias, p.packA, p.packB = nil, nil, nil, nil, nil, nil
	return nil
}

func overlap(x, y []float32) bool {
	if len(x) == 0 || len(y) == 0 {
		return false
	}
	px, py := uintptr(unsafe.Pointer(&x[0])), uintptr(unsafe.Pointer(&y[0]))
	return px < py+4*uintptr(len(y)) && py < px+4*uintptr(len(x))
}

// noDepth is the product over no k: the sum of nothing is +0.
func (p *Product) noDepth(c, bias []float32) {
	for i := range p.spec.M {
		row := c[i*p.mem[2].ld:][:p.spec.N]
		if !p.spec.Accumulate {
			clear(row)
		}
		if bias != nil {
			for j := range row {
				row[j] += bias[j]
			}
		}
	}
	if p.Epilogue != nil {
		p.Epilogue.Tile(0, p.spec.M, 0, p.spec.N)
	}
}

// run goes over chunks. K is innermost, so that a chunk of C is finished before
// the next begins; what is already packed is not packed again.
func (p *Product) run(pl *pool.Pool) {
	haveA, haveB := [2]int{-1, -1}, [2]int{-1, -1}
	for n0 := 0; n0 < p.spec.N; n0 += p.cut.cols {
		p.n0, p.n1 = n0, min(n0+p.cut.cols, p.spec.N)
		for m0 := 0; m0 < p.spec.M; m0 += p.cut.rows {
			p.m0, p.m1 = m0, min(m0+p.cut.rows, p.spec.M)
			for k0 := 0; k0 < p.spec.K; k0 += p.cut.depth {
				p.k0, p.k1 = k0, min(k0+p.cut.depth, p.spec.K)
				p.newA, p.newB = haveA != [2]int{m0, k0}, haveB != [2]int{n0, k0} && !p.cut.direct
				haveA, haveB = [2]int{m0, k0}, [2]int{n0, k0}
				p.chunk(pl)
			}
		}
	}
}

// chunk packs and computes one chunk. A strip of A or B that one tile alone
// uses is packed by that tile, just before it reads it.
func (p *Product) chunk(pl *pool.Pool) {
	p.gridRows = ceil(p.m1-p.m0, p.cut.tileRows)
	p.gridCols = ceil(p.n1-p.n0, p.cut.tileCols)
	if p.cut.serial {
		pl.Run(1, &p.computer)
		return
	}
	pl.Run(p.packIndices(), &p.packer)
	pl.Run(p.gridRows*p.gridCols, &p.computer)
}

// fusedA and fusedB say that each strip of A, or of B, belongs to one tile.
func (p *Product) fusedA() bool { return p.newA && p.gridCols == 1 }
func (p *Product) fusedB() bool { return p.newB && p.gridRows == 1 && p.gridCols > 1 }

func (p *Product) packIndices() int {
	n := 0
	if p.newA && !p.fusedA() {
		n += p.gridRows
	}
	if p.newB && !p.fusedB() {
		n += p.gridCols
	}
	return n
}

func (t *packTask) RunIndex(i int) {
	p := t.p
	if p.newA && !p.fusedA() {
		if i < p.gridRows {
			p.packRows(i)
			return
		}
		i -= p.gridRows
	}
	p.packCols(i)
}

// packRows packs strip i of the chunk's A: slivers of mr rows, element (r,k) of
// a sliver at k·mr + r. Rows past M are left as they are.
func (p *Product) packRows(i int) {
	mr, depth, ld := p.kernels.mr, p.k1-p.k0, 4*p.mem[0].ld
	r0 := p.m0 + i*p.cut.tileRows
	r1 := min(r0+p.cut.tileRows, p.m1)
	dst := unsafe.Add(p.packA, 4*depth*i*p.cut.tileRows)
	if !p.spec.TransA {
		for r := r0; r < r1; r += mr {
			src := unsafe.Add(p.a, r*ld+4*p.k0)
			p.kernels.transpose(dst, src, 4*mr, ld, min(mr, r1-r), depth, mr)
			dst = unsafe.Add(dst, 4*depth*mr)
		}
		return
	}
	const rows = 16 // of the stored matrix at a time, for the sake of its pages
	for k := 0; k < depth; k += rows {
		n := min(rows, depth-k)
		src := unsafe.Add(p.a, (p.k0+k)*ld)
		for r := r0; r < r1; r += mr {
			p.kernels.copy(unsafe.Add(dst, 4*((r-r0)*depth+k*mr)), unsafe.Add(src, 4*r), 4*mr, ld, n, min(mr, r1-r), mr)
		}
	}
}

// packCols packs strip i of the chunk's B: slivers of nr columns, element (k,c)
// of a sliver at k·nr + c. Columns past N hold numbers that nothing reads into C.
func (p *Product) packCols(i int) {
	nr, depth, ld := p.kernels.nr, p.k1-p.k0, 4*p.mem[1].ld
	c0 := p.n0 + i*p.cut.tileCols
	c1 := min(c0+p.cut.tileCols, p.n1)
	dst := unsafe.Add(p.packB, 4*depth*i*p.cut.tileCols)
	if p.spec.TransB {
		for c := c0; c < c1; c += nr {
			src := unsafe.Add(p.b, c*ld+4*p.k0)
			p.kernels.transpose(dst, src, 4*nr, ld, min(nr, c1-c), depth, nr)
			dst = unsafe.Add(dst, 4*depth*nr)
		}
		return
	}
	const rows = 16
	for k := 0; k < depth; k += rows {
		n := min(rows, depth-k)
		src := unsafe.Add(p.b, (p.k0+k)*ld)
		for c := c0; c < c1; c += nr {
			p.kernels.copy(unsafe.Add(dst, 4*((c-c0)*depth+k*nr)), unsafe.Add(src, 4*c), 4*nr, ld, n, min(nr, c1-c), nr)
		}
	}
}

func (t *computeTask) RunIndex(i int) {
	p := t.p
	if !p.cut.serial {
		p.tile(i)
		return
	}
	for j := range p.packIndices() {
		p.packer.RunIndex(j)
	}
	for j := range p.gridRows * p.gridCols {
		p.tile(j)
	}
}

// tile computes one tile of C over the chunk's depth.
func (p *Product) tile(i int) {
	ti, tj := i/p.gridCols, i%p.gridCols
	if p.fusedA() {
		p.packRows(ti)
	}
	if p.fusedB() {
		p.packCols(tj)
	}
	mr, nr, depth := p.kernels.mr, p.kernels.nr, p.k1-p.k0
	i0, j0 := p.m0+ti*p.cut.tileRows, p.n0+tj*p.cut.tileCols
	i1, j1 := min(i0+p.cut.tileRows, p.m1), min(j0+p.cut.tileCols, p.n1)
	whole, rest := (i1-i0)/mr, (i1-i0)%mr
	ldc := 4 * p.mem[2].ld
	t := tile{ldb: 4 * nr, ldc: ldc, step: 4 * depth * mr}
	if p.cut.direct {
		t.ldb = 4 * p.mem[1].ld
	}
	a := unsafe.Add(p.packA, 4*depth*(i0-p.m0))
	for j := j0; j < j1; j += nr {
		b := unsafe.Add(p.packB, 4*depth*(j-p.n0))
		if p.cut.direct {
			b = unsafe.Add(p.b, p.k0*t.ldb+4*j)
			if j1-j < nr {
				// The kernel reads nr columns: of the last sliver, a padded copy.
				t.ldb = 4 * nr
				b = p.packB
				p.kernels.copy(b, unsafe.Add(p.b, p.k0*4*p.mem[1].ld+4*j), 4*nr, 4*p.mem[1].ld, depth, j1-j, nr)
			}
		}
		t.mask = 1<<min(nr, j1-j) - 1
		for k := 0; k < depth; k += KC {
			t.k = min(KC, depth-k)
			t.add = 0
			if p.spec.Accumulate || p.k0+k > 0 {
				t.add = 1
			}
			t.bias = nil
			if p.bias != nil && p.k0+k+t.k == p.spec.K {
				t.bias = unsafe.Add(p.bias, 4*j)
			}
			t.b = unsafe.Add(b, k*t.ldb)
			t.next = uintptr(t.b) + uintptr(t.k*t.ldb)
			t.a = unsafe.Add(a, 4*k*mr)
			t.c = unsafe.Add(p.c, i0*ldc+4*j)
			if t.n = whole; whole > 0 {
				p.kernels.micro(&t, mr)
			}
			if rest > 0 {
				t.n = 1
				t.a = unsafe.Add(t.a, whole*t.step)
				t.c = unsafe.Add(t.c, whole*mr*ldc)
				p.kernels.micro(&t, rest)
			}
		}
	}
	if p.Epilogue != nil && p.k1 == p.spec.K {
		p.Epilogue.Tile(i0, i1, j0, j1)
	}
}
