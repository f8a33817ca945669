package checkpoint

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/safetensors"
)

// NonFinite is the error for a state that is not saved because it holds non-finite values.
type NonFinite struct {
	State, Tensor string
	Count, Of     int64 // elements, of those that one rank checked
	First         int64 // index in the tensor of the first non-finite element
}

func (e *NonFinite) Error() string {
	return fmt.Sprintf("%s of %q: %d of %d values are not finite, first element %d; nothing is saved", e.State, e.Tensor, e.Count, e.Of, e.First)
}

// Exponent bits of the numbers in eight bytes. A number whose exponent bits are all ones is
// infinite or not a number.
const (
	exponents32   = 0x7f800000_7f800000
	exponentsBF16 = 0x7f80_7f80_7f80_7f80
	exponentsF16  = 0x7c00_7c00_7c00_7c00
)

// finite tells whether all numbers of b are finite; exponents masks their exponent bits. Adding
// the lowest exponent bit to an all-ones exponent carries into the sign bit, which the mask has
// cleared, and no further.
func finite(b []byte, exponents uint64) bool {
	sign := exponents &^ (exponents >> 1) << 1 // of each number
	lowest := exponents &^ (exponents << 1)
	var w, x, y, z uint64
	for ; len(b) >= 32; b = b[32:] {
		w |= binary.NativeEndian.Uint64(b)&exponents + lowest
		x |= binary.NativeEndian.Uint64(b[8:])&exponents + lowest
		y |= binary.NativeEndian.Uint64(b[16:])&exponents + lowest
		z |= binary.NativeEndian.Uint64(b[24:])&exponents + lowest
	}
	for ; len(b) >= 8; b = b[8:] {
		w |= binary.NativeEndian.Uint64(b)&exponents + lowest
	}
	var last [8]byte
	copy(last[:], b)
	w |= binary.NativeEndian.Uint64(last[:])&exponents + lowest
	return (w|x|y|z)&sign == 0
}

// Look counts the non-finite values of v, the tensor's elements from start on.
func (e *NonFinite) Look(start int64, v []float32) {
	if len(v) == 0 || finite(unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v)), exponents32) {
		return
	}
	const exponent = 0x7f800000
	for i, x := range v {
		if math.Float32bits(x)&exponent == exponent {
			if e.Count == 0 {
				e.First = start + int64(i)
			}
			e.Count++
		}
	}
}

// lookAt counts the non-finite values in bytes of an extent.
func (e *NonFinite) lookAt(x *Extent, off int64, b []byte) {
	size := x.DType.Size()
	if e.Count == 0 && (e.State != x.State || e.Tensor != x.Tensor) {
		*e = NonFinite{State: x.State, Tensor: x.Tensor}
	}
	n := int64(len(b)) / size
	e.Of += n
	switch {
	case n == 0:
	case size == 4:
		e.Look(x.Start+off/size, unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n))
	case size == 2:
		exponents := uint64(exponentsBF16)
		if x.DType == safetensors.F16 {
			exponents = exponentsF16
		}
		if finite(b, exponents) {
			return
		}
		exponent := uint16(exponents)
		for i, v := range unsafe.Slice((*uint16)(unsafe.Pointer(&b[0])), n) {
			if v&exponent == exponent {
				if e.Count == 0 {
					e.First = x.Start + off/size + int64(i)
				}
				e.Count++
			}
		}
	}
}
