package graph

// Info is a kind's entry in the kind table. The builder, differentiation, the verifier and the cost
// model all use it.
type Info struct {
	Kind       Kind
	Doc        string // what the operation computes, with shapes
	Derivative string // formula by input; empty if the kind has none
	In, Out    []Operand
	Attr       any // zero value of the attribute struct; nil for none

	attrOptional bool     // an operation may have no attribute
	Saves        []string // operands that the derivative reads; they stay in memory until the backward
	Cheap        bool     // costs little time compared with the memory of its output: selective recomputation repeats it

	// packedIn and packedOut replace In and Out where the attribute is a packed
	// AttentionAttr.
	packedIn, packedOut []Operand
	// check compares shapes, after operands, types and the attribute have been checked.
	check func(c *checker)
	// flops counts floating-point operations (a multiply-add is 2), nil for none.
	flops func(c *checker) int64
	// bytes overrides the traffic that Cost computes from the operands.
	bytes func(c *checker) int64
	// work and cudaWork return a kernel's scratch in bytes on the CPU and on a GPU, see
	// Target.Workspace; nil for none.
	work, cudaWork func(t Target, p *Program, op *Op) int64
	// derive adds the backward operations of an operation from Define; for kinds of the
	// table the map derivatives has that function.
	derive func(d *differ)
	// shares says that operands may overlap as views of each other (collectives).
	shares bool
}

// Operands returns the signature for an attribute. Only attention's depends on it, because queries,
// keys and values can be packed or not.
func (i *Info) Operands(attr any) (in, out []Operand) {
	if a, _ := attr.(AttentionAttr); a.Packed {
		return i.packedIn, i.packedOut
	}
	return i.In, i.Out
}
