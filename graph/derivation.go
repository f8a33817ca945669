package graph

// Derivation is the argument of Definition.Derive. Its methods add the operations that
// compute the gradients of the inputs from those of the outputs.
type Derivation struct{ d *differ }

// Attr returns the operation's attributes.
func (v *Derivation) Attr() any { return v.d.op.Attr }

// In returns input i and Out output k; NoBuf for an absent one. A derivative may read only
// operands that Definition.Saves names.
func (v *Derivation) In(i int) BufID  { return v.d.in(i) }
func (v *Derivation) Out(k int) BufID { return v.d.out(k) }

// Needs says whether the gradient of input i is wanted.
func (v *Derivation) Needs(i int) bool { return v.d.needs(i) }

// Grad returns the gradient of output k, with the output's shape; NoBuf if the loss does not
// depend on that output.
func (v *Derivation) Grad(k int) BufID {
	d := v.d
	if d.out(k) == NoBuf {
		return NoBuf
	}
	if n := d.outs[d.i][k]; n < 0 || d.vals[n].grad == NoBuf && d.vals[n].root != d.p.Loss {
		return NoBuf
	}
	return d.dy(k)
}

// Apply adds op, whose output k is the gradient of input by[k]. If that gradient is not needed, the
// output is absent if it is optional, and scratch if not. If no gradient is needed, Apply does
// nothing. The suffix makes the operation's name unique.
func (v *Derivation) Apply(op *Operation, suffix string, attr any, ins []BufID, by ...int) {
	v.apply(Op{Kind: op.def.Kind, Own: op, Attr: attr}, suffix, ins, by)
}

// ApplyKind does the same as Apply for an operation of the kind table.
func (v *Derivation) ApplyKind(kind Kind, suffix string, attr any, ins []BufID, by ...int) {
	v.apply(Op{Kind: kind, Attr: attr}, suffix, ins, by)
}

func (v *Derivation) apply(op Op, suffix string, ins []BufID, by []int) {
	if g := v.d.gradients(op, by...); g != nil {
		g.add(suffix, suffix+".", ins)
	}
}

// Pass uses the gradient of output k as the gradient of input i, which has the same number of
// elements.
func (v *Derivation) Pass(i, k int, suffix string) {
	if g := v.Grad(k); g != NoBuf {
		v.d.identity(i, suffix, g, false)
	}
}

// Failf ends the differentiation with an error that names the operation.
func (v *Derivation) Failf(format string, args ...any) { v.d.failf(format, args...) }
