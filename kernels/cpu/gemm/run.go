package gemm

import (
	"fmt"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

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
