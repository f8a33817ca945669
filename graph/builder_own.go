package graph

// Apply adds an operation that Define made. Optional inputs may be the zero Value. It
// returns a value for each output: the first is named as the operation, the others
// "name.output".
func (b *Builder) Apply(op *Operation, name string, attr any, ins ...Value) []Value {
	outs := make([]Value, 1)
	if op != nil {
		outs = make([]Value, len(op.def.Out))
	}
	switch {
	case b.err != nil:
		return outs
	case op == nil:
		b.failf("%s: operation is nil, want one made by Define", name)
		return outs
	case name == "" || b.opNames[name]:
		b.failf("%s %q: an operation needs a name that no other has", op.def.Kind, name)
		return outs
	case len(ins) > len(op.def.In):
		b.failf("%s (%s): has %d inputs, want at most %d", name, op.def.Kind, len(ins), len(op.def.In))
		return outs
	}
	o := Op{Kind: op.def.Kind, Own: op, Name: name, Attr: attr, Work: NoBuf, Skip: NoBuf, Stream: Compute, Pass: Forward, Unit: b.unit}
	if err := b.sameOwn(op); err != nil {
		b.failf("%s: %w", name, err)
		return outs
	}
	for i, v := range ins {
		id := NoBuf
		if !(op.def.In[i].Optional && v.None()) {
			if id = b.use(name, op.def.In[i].Name, v); b.err != nil {
				return outs
			}
		}
		o.In = append(o.In, id)
	}
	if !b.attrAndInputs(&o) {
		return outs
	}
	in, _ := operandShapes(b.p, &o)
	for len(in) < len(op.def.In) {
		in = append(in, nil)
	}
	if op.def.Shapes == nil {
		b.failf("%s (%s): is an update rule's operation, which a model does not apply", name, op.def.Kind)
		return outs
	}
	shapes, err := op.def.Shapes(attr, in)
	if err == nil && len(shapes) != len(op.def.Out) {
		b.failf("%s (%s): its Shapes returns %d shapes, want one for each of the %d outputs", name, op.def.Kind, len(shapes), len(op.def.Out))
		return outs
	}
	if err != nil {
		b.failf("%s (%s): %w", name, op.def.Kind, err)
		return outs
	}
	for k, d := range op.def.Out {
		bufName := name
		if k > 0 {
			bufName += "." + d.Name
		}
		v := b.buffer(Buffer{Name: bufName, DType: d.Types[0], Shape: shapes[k], Class: Activations, Life: LifePhase, Unit: b.unit})
		if b.err != nil {
			return outs
		}
		o.Out = append(o.Out, Out{v.Buf(), Write})
	}
	b.append(o)
	if b.err != nil {
		return outs
	}
	for k := range outs {
		outs[k] = b.valueOf(o.Out[k].Buf)
	}
	return outs
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
		id := NoBuf
		if i < len(o.In) {
			id = o.In[i]
		}
		c.operand(&o.Own.def.In[i], id)
	}
	if b.err == nil {
		b.err = c.err
	}
	return b.err == nil
}
