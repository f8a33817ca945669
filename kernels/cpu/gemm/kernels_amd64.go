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

// micro computes t.rows rows of each sliver of t.
func (s *kernels) micro(t *tile) {
	switch {
	case s.level == level.AVX512 && 8 < t.rows && t.rows <= 12: // no kernel of AVX-512 has so many
		first, rest := *t, *t
		first.rows = (t.rows - 3) &^ 1
		rest.rows = t.rows - first.rows
		rest.a, rest.c = unsafe.Add(t.a, 4*first.rows), unsafe.Add(t.c, first.rows*t.ldc)
		s.micro(&first)
		s.micro(&rest)
	case s.level == level.Portable && s.form == formPairs:
		pairsPortable(t)
	case s.level == level.Portable:
		microPortable(t)
	case s.form == formPairs:
		pairsAVX2(t)
	case s.level == level.AVX2:
		microAVX2(t)
	case s.form == formBF16:
		bf16AVX512(t)
	case s.form == formBytes || s.form == formFlipped:
		int8AVX512(t)
	default:
		microAVX512(t)
	}
}

// microPack is micro of mr rows for a sliver of B that lies in its matrix, which
// it also writes, packed, to t.to.
func (s *kernels) microPack(t *tile) { f32x14PackAVX512(t) }

func microAVX512(t *tile) {
	switch {
	case t.rows > 8:
		f32x14AVX512(t)
	case t.rows > 6:
		f32x8AVX512(t)
	case t.rows > 4:
		f32x6AVX512(t)
	default:
		f32x4AVX512(t)
	}
}

func bf16AVX512(t *tile) {
	switch {
	case t.rows > 8:
		bf16x14AVX512(t)
	case t.rows > 6:
		bf16x8AVX512(t)
	case t.rows > 4:
		bf16x6AVX512(t)
	default:
		bf16x4AVX512(t)
	}
}

func int8AVX512(t *tile) {
	switch {
	case t.rows > 8:
		int8x14AVX512(t)
	case t.rows > 6:
		int8x8AVX512(t)
	case t.rows > 4:
		int8x6AVX512(t)
	default:
		int8x4AVX512(t)
	}
}

func microAVX2(t *tile) {
	switch {
	case t.rows > 4:
		f32x6AVX2(t)
	case t.rows > 2:
		f32x4AVX2(t)
	default:
		f32x2AVX2(t)
	}
}

func pairsAVX2(t *tile) {
	switch {
	case t.rows > 4:
		pairx6AVX2(t)
	case t.rows > 2:
		pairx4AVX2(t)
	default:
		pairx2AVX2(t)
	}
}

// scaleRows makes rows of at most 32 int32 sums, ld bytes apart, their float32
// elements if the level can, and reports whether.
func (s *kernels) scaleRows(sums, cols, bias, rowScales unsafe.Pointer, ld, rows, n int) bool {
	if s.level != level.AVX512 {
		return false
	}
	scaleAVX512(sums, cols, bias, rowScales, ld, rows, 1<<n-1)
	return true
}
