package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

func (s *kernels) transposeLanes(dst, src unsafe.Pointer, ds, ss, rows, depth, mask int) {
	switch s.level {
	case level.AVX512:
		transposeAVX512(dst, src, ds, ss, rows, depth, mask)
	case level.AVX2:
		transposeAVX2(dst, src, ds, ss, rows, depth, mask)
	default:
		transposePortable(dst, src, ds, ss, rows, depth, mask)
	}
}

func (s *kernels) copyLanes(dst, src unsafe.Pointer, ds, ss, depth, load, store int) {
	switch s.level {
	case level.AVX512:
		copyAVX512(dst, src, ds, ss, depth, load, store)
	case level.AVX2:
		copyAVX2(dst, src, ds, ss, depth, load, store)
	default:
		copyPortable(dst, src, ds, ss, depth, load, store)
	}
}

// micro computes rows rows of each sliver of t.
func (s *kernels) micro(t *tile, rows int) {
	switch s.level {
	case level.AVX512:
		microAVX512(t, rows)
	case level.AVX2:
		microAVX2(t, rows)
	default:
		microPortable(t, rows)
	}
}

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

// The functions below are generated; asmgen/gemm says what each does.

//go:noescape
func transposeAVX512(dst, src unsafe.Pointer, dstStride, srcStride, rows, depth, mask int)

//go:noescape
func transposeAVX2(dst, src unsafe.Pointer, dstStride, srcStride, rows, depth, mask int)

//go:noescape
func copyAVX512(dst, src unsafe.Pointer, dstStride, srcStride, depth, load, store int)

//go:noescape
func copyAVX2(dst, src unsafe.Pointer, dstStride, srcStride, depth, load, store int)

//go:noescape
func f32x1AVX512(t *tile)

//go:noescape
func f32x2AVX512(t *tile)

//go:noescape
func f32x3AVX512(t *tile)

//go:noescape
func f32x4AVX512(t *tile)

//go:noescape
func f32x5AVX512(t *tile)

//go:noescape
func f32x6AVX512(t *tile)

//go:noescape
func f32x7AVX512(t *tile)

//go:noescape
func f32x8AVX512(t *tile)

//go:noescape
func f32x9AVX512(t *tile)

//go:noescape
func f32x10AVX512(t *tile)

//go:noescape
func f32x11AVX512(t *tile)

//go:noescape
func f32x12AVX512(t *tile)

//go:noescape
func f32x13AVX512(t *tile)

//go:noescape
func f32x14AVX512(t *tile)

//go:noescape
func f32x1AVX2(t *tile)

//go:noescape
func f32x2AVX2(t *tile)

//go:noescape
func f32x3AVX2(t *tile)

//go:noescape
func f32x4AVX2(t *tile)

//go:noescape
func f32x5AVX2(t *tile)

//go:noescape
func f32x6AVX2(t *tile)
