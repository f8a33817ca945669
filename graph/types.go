package graph

import "fmt"

// DType is the element type of a buffer.
type DType uint8

// Element types. I64 also holds exact accumulators (see kernels/cpu/exact).
const (
	F32 DType = iota
	F64
	BF16
	F16
	I64
	I32
	I8
	U8
)

var dtypeNames = [...]string{"f32", "f64", "bf16", "f16", "i64", "i32", "i8", "u8"}
var dtypeSizes = [...]int64{4, 8, 2, 2, 8, 4, 1, 1}

func (d DType) String() string { return name(dtypeNames[:], int(d), "dtype") }

// Size returns the bytes of one element.
func (d DType) Size() int64 { return dtypeSizes[d] }

// Space is a memory space (a tier) of a rank.
type Space uint8

// Memory spaces: the accelerator's memory, page-locked host memory, and a file.
const (
	Device Space = iota
	Host
	Disk
	NumSpaces
)

var spaceNames = [...]string{"device", "host", "disk"}

func (s Space) String() string { return name(spaceNames[:], int(s), "space") }

// Class is the purpose of a buffer; plans report memory by class.
type Class uint8

// Classes, as plan reports show them.
const (
	Parameters    Class = iota // resident in the compute dtype: the complete copy below stage 3, the shard at stage 3
	Gradients                  // reduced or accumulating
	Optimizer                  // fp32 masters where they exist, moments, constants
	Activations                // kept from forward to backward, and temporary values
	Unsharded                  // gathered parameters, gradients not yet reduced
	Communication              // staging
	Workspace                  // scratch of one operation
	Inputs                     // tokens, targets, step state
	Padding                    // holes, alignment, flat-parameter padding
	NumClasses
)

var classNames = [...]string{"parameters", "gradients", "optimizer", "activations", "unsharded", "communication", "workspace", "inputs", "padding"}

func (c Class) String() string { return name(classNames[:], int(c), "class") }

// Life is how long a buffer's contents last.
type Life uint8

// Lifetimes. Within a lifetime, memory is reused as soon as the last reader has finished.
const (
	LifePhase Life = iota // within one phase
	LifeStep              // across the phases of one section's execution
	LifeRun               // across steps: states
)

var lifeNames = [...]string{"phase", "step", "run"}

func (l Life) String() string { return name(lifeNames[:], int(l), "life") }

// Pass says which part of a training step an operation belongs to.
type Pass uint8

// Passes of a step.
const (
	Forward Pass = iota
	Backward
	Recompute
	Update
)

var passNames = [...]string{"forward", "backward", "recompute", "update"}

func (p Pass) String() string { return name(passNames[:], int(p), "pass") }

// Mode is the way an operation accesses an output buffer.
type Mode uint8

// Output modes. Accum adds to the contents; ReadWrite is any other in-place change.
const (
	Write Mode = iota
	Accum
	ReadWrite
)

var modeNames = [...]string{"write", "accum", "rw"}

func (m Mode) String() string { return name(modeNames[:], int(m), "mode") }

// StreamID identifies one of a rank's in-order queues.
type StreamID uint8

// Streams of a rank. Operations of one stream run in order; across streams only
// events order them.
const (
	Compute  StreamID = iota
	Comm              // collectives, all on one stream so that their order is total
	CopyIn            // host to device
	CopyOut           // device to host
	HostWork          // kernels that run on the host (offloaded updates)
	DiskIn            // disk to host
	DiskOut           // host to disk
	NumStreams
)

var streamNames = [...]string{"compute", "comm", "copy-in", "copy-out", "host", "disk-in", "disk-out"}

func (s StreamID) String() string { return name(streamNames[:], int(s), "stream") }

func name(names []string, i int, what string) string {
	if i < 0 || i >= len(names) {
		return fmt.Sprintf("%s(%d)", what, i)
	}
	return names[i]
}

// BufID indexes Program.Buffers. NoBuf marks an absent optional operand.
type BufID int32

// NoBuf is the absent buffer.
const NoBuf BufID = -1

// EventID identifies an event of the program. 0 is none.
type EventID int32

// Placement is the distribution of a buffer's global value along one mesh axis.
type Placement uint8

// Placements over a mesh axis.
const (
	Replicate Placement = iota // every rank holds the whole value
	Sharded                    // rank i of the axis holds the i-th of equal contiguous parts
	Partial                    // every rank holds an addend of the value
)

var placementNames = [...]string{"replicate", "shard", "partial"}

func (p Placement) String() string { return name(placementNames[:], int(p), "placement") }

// elemsOf returns the number of elements of a shape.
func elemsOf(shape []int64) int64 {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	return n
}

// roundUp returns n, or the next multiple of to.
func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }
