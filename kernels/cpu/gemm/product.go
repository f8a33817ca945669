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
// any order; how C is cut into tiles is not defined. Of a symmetric product, tiles above the
// diagonal are left out (Spec.Symmetric).
type Epilogue interface{ Tile(r0, r1, c0, c1 int) }

// Product multiplies matrices of one shape. Its calls allocate nothing. It
// holds the state of a call: one call at a time.
type Product struct {
	// Epilogue, if not nil, finishes each tile. Set it between calls.
	Epilogue Epilogue

	spec    Spec
	mem     [3]matrix
	cut     blocking    // of the call
	cuts    [2]blocking // for several threads, for one
	kernels kernels

	a, b, c, bias  unsafe.Pointer // of the call; bias may be nil
	scales         [2][]float32   // of rows and of columns, where the product is scaled
	biasIn         bool           // bias has the type of the inputs, 16 bits
	packA, packB   unsafe.Pointer
	offsets, sums  unsafe.Pointer
	lda, ldb, ldc  int // bytes between stored rows
	m0, m1, n0, n1 int // the chunk
	k0, k1         int // in units
	depth          int // of the chunk's slivers: k1−k0, or more where tiles need it
	last           bool
	newA, newB     bool // the chunk's A, B are not yet packed
	gridRows       int  // tiles of the chunk
	gridCols       int
	packer         packTask
	computer       computeTask
	mirror         mirrorTask
}

type packTask struct{ p *Product }
type computeTask struct{ p *Product }
type mirrorTask struct{ p *Product }

// New returns a Product of that shape.
func New(s Spec) (*Product, error) {
	p := new(Product)
	if err := p.Reset(s); err != nil {
		return nil, err
	}
	return p, nil
}

// Reset gives p another shape, without allocating. It keeps the Epilogue.
func (p *Product) Reset(s Spec) error {
	if err := s.Validate(); err != nil {
		return err
	}
	p.reset(s, bestKernels(s.In, s.Portable, level.Current()))
	return nil
}

func (p *Product) reset(s Spec, k kernels) {
	*p = Product{Epilogue: p.Epilogue, spec: s, mem: s.stored(), kernels: k}
	p.cuts = [2]blocking{s.blocking(&k, false), s.blocking(&k, true)}
	p.lda, p.ldb, p.ldc = p.mem[0].ld*s.In.size(), p.mem[1].ld*s.In.size(), p.mem[2].ld*s.Out.size()
	p.packer.p, p.computer.p, p.mirror.p = p, p, p
}

// Run is RunBytes for a product of float32 with a float32 result.
func (p *Product) Run(pl *pool.Pool, a, b, c, bias []float32, work []byte) error {
	if p.spec.In != F32 || p.spec.Out != F32 {
		return fmt.Errorf("gemm: Run on a product of %v with output %v: it takes f32; RunBytes takes any", p.spec.In, p.spec.Out)
	}
	return p.RunBytes(pl, Bytes(a), Bytes(b), Bytes(c), bias, work)
}

// RunBytes computes C = A·B, or C += A·B, then adds bias (N) to every row of C
// unless bias is nil, then lets the Epilogue see the result. The matrices are
// given as their memory. An I32 product takes no bias. work is scratch of at
// least Workspace bytes with any content. C must overlap neither A, B, bias nor
// work.
func (p *Product) RunBytes(pl *pool.Pool, a, b, c []byte, bias []float32, work []byte) error {
	return p.execute(pl, a, b, c, Bytes(bias), 4, work)
}

// RunHalf is RunBytes for 16-bit inputs and a bias of their type.
func (p *Product) RunHalf(pl *pool.Pool, a, b []uint16, c []byte, bias []uint16, work []byte) error {
	if p.spec.In.size() != 2 {
		return fmt.Errorf("gemm: RunHalf on a product of %v: it takes bf16 or f16", p.spec.In)
	}
	return p.execute(pl, Bytes(a), Bytes(b), c, Bytes(bias), 2, work)
}

// RunScaled is RunBytes for int8 codes with scales: an element is
// float32(sum)·rows[i]·cols[j] + bias[j], or that added to the old one, each step
// rounded in float32, and rounded to 16 bits once. The bias has C's type.
func (p *Product) RunScaled(pl *pool.Pool, a, b []byte, rows, cols []float32, c []byte, bias []uint16, work []byte) error {
	switch {
	case !p.spec.scaled():
		return fmt.Errorf("gemm: RunScaled on a product of %v with output %v: it takes s8 to bf16 or f16", p.spec.In, p.spec.Out)
	case len(rows) < p.spec.M || len(cols) < p.spec.N:
		return fmt.Errorf("gemm: %d scales of rows and %d of columns; M %d, N %d need one each", len(rows), len(cols), p.spec.M, p.spec.N)
	}
	p.scales = [2][]float32{rows, cols}
	err := p.execute(pl, a, b, c, Bytes(bias), 2, work)
	p.scales = [2][]float32{}
	return err
}

