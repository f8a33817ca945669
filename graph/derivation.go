package graph

import "slices"

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

// Apply applies op, whose output k is the gradient of input by[k]. The output of an unneeded
// gradient is absent if it is optional, and scratch if not. If no gradient is needed, Apply
// does nothing. The suffix makes the operation's name unique.
func (v *Derivation) Apply(op *Operation, suffix string, attr any, ins []BufID, by ...int) {
	v.apply(Op{Kind: op.def.Kind, Own: op, Attr: attr}, op.info, suffix, ins, by)
}

// ApplyKind is Apply for an operation of the kind table.
func (v *Derivation) ApplyKind(kind Kind, suffix string, attr any, ins []BufID, by ...int) {
	info, ok := kindTable[kind]
	if !ok {
		v.d.failf("its derivative applies the unknown kind %q", kind)
		return
	}
	v.apply(Op{Kind: kind, Attr: attr}, info, suffix, ins, by)
}

// Pass uses the gradient of output k as the gradient of input i, which has as many elements.
func (v *Derivation) Pass(i, k int, suffix string) {
	if g := v.Grad(k); g != NoBuf {
		v.d.identity(i, suffix, g, false)
	}
}

// Failf ends the differentiation with an error that names the operation.
func (v *Derivation) Failf(format string, args ...any) { v.d.failf(format, args...) }

func (v *Derivation) apply(op Op, info *Info, suffix string, ins []BufID, by []int) {
	d := v.d
	_, sig := info.Operands(op.Attr)
	if len(by) > len(sig) || d.err != nil {
		d.failf("its derivative takes %d outputs of %s, which has %d", len(by), op.Kind, len(sig))
		return
	}
	slots, wanted := make([]slot, len(by)), false
	for k, i := range by {
		if i < 0 || i >= len(d.op.In) {
			d.failf("its derivative gives a gradient to input %d, want 0 to %d", i, len(d.op.In)-1)
			return
		}
		slots[k] = d.slot(i, slices.Contains(sig[k].Modes, Accum), NoBuf)
		wanted = wanted || !slots[k].none()
	}
	if !wanted {
		return
	}
	outs := make([]Out, len(by))
	for k, s := range slots {
		outs[k] = s.out
		if s.none() && !sig[k].Optional {
			outs[k] = d.scratch(d.in(by[k]), "unused", NoBuf)
		}
	}
	d.emitOp(op, suffix, ins, outs)
	for k, s := range slots {
		d.close(suffix+"."+sig[k].Name, s)
	}
}
