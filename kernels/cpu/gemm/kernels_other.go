//go:build !amd64

package gemm

import "unsafe"

const tileKC = 256

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

func (s *kernels) widenVectors(Type, unsafe.Pointer, unsafe.Pointer, int) int  { return 0 }
func (s *kernels) narrowVectors(Type, unsafe.Pointer, unsafe.Pointer, int) int { return 0 }

func (s *kernels) narrowRows(Type, unsafe.Pointer, unsafe.Pointer, int, int, int, int) bool {
	return false
}

// Only amd64 has forms that need what follows.

func (s *kernels) interleave(dst, src unsafe.Pointer, ds, ss, units, cols, width int) {}
func (s *kernels) flip(p unsafe.Pointer, words int)                                   {}
func (s *kernels) offset(dst, b unsafe.Pointer, units int)                            {}
func (s *kernels) addBias(c, bias unsafe.Pointer, ldc, rows, cols int)                {}
func (s *kernels) microTiles(t *tile, rows, cols int)                                 {}
