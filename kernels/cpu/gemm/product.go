package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
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

// area is a part of C: rows [i0,i1), columns [j0,j1).
type area struct{ i0, i1, j0, j1 int }

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

// maxTileRows, maxTileCols and maxNR bound a tile and a strip of any kernel.
const maxTileRows, maxTileCols, maxNR = 256, 256, 32

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

func (p *Product) typeOf(matrix int) Type {
	if matrix == 2 {
		return p.spec.Out
	}
	return p.spec.In
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

// elements returns the chunk's first element of k, and how many it has.
func (p *Product) elements() (first, n int) {
	first = p.k0 * p.kernels.group
	return first, min(p.k1*p.kernels.group, p.spec.K) - first
}