// execute is RunBytes with a bias of elements of so many bytes.
func (p *Product) execute(pl *pool.Pool, a, b, c, bias []byte, biasSize int, work []byte) error {
	if p.spec.scaled() && p.scales[0] == nil && p.spec.M > 0 {
		return fmt.Errorf("gemm: a product of %v with output %v without scales: RunScaled takes them", p.spec.In, p.spec.Out)
	}
	for i, v := range [3][]byte{a, b, c} {
		if err := p.mem[i].holds(len(v) / p.typeOf(i).size()); err != nil {
			return err
		}
	}
	if err := p.spec.holdsBias(bias != nil, len(bias)/biasSize); err != nil {
		return err
	}
	p.cut = p.cuts[0]
	if pl.Threads() == 1 {
		p.cut = p.cuts[1]
	}
	if need := p.cut.bytes(); int64(len(work)) < need {
		return fmt.Errorf("gemm: the workspace has %d bytes; M %d, N %d, K %d need %d", len(work), p.spec.M, p.spec.N, p.spec.K, need)
	}
	if p.spec.M == 0 || p.spec.N == 0 {
		return nil
	}
	out := c[:p.mem[2].elements()*p.spec.Out.size()]
	for i, v := range [4][]byte{a, b, bias, work} {
		if overlap(out, v) {
			return fmt.Errorf("gemm: C overlaps %s", [4]string{"A", "B", "bias", "the workspace"}[i])
		}
	}
	p.a, p.b, p.c, p.bias = unsafe.Pointer(unsafe.SliceData(a)), unsafe.Pointer(unsafe.SliceData(b)), unsafe.Pointer(unsafe.SliceData(c)), nil
	if bias != nil {
		p.bias = unsafe.Pointer(unsafe.SliceData(bias))
	}
	p.biasIn = biasSize == 2
	if p.spec.K == 0 {
		p.noDepth()
	} else {
		w := unsafe.Pointer(unsafe.SliceData(work))
		p.packA = unsafe.Add(w, -uintptr(w)&(align-1))
		p.packB = unsafe.Add(p.packA, p.cut.a)
		p.offsets = unsafe.Add(p.packB, p.cut.b)
		p.sums = unsafe.Add(p.offsets, p.cut.offsets)
		p.run(pl)
	}
	if p.spec.Symmetric {
		pl.Run(ceil(p.spec.N, mirrorCols), &p.mirror)
	}
	p.a, p.b, p.c, p.bias, p.packA, p.packB, p.offsets, p.sums = nil, nil, nil, nil, nil, nil, nil, nil
	return nil
}

func (p *Product) typeOf(matrix int) Type {
	if matrix == 2 {
		return p.spec.Out
	}
	return p.spec.In
}

func overlap(x, y []byte) bool {
	if len(x) == 0 || len(y) == 0 {
		return false
	}
	px, py := uintptr(unsafe.Pointer(&x[0])), uintptr(unsafe.Pointer(&y[0]))
	return px < py+uintptr(len(y)) && py < px+uintptr(len(x))
}

// noDepth is the product over no k: the sum of nothing is +0.
func (p *Product) noDepth() {
	for i := range p.spec.M {
		row := unsafe.Add(p.c, i*p.ldc)
		if !p.spec.Accumulate {
			clear(unsafe.Slice((*byte)(row), p.spec.N*p.spec.Out.size()))
		}
		for j := range p.spec.N {
			if p.bias == nil {
				break
			}
			b := p.biasAt(j)
			switch p.spec.Out {
			case F32:
				*f32at(row, 4*j) += b
			default:
				h := (*uint16)(unsafe.Add(row, 2*j))
				*h = narrowed(p.spec.Out, widened(p.spec.Out, *h)+b)
			}
		}
	}
	if p.Epilogue != nil {
		p.Epilogue.Tile(0, p.spec.M, 0, p.spec.N)
	}
}

// biasType is the type of a 16-bit bias.
func (p *Product) biasType() Type {
	if p.spec.scaled() {
		return p.spec.Out
	}
	return p.spec.In
}

// biasAt returns the bias of a column.
func (p *Product) biasAt(j int) float32 {
	if p.biasIn {
		return widened(p.biasType(), *(*uint16)(unsafe.Add(p.bias, 2*j)))
	}
	return *f32at(p.bias, 4*j)
}

// biasOf returns the bias of columns [j0, j1) as float32: where it lies, or
// widened into to.
func (p *Product) biasOf(j0, j1 int, to *[maxTileCols]float32) unsafe.Pointer {
	if !p.biasIn {
		return unsafe.Add(p.bias, 4*j0)
	}
	p.kernels.widen(p.biasType(), unsafe.Pointer(to), unsafe.Add(p.bias, 2*j0), j1-j0)
	return unsafe.Pointer(to)
}

