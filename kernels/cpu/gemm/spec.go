package gemm

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
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

	// Symmetric says that A·B, of float32, equals its own transpose bit for bit: B is Aᵀ, or A and
	// B are one symmetric matrix. Elements above the diagonal are copied from below instead of
	// computed. C is replaced (Accumulate off); an Epilogue keeps it symmetric, and sees
	// undefined elements above the diagonal, which are replaced by the copy.
	Symmetric bool

	// In is the type of A and B, Out that of C. Float inputs have any float
	// output, int8 inputs have I32; S8 also BF16 or F16, whose elements are scaled
	// (Product.RunScaled).
	In, Out Type

	// Portable widens bf16 inputs on every CPU, as where it has no instructions for them:
	// then their products have the same bits everywhere too.
	Portable bool
}

// scaled says that scales convert the int32 sums to 16-bit elements.
func (s *Spec) scaled() bool { return s.In == S8 && s.Out != I32 }

// Widened says that a product's sums are those of float32 inputs at the level in
// use, bit for bit: of f32 and f16 always, of bf16 where no instruction for it is
// used.
func Widened(in Type) bool {
	k := bestKernels(in, false, level.Current())
	return k.form == formF32 || k.form == formWide
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
	if given && s.Out == I32 {
		return fmt.Errorf("gemm: a bias on a product of %v: an i32 result takes none", s.In)
	}
	if given && n < s.N {
		return fmt.Errorf("gemm: bias has %d elements; N is %d", n, s.N)
	}
	return nil
}

