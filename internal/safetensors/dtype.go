// Package safetensors reads and writes the safetensors format: an 8-byte
// little-endian header length, a JSON header of names, dtypes, shapes and byte
// offsets, and the tensors' bytes, row-major and little-endian, without holes.
//
// It reads ranges of elements as float32 directly into the caller's memory, so that a rank can load
// only its shard. It writes ranges in any order into a file that gets its name when it is complete.
//
// The alternative github.com/maruel/safetensors was tried first. It requires tensors in the header
// in the order of their bytes (the format does not), accepts a name twice, handles the complete
// file as one slice and cannot write a part. This package's tests compare with it.
package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"unsafe"
)

// DType is a tensor's element type as the header spells it.
type DType string

// The dtypes that ReadFloat32 converts; a Writer takes F32 and BF16.
const (
	F32  DType = "F32"
	F16  DType = "F16"
	BF16 DType = "BF16"
)

// sizes gives the bytes of an element of every dtype that a header may list.
// Dtypes of less than a byte an element are left out: their shapes do not
// give a size.
var sizes = map[DType]int64{
	"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
	"I16": 2, "U16": 2, F16: 2, BF16: 2,
	"I32": 4, "U32": 4, F32: 4,
	"I64": 8, "U64": 8, "F64": 8, "C64": 8,
}

// Tensor describes one tensor of a file.
type Tensor struct {
	Name  string
	DType DType
	Shape []int64
}

// Elements returns the product of the shape; 1 for a scalar.
func (t Tensor) Elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

func (t Tensor) clone() Tensor {
	t.Shape = slices.Clone(t.Shape)
	return t
}

// byteSize returns the tensor's size in the file; an overflow is an error.
func (t Tensor) byteSize() (int64, error) {
	size, ok := sizes[t.DType]
	if !ok {
		return 0, fmt.Errorf("dtype %q is unknown", t.DType)
	}
	empty := slices.Contains(t.Shape, 0)
	n := size
	for _, d := range t.Shape {
		if d < 0 {
			return 0, fmt.Errorf("shape %v has a negative size", t.Shape)
		}
		if empty {
			continue
		}
		if n > math.MaxInt64/d {
			return 0, fmt.Errorf("shape %v of type %s takes 2^63 bytes or more", t.Shape, t.DType)
		}
		n *= d
	}
	if empty {
		return 0, nil
	}
	return n, nil
}

// nativeLittle says that this machine has the format's byte order.
var nativeLittle = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// bytesOf returns the memory of x as bytes, without a copy.
func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// decode32 converts dst's memory from little-endian float32s to float32s of this machine.
func decode32(dst []float32) {
	if nativeLittle {
		return
	}
	b := bytesOf(dst)
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
}

// widen16 converts the little-endian 16-bit floats in the upper half of dst's
// memory, in place: element i is read before its place is written, since
// 2n+2i ≥ 4i.
func widen16(dst []float32, dtype DType) {
	src := bytesOf(dst)[2*len(dst):]
	if dtype == BF16 {
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
		return
	}
	for i := range dst {
		dst[i] = fromF16(binary.LittleEndian.Uint16(src[2*i:]))
	}
}

// fromF16 widens an IEEE 754 binary16, exactly; a NaN keeps its sign and
// payload.
func fromF16(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch exp {
	case 0: // zero or subnormal: frac · 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(frac)*(1.0/(1<<24))))
	case 0x1f:
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// toBF16 rounds to the nearest bfloat16, ties to even; a NaN stays one.
func toBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if x != x {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}
