package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// tile is what a micro-kernel computes: n slivers of mr rows of A times one
// sliver of B. Distances are in bytes. The assembly knows the offsets.
type tile struct {
	a, b, c, bias unsafe.Pointer // bias of C's first column, or nil
	k             int            // depth in units (tile registers: in blocks of 16), at least 1
	n             int            // slivers of A, at least 1
	ldb, ldc      int            // between rows of B's sliver, of C
	step          int            // between slivers of A
	mask          int            // valid columns of C, a bit each, from bit 0
	add           int            // 0 stores, 1 adds to C
	next          uintptr        // what is read next; only brought nearer, never read here

	// Of tile registers.
	row    int // between rows of A
	block  int // between blocks of 16 units of A
	times  int // blocks of K, k deep each; a, b, next and add move on with them
	config [64]byte

	// Of a row of tiles (rowTiles).
	out                  unsafe.Pointer // first 16-bit element of C; nil: the sums stay at c
	ldo                  int            // between its rows
	_                    uintptr        // the kernel's own
	stepB, stepC         int            // between slivers of B, tiles of sums
	rowScales, colScales unsafe.Pointer // of int8

	// Of AVX-512's micro-kernels: from next on, a line every 2 units of K, so many
	// bytes apart; where the one that packs B writes it.
	ahead int
	to    unsafe.Pointer
}

// configure sets the shapes of the tile registers: C in 0 … 3, row by row, A in
// 4 and 5, B in 6 and 7 (Intel SDM volume 1, 18.3).
func (t *tile) configure(rows, cols int) {
	t.config = [64]byte{0: 1} // palette 1
	set := func(tile, rows, cols int) {
		if rows > 0 && cols > 0 {
			t.config[16+2*tile] = byte(4 * cols)
			t.config[48+tile] = byte(rows)
		}
	}
	r, c := [2]int{min(rows, 16), max(rows-16, 0)}, [2]int{min(cols, 16), max(cols-16, 0)}
	for i := range 2 {
		for j := range 2 {
			set(2*i+j, r[i], c[j])
		}
		set(4+i, r[i], 16)
		set(6+i, 16, c[i])
	}
}

// form is the content of a packed 32-bit unit and the instructions that use it.
type form uint8

const (
	formF32     form = iota
	formWide         // 16-bit floats, packed as float32
	formBF16         // pairs, VDPBF16PS
	formBytes        // fours of uint8 and int8, VPDPBUSD
	formFlipped      // the same where A is int8: 128 is added to it, and 128 times B's column sums taken away
	formPairs        // pairs of int16, VPMADDWD
	formTiles        // pairs or fours, AMX
)

// kernels is the set of one level for inputs of one type. Methods branch
// instead of going through function values, so that tiles stay on the stack.
type kernels struct {
	level              level.Level
	in                 Type
	form               form
	mr, nr             int // rows and columns of a tile of C in registers
	lanes              int // rows that transposeLanes takes at a time
	group              int // elements of k a unit
	depth              int // a sliver's depth is a multiple of it
	tileRows, tileCols int // of a task's tile; multiples of mr and nr
}

func (s *kernels) tiles() bool { return s.form == formTiles }

// packsOnTheWay says that microPack can be called.
func (s *kernels) packsOnTheWay() bool { return s.form == formF32 && s.level == level.AVX512 }

