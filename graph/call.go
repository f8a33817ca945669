package graph

// Tensor is an operand of a Call. One of its slices holds the elements, row-major; all
// are empty of one that is absent, and where only shapes are asked for.
type Tensor struct {
	Shape []int64 // nil of one that is absent
	DType DType   // as it rests in its buffer
	F32   []float32
	F64   []float64
	I32   []int32
	I64   []int64
	Accum bool // of an output: the result is added to what is there
}

// Present says whether an optional operand is there.
func (t *Tensor) Present() bool { return t.Shape != nil }

// Elems returns the number of elements, 0 of one that is absent.
func (t *Tensor) Elems() int64 {
	if t.Shape == nil {
		return 0
	}
	n := int64(1)
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Put writes element i of a float output, or adds to it where that is asked for.
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

// ParamRange is the part of a rank's shard that belongs to one parameter. What lies
// between parameters is padding, which a rule leaves alone.
type ParamRange struct {
	Lo, Hi int // elements of the operands
	Decay  bool
	First  int64 // the parameter's element that Lo is
	Param  int   // index into Program.Params
}

// Call is an operation that is about to be computed. It is prepared once and used in
// every step: a kernel changes nothing of it but the elements of outputs and Work.
type Call struct {
	Attr    any
	In, Out []Tensor
	Work    []byte // as many as Definition.Work asked for

	// Params are the parameters' parts of the shard, where the operation is an update
	// rule's.
	Params []ParamRange

	// Run calls f(i) for every i in [0, n), on as many threads as there are; nil
	// runs them one after the other. Use Parallel.
	Run func(n int, f func(i int))
}

// Parallel calls f(i) for every i in [0, n), in any order and at the same time, and
// returns when all are done. Which part each index computes must not depend on the number
// of threads.
func (c *Call) Parallel(n int, f func(i int)) {
	if c.Run != nil {
		c.Run(n, f)
		return
	}
	for i := range n {
		f(i)
	}
}

// CUDAKernel is an operation's kernels for a GPU, in CUDA C that includes nothing and is
// compiled for the card when the operation is bound. Before it stand the prelude of
// Spillway's own kernels (kernels/cuda/src/common.cuh: KERNEL, SKIP, load, store, first,
// stride and types) and a macro for the element type of each operand that is there: IN0,
// IN1 … and OUT0, OUT1 …
//
// A kernel's parameters are the predicate (const int *skip), the addresses of the inputs
// and of the outputs (0 for absent ones), that of the scratch where Definition.Work is
// set, one int for each output (not 0: add to what is there), and then Args.
//
//	KERNEL(256, square, const int *skip, const IN0 *x, OUT0 *y, int add, i64 n) {
//		SKIP();
//		for (i64 i = first(); i < n; i += stride()) store(y + i, load(x + i) * load(x + i), add);
//	}
type CUDAKernel struct {
	Source string
	// Launches returns the launches, in order, for operands of which only shapes, types
	// and Params are known.
	Launches func(c *Call) []CUDALaunch
}

// CUDALaunch is one launch over a line of Blocks blocks of Threads threads.
type CUDALaunch struct {
	Kernel          string
	Blocks, Threads int
	Shared          int   // bytes of dynamic shared memory of a block
	Args            []any // int32, int64, float32 or float64
}
