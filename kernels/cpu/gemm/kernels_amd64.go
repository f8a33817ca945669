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

func microAVX512(t *tile, rows int) {
	switch rows {
	case 14:
		f32x14AVX512(t)
	case 13:
		f32x13AVX512(t)
	case 12:
		f32x12AVX512(t)
	case 11:
		f32x11AVX512(t)
	case 10:
		f32x10AVX512(t)
	case 9:
		f32x9AVX512(t)
	case 8:
		f32x8AVX512(t)
	case 7:
		f32x7AVX512(t)
	case 6:
		f32x6AVX512(t)
	case 5:
		f32x5AVX512(t)
	case 4:
		f32x4AVX512(t)
	case 3:
		f32x3AVX512(t)
	case 2:
		f32x2AVX512(t)
	case 1:
		f32x1AVX512(t)
	}
}

func bf16AVX512(t *tile, rows int) {
	switch rows {
	case 14:
		bf16x14AVX512(t)
	case 13:
		bf16x13AVX512(t)
	case 12:
		bf16x12AVX512(t)
	case 11:
		bf16x11AVX512(t)
	case 10:
		bf16x10AVX512(t)
	case 9:
		bf16x9AVX512(t)
	case 8:
		bf16x8AVX512(t)
	case 7:
		bf16x7AVX512(t)
	case 6:
		bf16x6AVX512(t)
	case 5:
		bf16x5AVX512(t)
	case 4:
		bf16x4AVX512(t)
	case 3:
		bf16x3AVX512(t)
	case 2:
		bf16x2AVX512(t)
	case 1:
		bf16x1AVX512(t)
	}
}

func int8AVX512(t *tile, rows int) {
	switch rows {
	case 14:
		int8x14AVX512(t)
	case 13:
		int8x13AVX512(t)
	case 12:
		int8x12AVX512(t)
	case 11:
		int8x11AVX512(t)
	case 10:
		int8x10AVX512(t)
	case 9:
		int8x9AVX512(t)
	case 8:
		int8x8AVX512(t)
	case 7:
		int8x7AVX512(t)
	case 6:
		int8x6AVX512(t)
	case 5:
		int8x5AVX512(t)
	case 4:
		int8x4AVX512(t)
	case 3:
		int8x3AVX512(t)
	case 2:
		int8x2AVX512(t)
	case 1:
		int8x1AVX512(t)
	}
}

func microAVX2(t *tile, rows int) {
	switch rows {
	case 6:
		f32x6AVX2(t)
	case 5:
		f32x5AVX2(t)
	case 4:
		f32x4AVX2(t)
	case 3:
		f32x3AVX2(t)
	case 2:
		f32x2AVX2(t)
	case 1:
		f32x1AVX2(t)
	}
}

func pairsAVX2(t *tile, rows int) {
	switch rows {
	case 6:
		pairx6AVX2(t)
	case 5:
		pairx5AVX2(t)
	case 4:
		pairx4AVX2(t)
	case 3:
		pairx3AVX2(t)
	case 2:
		pairx2AVX2(t)
	case 1:
		pairx1AVX2(t)
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
