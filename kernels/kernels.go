// Package kernels binds operations of a step program to a device's code.
package kernels

import (
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Binding is an operation with where its operands lie. In, Out and Work follow
// the order of the Op; absent operands have a nil Arena.
type Binding struct {
	Program *graph.Program
	Op      *graph.Op
	Coord   []int // the rank's index along each mesh axis
	In      []device.Ptr
	Out     []device.Ptr
	Work    device.Ptr
	Skip    device.Ptr // the predicate's scalar, nil Arena if none
	Present []int      // ranks with a micro-batch, whose parts a sum over ranks adds; nil: all
}

// Library is the kernels of one device.
type Library interface {
	// Bind prepares an operation so that launching it allocates nothing. It
	// refuses, naming operation and operand, what it has no kernel for.
	Bind(b Binding) (device.Kernel, error)
}

// Joiner is a Library with kernels for two operations at once.
type Joiner interface {
	// Join prepares two operations, of which the second follows the first on its stream
	// (graph.Pairs), as one kernel in the second's place. It leaves in memory what the two
	// leave, bit for bit. Nil: there is none, at these types, shapes or places, and the
	// operations are bound one by one. What Bind refuses is told by Bind.
	Join(first, second Binding) (device.Kernel, error)
}
