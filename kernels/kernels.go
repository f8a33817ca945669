// Package kernels binds operations of a step program to a device's code.
package kernels

import (
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Binding is an operation together with the memory of its operands. In and Out follow
// the order of the Op's operands; absent operands have a nil Arena.
type Binding struct {
	Program *graph.Program
	Op      *graph.Op
	Coord   []int // the rank's index along each mesh axis
	In      []device.Ptr
	Out     []device.Ptr
	Work    device.Ptr
	Skip    device.Ptr // the predicate's scalar, nil Arena if none
	Present []int      // ranks that have a micro-batch: a sum over ranks adds theirs; nil: all ranks
}

// Library is the kernels of one device.
type Library interface {
	// Bind prepares an operation so that launching it allocates nothing. If there is no
	// kernel for the operation, the error names the operation and the operand.
	Bind(b Binding) (device.Kernel, error)
}

// Joiner is a Library that can fuse two consecutive operations into one kernel.
type Joiner interface {
	// Join prepares two operations that follow each other on a stream (graph.Pairs) as one
	// fused kernel, which runs in the place of the second. Its results are the same bits as
	// those of the two operations. Join returns nil if it has no fused kernel for these types,
	// shapes or addresses; the caller then binds each operation with Bind, which also reports
	// the errors of invalid operations.
	Join(first, second Binding) (device.Kernel, error)
}
