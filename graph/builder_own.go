package graph

// Apply adds an operation made by Define. Optional inputs may be the zero Value. Apply returns a
// value for each output. The first is named as the operation, the others "name.output".
func (b *Builder) Apply(op *Operation, name string, attr any, ins ...Value) []Value {
	if op == nil {
		b.failf("%s: operation is nil, want one made by Define", name)
		return make([]Value, 1)
	}
	outs, o := make([]Value, len(op.def.Out)), b.op(op.def.Kind, name, attr)
	o.Own = op
	if b.apply(&o, ins) {
		for k := range outs {
			outs[k] = b.valueOf(o.Out[k].Buf)
		}
	}
	return outs
}

func (b *Builder) apply(o *Op, ins []Value) bool {
	d := &o.Own.def
	if !b.free(d.Kind, o.Name) {
		return false
	}
	if len(ins) > len(d.In) {
		b.failf("%s (%s): has %d inputs, want at most %d", o.Name, d.Kind, len(ins), len(d.In))
		return false
	}
	if err := b.sameOwn(o.Own); err != nil {
		b.failf("%s: %w", o.Name, err)
		return false
	}
	operands := make([]operandValue, len(ins))
	for i, v := range ins {
		operands[i] = operandValue{d.In[i].Name, v, d.In[i].Optional}
	}
	if !b.inputs(o, operands) || !b.attrAndInputs(o) {
		return false
	}
	if d.Shapes == nil {
		b.failf("%s (%s): is an update rule's operation, which a model does not apply", o.Name, d.Kind)
		return false
	}
	shapes, err := d.outShapes(b.p, o)
	if err != nil {
		b.failf("%s (%s): %w", o.Name, d.Kind, err)
		return false
	}
	results := make([]result, len(d.Out))
	for k, out := range d.Out {
		results[k] = result{dtype: out.Types[0], shape: shapes[k]}
		if k > 0 {
			results[k].suffix = out.Name
		}
	}
	if b.outputs(o, results) {
		b.append(*o)
	}
	return b.err == nil
}

// sameOwn returns an error if the program has a different operation with op's name.
func (b *Builder) sameOwn(op *Operation) error {
	seen := map[Kind]*Operation{}
	for i := range b.ops {
		if err := checkOwn(&b.ops[i], seen); err != nil {
			return err
		}
	}
	return checkOwn(&Op{Kind: op.def.Kind, Own: op}, seen)
}

// attrAndInputs checks the attribute and the inputs before they are passed to Definition.Shapes.
func (b *Builder) attrAndInputs(o *Op) bool {
	c := &checker{p: b.p, op: o, info: o.Own.info}
	c.attribute()
	for i := range o.Own.def.In {
		c.operand(&o.Own.def.In[i], o.in(i))
	}
	if b.err == nil {
		b.err = c.err
	}
	return b.err == nil
}
