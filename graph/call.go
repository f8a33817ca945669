package graph

// Tensor is an operand of a Call. One of its slices holds the elements, row-major. All
// slices are empty if the operand is absent, or if only its shape is needed.
type Tensor struct {
	Shape []int64 // nil if the operand is absent
	DType DType   // element type of its buffer
	F32   []float32
	F64   []float64
	I32   []int32
	I64   []int64
	Accum bool // outputs: the result is added to the old contents
}

// Present says whether an optional operand was given.
func (t *Tensor) Present() bool { return t.Shape != nil }

// Elems returns the number of elements, 0 if the operand is absent.
func (t *Tensor) Elems() int64 {
	if t.Shape == nil {
		return 0
	}
	return elemsOf(t.Shape)
}

// Put writes v to element i of a float output, or adds v to it if Accum is set.
func (t *Tensor) Put(i int, v float64) {
	switch {
	case t.F32 != nil && t.Accum:
		t.F32[i] += float32(v)
	case t.F32 != nil:
		t.F32[i] = float32(v)
	case t.Accum:
		t.F64[i] += v
	default:
		t.F64[i] = v
	}
}

// At returns element i of a float operand.
func (t *Tensor) At(i int) float64 {
	if t.F32 != nil {
		return float64(t.F32[i])
	}
	return t.F64[i]
}

// ParamRange is the part of one parameter in a rank's shard of a unit. Elements between the
// ranges are padding, which an update rule must not change.
type ParamRange struct {
	Lo, Hi int // elements of the operands
	Decay  bool
	First  int64 // index in the parameter of the element at Lo
	Param  int   // index into Program.Params
}

// Call holds the arguments of an operation's kernel. It is prepared once and used in every step: a
// kernel changes only the elements of the outputs and of Work.
type Call struct {
	Attr    any
	In, Out []Tensor
	Work    []byte // scratch of the size that Definition.Work returned

	// Params are the ranges of the parameters in the shard, if the operation belongs to an
	// update rule.
	Params []ParamRange

	// Run calls f(i) for every i in [0, n), on all threads of the executor. If it is nil the
	// calls run one after another. Kernels call Parallel instead.
	Run func(n int, f func(i int))
}

// Parallel calls f(i) for every i in [0, n), in any order and concurrently, and returns
// when all are done. The work of index i must not depend on the number of threads.
func (c *Call) Parallel(n int, f func(i int)) {
	if c.Run != nil {
		c.Run(n, f)
		return
	}
	for i := range n {
		f(i)
	}
}

// CUDAKernel is the CUDA C source of an operation's GPU kernels. The source includes no
// files and is compiled for the card when the operation is bound. It is preceded by the
// prelude of Spillway's own kernels (kernels/cuda/src/common.cuh: KERNEL, SKIP, load,
// store, first, stride and types) and by a macro for the element type of each operand that
// is present: IN0, IN1 … and OUT0, OUT1 …
//
// A kernel's parameters are, in order: the predicate (const int *skip); the addresses of
// the inputs and outputs (0 for absent ones); the address of the scratch, if
// Definition.Work is set; one int for each output (not 0: add to the old contents); and Args.
//
//	KERNEL(256, square, const int *skip, const IN0 *x, OUT0 *y, int add, i64 n) {
//		SKIP();
//		for (i64 i = first(); i < n; i += stride()) store(y + i, load(x + i) * load(x + i), add);
//	}
type CUDAKernel struct {
	Source string
	// Launches returns the launches in order. In its Call only shapes, types and Params
	// are set, not the operands' elements.
	Launches func(c *Call) []CUDALaunch
}

// CUDALaunch is one launch of a one-dimensional grid of Blocks blocks of Threads threads.
type CUDALaunch struct {
	Kernel          string
	Blocks, Threads int
	Shared          int   // bytes of dynamic shared memory of a block
	Args            []any // int32, int64, float32 or float64
}