// Validate returns an error that names the dimension that is wrong.
func (s *Spec) Validate() error {
	switch floats := s.Out == F32 || s.Out == BF16 || s.Out == F16; {
	case s.In > U8S8:
		return fmt.Errorf("gemm: In is %v; inputs are f32, bf16, f16, s8 or u8s8", s.In)
	case s.scaled() && s.Out != BF16 && s.Out != F16:
		return fmt.Errorf("gemm: Out is %v; a product of %v is i32, or scaled bf16 or f16", s.Out, s.In)
	case s.In == U8S8 && s.Out != I32:
		return fmt.Errorf("gemm: Out is %v; a product of %v is i32", s.Out, s.In)
	case !s.In.integer() && !floats:
		return fmt.Errorf("gemm: Out is %v; a product of %v is f32, bf16 or f16", s.Out, s.In)
	}
	for _, d := range [...]struct {
		name string
		n    int
	}{{"M", s.M}, {"N", s.N}, {"K", s.K}} {
		if d.n < 0 {
			return fmt.Errorf("gemm: %s is %d; a dimension is at least 0", d.name, d.n)
		}
	}
	if s.Symmetric && (s.M != s.N || s.Accumulate || s.In != F32 || s.Out != F32) {
		return fmt.Errorf("gemm: a symmetric product of %d rows and %d columns, %v to %v, Accumulate %v: it is square, replaces C and is of f32",
			s.M, s.N, s.In, s.Out, s.Accumulate)
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

// Sizes of the blocking, in rows, columns and units of K: what 32 bits of a
// packed sliver hold (a float32; two 16-bit floats or four bytes of consecutive
// k where the instructions take such).
const (
	chunkRows  = 13 * 168
	chunkCols  = 16 * 128
	chunkDepth = 4 * KC
	// Tiles of a chunk: with fewer, threads wait for the last one. A thread alone
	// waits for none.
	enoughTiles = 32
	// The most of a tile of float32 for a thread alone.
	aloneRows, aloneCols = 8 * 14, 256
	// Up to directRows rows, B is read where it lies if its rows are rows of
	// the product: a packed copy would be read too few times.
	directRows = 28
	// Up to fewRows rows, tiles have all of them, so that each packs its own columns of B
	// and no other waits for them; fewTiles of them are enough.
	fewRows, fewTiles = 8 * 14, 16
	// A product, or a tile, of fewer multiplications is not cut: handing half
	// of it to another thread costs more than it saves.
	serialWork = 1 << 19
	// The most that a kernel's slivers add to rows, columns and depth.
	padRows, padCols, padDepth = 32, 32, 16
	align                      = 64
)

// layout describes the use of a shape's workspace. It is the same for every kernel.
type layout struct {
	rows, cols int // of a chunk
	direct     bool
	// Bytes of packed A and B, of offsets of columns (int8), and of sums of a
	// chunk of C whose 16-bit elements cannot hold them.
	a, b, offsets, sums int64
}

func (l *layout) bytes() int64 {
	if l.a == 0 {
		return 0
	}
	return l.a + l.b + l.offsets + l.sums + align
}

func (s *Spec) layout() layout {
	l := layout{rows: min(s.M, chunkRows), cols: min(s.N, chunkCols)}
	if s.M == 0 || s.N == 0 || s.K == 0 {
		return l
	}
	units := s.K // of the kernel with the smallest units
	if s.In.integer() {
		units = ceil(s.K, 2)
	}
	passes := units > chunkDepth
	if s.Out.size() == 2 && passes {
		l.rows, l.cols = min(s.M, chunkRows/2), min(s.N, chunkCols/2)
		l.sums = 4 * int64(l.rows) * int64(l.cols+padCols)
	}
	depth := int64(ceil(min(units, chunkDepth), padDepth) * padDepth)
	l.direct = s.In == F32 && !s.TransB && s.M <= directRows
	l.a = 4 * depth * int64(l.rows+padRows)
	l.b = 4 * depth * int64(l.cols+padCols)
	if l.direct {
		l.b = 4 * depth * padCols
	}
	if s.In == S8 {
		l.offsets = 4 * int64(l.cols+padCols)
	}
	for _, n := range []*int64{&l.a, &l.b, &l.offsets, &l.sums} {
		*n = (*n + align - 1) / align * align
	}
	return l
}

// blocking describes how a kernel splits a shape. It depends on the shape and the kernel; the
// tile sizes also depend on whether there is only one thread.
type blocking struct {
	layout
	units              int // of K
	depth              int // of a chunk, in units
	tileRows, tileCols int
	serial             bool
	inOrder            bool // one thread computes the tiles, one by one
	onTheWay           bool // the kernel packs B while it computes, where a tile packs it
}

func (s *Spec) blocking(k *kernels, alone bool) blocking {
	b := blocking{layout: s.layout(), units: ceil(s.K, k.group)}
	b.serial = float64(s.M)*float64(s.N)*float64(b.units) < serialWork
	b.rows = min(b.rows, even(s.M, ceil(s.M, max(b.rows, 1)), k.tileRows))
	b.cols = min(b.cols, even(s.N, ceil(s.N, max(b.cols, 1)), k.tileCols))
	b.depth = min(b.units, even(b.units, ceil(b.units, chunkDepth), KC))
	b.inOrder = alone && !b.serial
	b.onTheWay = k.packsOnTheWay() && !s.TransB && !b.direct && s.M >= k.mr
	if s.Symmetric && (b.rows < s.M || b.cols < s.N) { // a chunk's columns may begin below its rows
		b.onTheWay = false
	}
	tileRows, tileCols, enough := k.tileRows, k.tileCols, enoughTiles
	few := !alone && !k.tiles() && !s.TransB && s.M <= fewRows
	if few {
		enough = fewTiles
	}
	if alone && !k.tiles() {
		enough = 1
		if k.form == formF32 && k.level == level.AVX512 {
			tileRows, tileCols = aloneRows, aloneCols
		}
	}
	gridRows, gridCols := ceil(b.rows, tileRows), ceil(b.cols, tileCols)
	for {
		b.tileRows, b.tileCols = even(b.rows, gridRows, k.mr), even(b.cols, gridCols, k.nr)
		if b.tileRows*b.tileCols*b.depth < 2*serialWork || ceil(b.rows, b.tileRows)*ceil(b.cols, b.tileCols) >= enough {
			return b
		}
		switch moreRows, moreCols := b.tileRows > k.mr, b.tileCols > k.nr; {
		case few && moreCols:
			gridCols *= 2
		case k.tiles() && b.tileRows > 2*k.mr: // a sliver of A is read by all columns of a tile
			gridRows *= 2
		case moreRows && (b.tileRows >= b.tileCols || !moreCols):
			gridRows *= 2
		case moreCols:
			gridCols *= 2
		default:
			return b
		}
	}
}

// even is the size of parts, a multiple of unit, that cuts n into at most that
// many parts as evenly as it can.
func even(n, parts, unit int) int {
	return ceil(ceil(n, max(parts, 1)), unit) * unit
}

func ceil(n, d int) int { return (n + d - 1) / d }

// Workspace returns the bytes of scratch memory that a product of that shape
// needs. It depends on the shape alone.
func Workspace(s Spec) int64 {
	if s.Validate() != nil {
		return 0
	}
	l := s.layout()
	return l.bytes()
}
