package graph

// View places a buffer inside another one: bytes
// [Offset + rank·RankStride, + Bytes()) of Base, where rank is the index along
// mesh axis Axis. A view of a view is allowed.
type View struct {
	Base       BufID
	Offset     int64 // bytes
	RankStride int64 // bytes; 0 for views that are the same on every rank
	Axis       int   // mesh axis whose index RankStride multiplies
}

// ScaleOf, in a buffer of scales, names the buffer of quantised values to which the scales belong:
// scale k is for values [k·Block, (k+1)·Block). Both are views of one buffer, so they have one
// home, one lifetime and one place in an arena:
//
//	exp_avg/h.0         u8  (n + 4·n/256)
//	exp_avg/h.0/values  u8  (n)       view at 0
//	exp_avg/h.0/scales  f32 (n/256)   view at n, scale of exp_avg/h.0/values
//
// A part of the values has a matching part of the scales: views of both, tied in the same
// way. An operation on quantised values has the scales as a separate operand
// (Operand.ScaleOf). Check rejects scales that belong to other values.
type ScaleOf struct {
	Of    BufID // the values
	Block int64 // values for each scale; 0: the buffer does not hold scales
}

// Buffer is a typed region of one memory space, row-major and contiguous. Shape
// is the local shape: what one rank holds.
type Buffer struct {
	Name  string
	DType DType
	Shape []int64
	Space Space
	Class Class
	Life  Life
	Unit  int     // index into Program.Units, or -1
	Pad   int64   // bytes of flat-parameter padding in Bytes() (reported as class padding)
	View  *View   // nil for a root buffer
	Port  Port    // how the host uses it between operations
	Micro int     // the micro-batch of a phase to which it belongs, from 0
	Scale ScaleOf // the quantised values whose scales these are

	// Global is the global shape where it differs from Shape, and Place has a
	// placement for each mesh axis (nil: replicated on all).
	Global []int64
	Place  []Placement
}

// Elems returns the number of elements.
func (b *Buffer) Elems() int64 { return elemsOf(b.Shape) }

// matrix returns the leading dimensions multiplied, and the last one: activations may have any
// number of dimensions.
func (b *Buffer) matrix() (rows, cols int64) {
	last := len(b.Shape) - 1
	if last < 0 {
		return 1, 1
	}
	return elemsOf(b.Shape[:last]), b.Shape[last]
}

// Bytes returns the size of the buffer in its space.
func (b *Buffer) Bytes() int64 { return b.Elems() * b.DType.Size() }

// maxElems bounds the elements of a buffer, so that its size in bytes, and the sum of a
// few thousand sizes, cannot overflow an int64.
const maxElems = int64(1) << 46

// IsFloatInput says whether the buffer was made by Builder.Input.
func (b *Buffer) IsFloatInput() bool {
	return b.Class == Inputs && b.Port == NoPort && b.DType == F32
}
