//go:build !amd64

package gemm

import "unsafe"

func (s *kernels) transposeLanes(dst, src unsafe.Pointer, ds, ss, rows, depth, mask int) {
	transposePortable(dst, src, ds, ss, rows, depth, mask)
}

func (s *kernels) copyLanes(dst, src unsafe.Pointer, ds, ss, depth, load, store int) {
	copyPortable(dst, src, ds, ss, depth, load, store)
}

func (s *kernels) micro(t *tile, rows int) { microPortable(t, rows) }
