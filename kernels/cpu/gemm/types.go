package gemm

import "unsafe"

// Type is the type of a matrix's elements.
type Type uint8

// The types. S8 and U8S8 are of inputs: int8 times int8, and uint8 times int8;
// their product is I32. A product of floats is summed in float32 whatever its
// inputs, then rounded once if its output has 16 bits.
const (
	F32 Type = iota
	BF16
	F16
	S8
	U8S8
	I32
)

var typeNames = [...]string{F32: "f32", BF16: "bf16", F16: "f16", S8: "s8", U8S8: "u8s8", I32: "i32"}

func (t Type) String() string {
	if int(t) < len(typeNames) {
		return typeNames[t]
	}
	return "unknown"
}

// size is an element's bytes.
func (t Type) size() int { return [...]int{4, 2, 2, 1, 1, 4}[t] }

// integer says that products of the inputs are int32.
func (t Type) integer() bool { return t == S8 || t == U8S8 }

// Bytes returns the memory of a slice of numbers.
func Bytes[T float32 | int32 | uint16 | int8 | uint8](v []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(z)))
}
