package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// tile is what a micro-kernel computes: n slivers of mr rows of A times one
// sliver of B. Distances are in bytes. The assembly knows the offsets.
type tile struct {
	a, b, c, bias unsafe.Pointer // bias of C's first column, or nil
	k             int            // depth, at least 1
	n             int            // slivers of A, at least 1
	ldb, ldc      int            // between rows of B's sliver, of C
	step          int            // between slivers of A
	mask          int            // valid columns of C, a bit each, from bit 0
	add           int            // 0 stores, 1 adds to C
	next          uintptr        // what is read next; only brought nearer, never read here
}

// kernels is the set of one level. Methods branch on the level instead of going
// through function values, so that tiles stay on the stack.
type kernels struct {
	level  level.Level
	mr, nr int // rows and columns of a tile of C in registers
	lanes  int // rows that transpose takes at a time
}

func kernelsOf(l level.Level) kernels {
	switch l {
	case level.AVX512:
		return kernels{l, 14, 32, 16}
	case level.AVX2:
		return kernels{l, 6, 16, 8}
	}
	return kernels{level.Portable, 2, 8, 8}
}

// transpose writes element k of source row r to lane r of the row dst+k·ds, for
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

// copy copies depth rows of cols elements and fills them up to width with zeros.
func (s *kernels) copy(dst, src unsafe.Pointer, ds, ss, depth, cols, width int) {
	s.copyLanes(dst, src, ds, ss, depth, 1<<cols-1, 1<<width-1)
}
