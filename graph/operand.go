package graph

import "strings"

// Operand describes one input or output in the signature of a kind of operation.
type Operand struct {
	Name  string
	Shape string // in the kind table's notation, for documentation
	// Per is how many elements of the operation's shard share one element of the operand:
	// 1 for an operand of (Len), 256 for the scales of blocks of 256. 0 means that the
	// operand does not depend on the shard's elements (a scalar). PerParam means one element
	// a parameter; the operation then cannot be divided into chunks.
	Per      int64
	Types    []DType // allowed element types; nil: any
	Optional bool    // may be NoBuf, or left off at the end of the list
	Float    FloatRule
	Modes    []Mode // outputs: the allowed modes, in addition to in place

	// Over names the input whose buffer this output may use, in mode ReadWrite. Empty: the
	// output is never in place.
	Over string

	// Stat marks an output that only the derivative reads (a mean, a log-sum-exp).
	// No gradient flows through it.
	Stat bool

	// ScaleOf marks an operand of scales and names the operand of quantised values to which they
	// belong, with one scale for each Per values. The scales are present exactly if those values
	// are quantised (I8 or U8), and the two buffers are tied (type ScaleOf).
	ScaleOf string
}

// PerParam is the value of Operand.Per for one element a parameter.
const PerParam = -1

// FloatRule relates the float types of an operation's operands to each other.
type FloatRule uint8

// Rules. In mixed precision values have 16 bits; sums and statistics stay in f32, since
// rounding them would cost accuracy.
const (
	// AnyFloat: the operand's type is independent of the others.
	AnyFloat FloatRule = iota
	// ComputeFloat: f32, bf16 or f16, the same for all such operands of an
	// operation. Kernels compute in f32 and round once on writing.
	ComputeFloat
	// GradFloat: a parameter's gradient. It has the operation's compute type, or f32, which
	// keeps the kernel's f32 sum unrounded.
	GradFloat
)

// Shorthands of the kind table.
var (
	isF32 = []DType{F32}
	isF64 = []DType{F64}
	isI32 = []DType{I32}
	isI64 = []DType{I64}
	isSum = []DType{F32, F64, I64, BF16, F16} // types that reductions over ranks add; 16-bit values are added in f32

	isFloat = []DType{F32, BF16, F16} // f32 first: the reference
	isHalf  = []DType{BF16, F16}

	modeW  = []Mode{Write}
	modeA  = []Mode{Accum}
	modeRW = []Mode{ReadWrite}
	modeWA = []Mode{Write, Accum}
)

// in, out and acc return operands of the compute type; the method typ changes the type.
func in(name, shape string) Operand {
	return Operand{Name: name, Shape: shape, Types: isFloat, Float: ComputeFloat}
}

func optIn(name, shape string) Operand { return in(name, shape).opt() }

func out(name, shape string) Operand {
	return Operand{Name: name, Shape: shape, Types: isFloat, Float: ComputeFloat, Modes: modeW}
}

// acc returns an output that may be written or accumulated into.
func acc(name, shape string) Operand { return out(name, shape).mode(modeWA) }

// grad returns an output for a parameter's gradient.
func grad(name, shape string) Operand {
	o := acc(name, shape)
	o.Float = GradFloat
	return o
}

func (o Operand) opt() Operand           { o.Optional = true; return o }
func (o Operand) over(in string) Operand { o.Over = in; return o }
func (o Operand) stat() Operand          { o.Stat = true; return o }
func (o Operand) per(n int64) Operand    { o.Per = n; return o }
func (o Operand) typ(t []DType) Operand  { o.Types, o.Float = t, AnyFloat; return o }
func (o Operand) mode(ms []Mode) Operand { o.Modes = ms; return o }

// startsIn returns the operand that gives the start of each document, if a sample of Seq rows holds
// several. The document of row n starts starts[n] rows after the sample's first row. starts ascends
// within a sample, and starts[n] ≤ n mod Seq.
func startsIn() Operand { return in("starts", "(N)").typ(isF32).opt() }

// FloatIn declares an input with floating-point elements: F32, or BF16 or F16 in a plan of
// mixed precision.
func FloatIn(name string) Operand { return in(name, "") }

// FloatOut declares an output with floating-point elements: F32, BF16 or F16, the same type
// as the other such operands of the operation.
func FloatOut(name string) Operand { return out(name, "") }

// GradOut declares an output that is the gradient of an input. It is written or accumulated
// into (Tensor.Accum). The gradient of a parameter may be F32 while the other operands have
// 16 bits.
func GradOut(name string) Operand { return grad(name, "") }

// TypedIn and TypedOut declare operands whose type is t in every precision of the plan.
func TypedIn(name string, t DType) Operand  { return in(name, "").typ([]DType{t}) }
func TypedOut(name string, t DType) Operand { return out(name, "").typ([]DType{t}) }

// typeNames lists types for a message.
func typeNames(ts []DType) string {
	s := make([]string, len(ts))
	for i, t := range ts {
		s[i] = t.String()
	}
	return strings.Join(s, " or ")
}