// run goes over chunks. K is innermost, so that a chunk of C is finished before
// the next begins; what is already packed is not packed again.
func (p *Product) run(pl *pool.Pool) {
	haveA, haveB := [2]int{-1, -1}, [2]int{-1, -1}
	for n0 := 0; n0 < p.spec.N; n0 += p.cut.cols {
		p.n0, p.n1 = n0, min(n0+p.cut.cols, p.spec.N)
		for m0 := 0; m0 < p.spec.M; m0 += p.cut.rows {
			p.m0, p.m1 = m0, min(m0+p.cut.rows, p.spec.M)
			for k0 := 0; k0 < p.cut.units; k0 += p.cut.depth {
				p.k0, p.k1 = k0, min(k0+p.cut.depth, p.cut.units)
				p.depth = ceil(p.k1-p.k0, p.kernels.depth) * p.kernels.depth
				p.last = p.k1 == p.cut.units
				p.newA, p.newB = haveA != [2]int{m0, k0} && !p.directA(), haveB != [2]int{n0, k0} && !p.cut.direct
				haveA, haveB = [2]int{m0, k0}, [2]int{n0, k0}
				p.chunk(pl)
			}
		}
	}
}

// chunk packs and computes one chunk. A strip of A or B that one tile alone
// uses, or of which one thread alone knows the first that does, is packed by
// that tile, just before it reads it.
func (p *Product) chunk(pl *pool.Pool) {
	p.gridRows = ceil(p.m1-p.m0, p.cut.tileRows)
	p.gridCols = ceil(p.n1-p.n0, p.cut.tileCols)
	if p.cut.serial || p.cut.inOrder {
		pl.Run(1, &p.computer)
		return
	}
	pl.Run(p.packIndices(), &p.packer)
	pl.Run(p.gridRows*p.gridCols, &p.computer)
}

// fusedA and fusedB say that each strip of A, or of B, is packed by a tile.
func (p *Product) fusedA() bool { return p.newA && (p.gridCols == 1 || p.cut.inOrder) }
func (p *Product) fusedB() bool {
	return p.newB && (p.gridRows == 1 && p.gridCols > 1 || p.cut.inOrder)
}

// directA says that the kernel reads A where it lies: tiles of 16 units of k
// are rows of it.
func (p *Product) directA() bool {
	return p.kernels.tiles() && !p.spec.TransA && p.spec.K*p.spec.In.size()%(4*p.kernels.depth) == 0
}

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

func (t *computeTask) RunIndex(i int) {
	p := t.p
	if !p.cut.serial && !p.cut.inOrder {
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

// area is a part of C: rows [i0,i1), columns [j0,j1).
type area struct{ i0, i1, j0, j1 int }

// tile computes one tile of C over the chunk's depth.
func (p *Product) tile(i int) {
	ti, tj := i/p.gridCols, i%p.gridCols
	if p.fusedA() && tj == 0 {
		p.packRows(ti)
	}
	if p.fusedB() && ti == 0 && !p.cut.onTheWay {
		p.packCols(tj)
	}
	x := area{i0: p.m0 + ti*p.cut.tileRows, j0: p.n0 + tj*p.cut.tileCols}
	x.i1, x.j1 = min(x.i0+p.cut.tileRows, p.m1), min(x.j0+p.cut.tileCols, p.n1)
	if p.spec.Symmetric {
		if x.j0 >= x.i1 {
			return
		}
		x.j1 = min(x.j1, x.j0+ceil(x.i1-x.j0, p.kernels.nr)*p.kernels.nr)
	}
	if rows, cols := p.rowTiles(x); rows > 0 {
		p.part(area{x.i0, x.i0 + rows, x.j0 + cols, x.j1})
		p.part(area{x.i0 + rows, x.i1, x.j0, x.j1})
	} else {
		p.part(x)
	}
	if p.Epilogue != nil && p.last {
		p.Epilogue.Tile(x.i0, x.i1, x.j0, x.j1)
	}
}

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

// maxTileRows, maxTileCols and maxNR bound a tile and a strip of any kernel.
const maxTileRows, maxTileCols, maxNR = 256, 256, 32

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

// mirrorCols is the columns of C that one task of the mirror fills above the diagonal.
const mirrorCols = 32

// RunIndex copies what lies below the diagonal to above it, for some columns.
func (t *mirrorTask) RunIndex(i int) {
	p, j0 := t.p, i*mirrorCols
	cols := min(mirrorCols, p.spec.N-j0)
	at := func(row, col int) unsafe.Pointer { return unsafe.Add(p.c, row*p.ldc+4*col) }
	if j0 > 0 {
		p.kernels.transpose(at(0, j0), at(j0, 0), p.ldc, p.ldc, cols, j0, cols)
	}
	for row := j0; row < j0+cols; row++ {
		for col := row + 1; col < j0+cols; col++ {
			*f32at(at(row, col), 0) = *f32at(at(col, row), 0)
		}
	}
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
