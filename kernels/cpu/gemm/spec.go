package gemm

import (
	"fmt"
	"math"
	"math/bits"
)

// KC is the depth of a block of K, the same for every shape and level: an
// element's bits depend on it.
const KC = 256

// Spec is the shape of a product C(M,N) = A(M,K)·B(K,N). Sizes are in elements.
type Spec struct {
	M, N, K int

	// TransA says that A is stored as (K,M), TransB that B is stored as (N,K).
	// C is always stored as (M,N). Rows are contiguous.
	TransA, TransB bool

	// LdA, LdB and LdC are the distances between rows as stored; 0 means that
	// the matrix has no gaps.
	LdA, LdB, LdC int

	// Accumulate adds the product to C instead of replacing it.
	Accumulate bool
}

// Forward is y(tokens,out) = x(tokens,in)·W(in,out), or ·Wᵀ where W is stored
// (out,in).
func Forward(tokens, in, out int, outByIn bool) Spec {
	return Spec{M: tokens, N: out, K: in, TransB: outByIn}
}

// InputGradient is dx(tokens,in) = dy(tokens,out)·Wᵀ, W stored as in Forward.
func InputGradient(tokens, in, out int, outByIn bool) Spec {
	return Spec{M: tokens, N: in, K: out, TransB: !outByIn}
}

// WeightGradient is dW = xᵀ·dy (in,out), or dyᵀ·x (out,in) where W is stored
// (out,in): then dy is the product's A and x its B.
func WeightGradient(tokens, in, out int, outByIn bool) Spec {
	if outByIn {
		in, out = out, in
	}
	return Spec{M: in, N: out, K: tokens, TransA: true}
}

// stored returns the rows, columns and row distance of A, B and C in memory.
func (s *Spec) stored() [3]matrix {
	a := matrix{"A", "LdA", s.M, s.K, s.LdA}
	if s.TransA {
		a.rows, a.cols = s.K, s.M
	}
	b := matrix{"B", "LdB", s.K, s.N, s.LdB}
	if s.TransB {
		b.rows, b.cols = s.N, s.K
	}
	m := [3]matrix{a, b, {"C", "LdC", s.M, s.N, s.LdC}}
	for i := range m {
		if m[i].ld == 0 {
			m[i].ld = m[i].cols
		}
	}
	return m
}

type matrix struct {
	name, ldName   string
	rows, cols, ld int
}

// elements is the number of elements from the first to the last.
func (m *matrix) elements() int {
	if m.rows == 0 || m.cols == 0 {
		return 0
	}
	return (m.rows-1)*m.ld + m.cols
}

// holds returns an error if a slice of n elements is too short for m.
func (m *matrix) holds(n int) error {
	if n < m.elements() {
		return fmt.Errorf("gemm: %s has %d elements; %d rows of %d, %d apart, need %d", m.name, n, m.rows, m.cols, m.ld, m.elements())
	}
	return nil
}

func (s *Spec) holdsBias(given bool, n int) error {
	if given && n < s.N {
		return fmt.Errorf("gemm: bias has %d elements; N is %d", n, s.N)
	}
	return nil
}

// Validate returns an error that names the dimension that is wrong.
func (s *Spec) Validate() error {
	for _, d := range []struct {
		name string
		n    int
	}{{"M", s.M}, {"N", s.N}, {"K", s.K}} {
		if d.n < 0 {
			return fmt.Errorf("gemm: %s is %d; a dimension is at least 0", d.name, d.n)
		}
	}
	for _, m := range s.stored() {
		if m.ld < m.cols {
			return fmt.Errorf("gemm: %s is %d; %s is stored in rows of %d elements, so it is at least that (or 0)", m.ldName, m.ld, m.name, m.cols)
		}
		hi, lo := bits.Mul64(uint64(m.rows), uint64(m.ld))
		if hi != 0 || lo > math.MaxInt/16 {
			return fmt.Errorf("gemm: %s of %d rows, %d elements apart, is larger than memory", m.name, m.rows, m.ld)
		}
	}
	return nil
}

// Sizes of the blocking, in elements. They hold at every level, so that the
// workspace and the split into indices depend on the shape alone.
const (
	// A tile's rows and columns are these or halves of them, down to the least,
	// multiples of every kernel's rows and columns.
	maxTileRows, minTileRows = 168, 42
	maxTileCols, minTileCols = 128, 32
	chunkRows                = 13 * maxTileRows
	chunkCols                = 16 * maxTileCols
	chunkDepth               = 4 * KC
	// Tiles of a chunk: with fewer, threads wait for the last one.
	enoughTiles = 32
	// Up to directRows rows, B is read where it lies if its rows are rows of
	// the product: a packed copy would be read too few times.
	directRows = 28
	// A product, or a tile, of fewer multiplications is not cut: handing half
	// of it to another thread costs more than it saves.
	serialWork = 1 << 19
	// The most that a kernel's slivers add to rows and columns.
	padRows, padCols = 14, 32
	align            = 64
)

// blocking is how a shape is cut.
type blocking struct {
	rows, cols, depth  int // of a chunk
	tileRows, tileCols int
	direct             bool // B is not packed
	serial             bool
	sizeA, sizeB       int64 // bytes of the packed chunks
}

func (s *Spec) blocking() blocking {
	b := blocking{
		rows: min(s.M, chunkRows), cols: min(s.N, chunkCols), depth: min(s.K, chunkDepth),
		tileRows: maxTileRows, tileCols: maxTileCols,
		direct: !s.TransB && s.M <= directRows,
	}
	b.serial = float64(s.M)*float64(s.N)*float64(s.K) < serialWork
	if s.M == 0 || s.N == 0 || s.K == 0 {
		return b
	}
	for b.tileRows*b.tileCols*b.depth >= 2*serialWork && ceil(b.rows, b.tileRows)*ceil(b.cols, b.tileCols) < enoughTiles {
		switch rows, cols := min(b.rows, b.tileRows), min(b.cols, b.tileCols); {
		case b.tileRows > minTileRows && (rows >= cols || b.tileCols == minTileCols):
			b.tileRows /= 2
			continue
		case b.tileCols > minTileCols:
			b.tileCols /= 2
			continue
		}
		break
	}
	b.sizeA = 4 * int64(b.depth) * int64(b.rows+padRows)
	b.sizeA = (b.sizeA + align - 1) / align * align
	b.sizeB = 4 * int64(b.depth) * int64(b.cols+padCols)
	if b.direct {
		b.sizeB = 4 * int64(b.depth) * padCols
	}
	return b
}

func ceil(n, d int) int { return (n + d - 1) / d }

// Workspace returns the bytes of scratch memory that a product of that shape
// needs. It depends on the shape alone.
func Workspace(s Spec) int64 {
	if s.Validate() != nil {
		return 0
	}
	b := s.blocking()
	if b.sizeA == 0 {
		return 0
	}
	return b.sizeA + b.sizeB + align
}
