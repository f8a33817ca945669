//go:build !amd64

package gemm

import "unsafe"

func (s *kernels) transposeLanes(dst, src unsafe.Pointer, ds, ss, rows, depth, mask int) {
	transposePortable(dst, src, ds, ss, rows, depth, mask)
}

func (s *kernels) copyLanes(dst, src unsafe.Pointer, ds, ss, depth, load, store int) {
	copyPortable(dst, src, ds, ss, depth, load, store)
}

func (s *kernels) micro(t *tile, rows int) {
	if s.form == formPairs {
		pairsPortable(t, rows)
	} else {
		microPortable(t, rows)
	}
}

func (s *kernels) microPack(*tile) { panic(s.form) }

func (s *kernels) widenVectors(Type, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func (s *kernels) narrowRows(Type, unsafe.Pointer, unsafe.Pointer, int, int, int, int) bool {
	return false
}

func (s *kernels) scaleRows(sums, cols, bias, rowScales unsafe.Pointer, ld, rows, n int) bool {
	return false
}
