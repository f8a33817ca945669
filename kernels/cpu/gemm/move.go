package gemm

import (
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

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
