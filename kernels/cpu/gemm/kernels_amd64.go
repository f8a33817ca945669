package gemm

import (
	"math/bits"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

func (s *kernels) transposeLanes(dst, src unsafe.Pointer, ds, ss, rows, depth, mask int) {
	if s.level == level.AVX512 {
		transposeAVX512(dst, src, ds, ss, rows, depth, mask)
		return
	}
	transposePortable(dst, src, ds, ss, rows, depth, mask)
}

func (s *kernels) copyLanes(dst, src unsafe.Pointer, ds, ss, depth, load, store int) {
	switch s.level {
	case level.AVX512:
		copyAVX512(dst, src, ds, ss, depth, load, store)
	case level.AVX2:
		width, cols := bits.OnesCount(uint(store)), bits.OnesCount(uint(load))
		for k := 0; k < depth; k += rowsAtOnce {
			packF32.copyEdge(width, unsafe.Add(dst, k*ds), unsafe.Add(src, k*ss), ss, min(rowsAtOnce, depth-k), 4*cols, 1)
		}
	default:
		copyPortable(dst, src, ds, ss, depth, load, store)
	}
}

// widenVectors converts the whole vectors of n elements and returns how many
// elements they hold.
func (s *kernels) widenVectors(t Type, dst, src unsafe.Pointer, n int) int {
	switch {
	case s.level == level.AVX512 && t == BF16:
		widenBF16AVX512(dst, src, n/16)
		return n &^ 15
	case s.level == level.AVX512:
		widenF16AVX512(dst, src, n/16)
		return n &^ 15
	case s.level == level.AVX2 && t == BF16:
		widenBF16AVX2(dst, src, n/8)
		return n &^ 7
	case s.level == level.AVX2:
		widenF16AVX2(dst, src, n/8)
		return n &^ 7
	}
	return 0
}

// narrowRows rounds rows if the level can do all of them, and reports whether.
func (s *kernels) narrowRows(t Type, dst, src unsafe.Pointer, ds, ss, rows, cols int) bool {
	switch {
	case s.level == level.AVX512 && t == BF16:
		narrowBF16AVX512(dst, src, ds, ss, rows, 1<<cols-1)
	case s.level == level.AVX512:
		narrowF16AVX512(dst, src, ds, ss, rows, 1<<cols-1)
	case s.level == level.AVX2 && cols == 16 && t == BF16:
		narrowBF16AVX2(dst, src, ds, ss, rows)
	case s.level == level.AVX2 && cols == 16:
		narrowF16AVX2(dst, src, ds, ss, rows)
	default:
		return false
	}
	return true
}

// micro computes rows rows of each sliver of t.
func (s *kernels) micro(t *tile, rows int) {
	switch {
	case s.level == level.Portable && s.form == formPairs:
		pairsPortable(t, rows)
	case s.level == level.Portable:
		microPortable(t, rows)
	case s.form == formPairs:
		pairsAVX2(t, rows)
	case s.level == level.AVX2:
		microAVX2(t, rows)
	case s.form == formBF16:
		bf16AVX512(t, rows)
	case s.form == formBytes || s.form == formFlipped:
		int8AVX512(t, rows)
	default:
		microAVX512(t, rows)
	}
}

// microPack is micro of mr rows for a sliver of B that lies in its matrix, which
// it also writes, packed, to t.to.
func (s *kernels) microPack(t *tile) { f32x14PackAVX512(t) }

// scaleRows makes rows of at most 32 int32 sums, ld bytes apart, their float32
// elements if the level can, and reports whether.
func (s *kernels) scaleRows(sums, cols, bias, rowScales unsafe.Pointer, ld, rows, n int) bool {
	if s.level != level.AVX512 {
		return false
	}
	scaleAVX512(sums, cols, bias, rowScales, ld, rows, 1<<n-1)
	return true
}

// microTiles computes up to 32 rows of each sliver of t, up to 32 columns.
func (s *kernels) microTiles(t *tile, rows, cols int) {
	switch s.in {
	case BF16:
		bf16AMX(t, rows, cols)
	case S8:
		s8AMX(t, rows, cols)
	case U8S8:
		u8AMX(t, rows, cols)
	}
}

// interleave joins the elements of consecutive source rows in units; cols of
// width lanes are read, the others are zeros.
func (s *kernels) interleave(dst, src unsafe.Pointer, ds, ss, units, cols, width int) {
	if s.group == 2 {
		interleave16AVX512(dst, src, ds, ss, units, 1<<cols-1, 1<<width-1)
	} else {
		interleave8AVX512(dst, src, ds, ss, units, 1<<cols-1, 1<<width-1)
	}
}
