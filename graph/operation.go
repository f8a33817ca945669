package graph

import "fmt"

// Definition describes an operation that is not in the kind table. A model adds it with
// Builder.Apply, a derivative with Derivation.Apply, an update rule with
// zero.Emitter.ApplyOwn. It is stored in the program (Op.Own); the passes, the verifier, the
// cost model, the executors and the interpreter treat it as a kind of the table.
//
// Its functions are called more than once and from several goroutines, so they must be pure: they
// depend only on their arguments. A kernel's output depends only on its attributes and operands,
// not on the number of threads. Then all stages and placements give the same bits.
type Definition struct {
	// Kind names the operation in the text form and in messages: letters, digits and "_./-".
	// It must not be a kind of the kind table.
	Kind Kind
	// Doc describes the computation; Derivative gives its derivative as a formula.
	Doc, Derivative string

	// In and Out are its operands. Make them with FloatIn, FloatOut, GradOut, StateOut and similar
	// functions.
	In, Out []Operand

	// Attr is the zero value of its attributes, a struct of numbers, strings and bools;
	// nil for none.
	Attr any

	// Saves names the operands that the derivative reads.
	Saves []string
	// Cheap says that the operation costs little time compared with the memory of its output:
	// selective recomputation repeats it.
	Cheap bool

	// Shapes returns the outputs' shapes for the inputs' shapes (nil for an absent input), or
	// an error if the inputs do not fit. Each input has at least one element. Shapes is nil
	// for an operation of an update rule, whose Attr is UpdateAttr: Operand.Per gives the
	// sizes of its operands.
	Shapes func(attr any, in [][]int64) (out [][]int64, err error)

	// Flops counts the floating-point operations (a multiply-add is 2); nil: none. The estimate of
	// memory traffic counts each operand once.
	Flops func(attr any, in, out [][]int64) int64

	// Work returns the bytes of scratch that the kernels need (Call.Work); nil: none.
	Work func(attr any, in, out [][]int64) int64

	// Derive adds the operations that compute the gradients; nil: no gradient flows back.
	Derive func(d *Derivation)

	// Library says that the kernel libraries have the kernels, under Kind; CPU, CUDA and
	// Reference are then nil. Spillway's own operations are defined in this way.
	Library bool
	// CPU is the kernel for the CPU. Float operands are in Tensor.F32 whatever their DType:
	// 16-bit inputs are widened before, and 16-bit outputs rounded once after.
	CPU func(c *Call) error
	// CUDA is the kernel for a GPU. If it is nil, binding a plan for a GPU fails.
	CUDA *CUDAKernel
	// Reference computes the same in fp64 in the simplest way: float operands are in Tensor.F64.
	// Tests compare the kernel and the derivative with it; nil: they cannot.
	Reference func(c *Call) error
}

// Operation is an operation made by Define. The program carries its definition. Two Operations are
// the same only if their pointers are equal.
type Operation struct {
	def  Definition
	info *Info
}

// Kind returns the operation's kind.
func (o *Operation) Kind() Kind { return o.def.Kind }

// Definition returns the definition, with the operands' defaults filled in.
func (o *Operation) Definition() *Definition { return &o.def }

// BringsKernels says whether the operation's kernels come with the program (Define); the
// kernels of others are in the kernel libraries.
func (op *Op) BringsKernels() bool { return op.Own != nil && !op.Own.def.Library }

// checkOwn checks that a program has at most one Operation for each kind.
func checkOwn(op *Op, seen map[Kind]*Operation) error {
	if op.Own == nil {
		return nil
	}
	switch have, ok := seen[op.Kind]; {
	case op.Own.def.Kind != op.Kind:
		return fmt.Errorf("is %q by an operation defined as %q", op.Kind, op.Own.def.Kind)
	case ok && have != op.Own:
		return fmt.Errorf("two operations are defined as %q; define it once, and use that value everywhere", op.Kind)
	}
	seen[op.Kind] = op.Own
	return nil
}
