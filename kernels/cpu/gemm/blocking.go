package gemm

import "github.com/spillway-ml/spillway/kernels/cpu/level"

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