// allKernels returns the n sets for a type that may run at a level, the best
// first.
func allKernels(in Type, l level.Level) (all [3]kernels, n int) {
	base := kernels{level: l, in: in, mr: 2, nr: 8, lanes: 8, group: 1, depth: 1, tileRows: 168, tileCols: 128}
	switch l {
	case level.AVX512:
		base.mr, base.nr, base.lanes = 14, 32, 16
	case level.AVX2:
		base.mr, base.nr, base.lanes = 6, 16, 8
	}
	tiles := base
	tiles.form, tiles.mr, tiles.nr, tiles.depth, tiles.tileRows = formTiles, 32, 32, 16, 256
	pairs := base
	pairs.form, pairs.group = formPairs, 2
	with := func(k kernels, form form, group int, feature level.Feature) {
		if l == level.AVX512 && level.Has(feature) {
			k.form, k.group = form, group
			all[n] = k
			n++
		}
	}
	switch in {
	case F32:
		all[0] = base
		return all, 1
	case BF16:
		with(tiles, formTiles, 2, level.AMXBF16)
		with(base, formBF16, 2, level.AVX512BF16)
		base.form = formWide
		all[n] = base
		if n > 0 && all[n-1].form == formBF16 && !level.Has(level.FastBF16) {
			all[n-1], all[n] = all[n], all[n-1]
		}
		return all, n + 1
	case F16:
		base.form = formWide
		all[0] = base
		return all, 1
	case U8S8:
		with(tiles, formTiles, 4, level.AMXInt8)
		with(base, formBytes, 4, level.AVX512VNNI)
	case S8:
		with(tiles, formTiles, 4, level.AMXInt8)
		with(base, formFlipped, 4, level.AVX512VNNI)
	}
	if l == level.AVX512 { // the pair kernels are AVX2's
		pairs.level, pairs.mr, pairs.nr, pairs.lanes = level.AVX2, 6, 16, 8
	}
	all[n] = pairs
	return all, n + 1
}

// bestKernels returns the set that products of a type use at a level; see Spec.Portable.
func bestKernels(in Type, portable bool, l level.Level) kernels {
	all, n := allKernels(in, l)
	for _, k := range all[:n] {
		if !portable || in != BF16 || k.form == formWide {
			return k
		}
	}
	panic("gemm: no kernel widens bf16")
}

// transpose writes word k of source row r to lane r of the row dst+k·ds, for
// all width lanes; lanes past the rows repeat the last one.
func (s *kernels) transpose(dst, src unsafe.Pointer, ds, ss, rows, depth, width int) {
	for l := 0; l < width; l += s.lanes {
		n := min(s.lanes, rows-l)
		from := unsafe.Add(src, l*ss)
		if n <= 0 {
			n, from = 1, unsafe.Add(src, (rows-1)*ss)
		}
		s.transposeLanes(unsafe.Add(dst, 4*l), from, ds, ss, n, depth, 1<<min(s.lanes, width-l)-1)
	}
}

// copy copies depth rows of cols words and fills them up to width with zeros.
func (s *kernels) copy(dst, src unsafe.Pointer, ds, ss, depth, cols, width int) {
	s.copyLanes(dst, src, ds, ss, depth, 1<<cols-1, 1<<width-1)
}

// widen converts n 16-bit floats.
func (s *kernels) widen(t Type, dst, src unsafe.Pointer, n int) {
	done := s.widenVectors(t, dst, src, n)
	from := unsafe.Slice((*uint16)(src), n)
	to := unsafe.Slice((*float32)(dst), n)
	for i := done; i < n; i++ {
		to[i] = widened(t, from[i])
	}
}

// narrow rounds rows of at most 32 float32 to 16 bits. Distances are in bytes.
func (s *kernels) narrow(t Type, dst, src unsafe.Pointer, ds, ss, rows, cols int) {
	if s.narrowRows(t, dst, src, ds, ss, rows, cols) {
		return
	}
	for i := range rows {
		from := unsafe.Slice((*float32)(unsafe.Add(src, i*ss)), cols)
		to := unsafe.Slice((*uint16)(unsafe.Add(dst, i*ds)), cols)
		for j, x := range from {
			to[j] = narrowed(t, x)
		}
	}
}

func widened(t Type, h uint16) float32 {
	if t == BF16 {
		return num.FromBF16(h)
	}
	return num.FromF16(h)
}

func narrowed(t Type, x float32) uint16 {
	if t == BF16 {
		return num.BF16(x)
	}
	return num.F16(x)
}
