package graph

// Out is an output operand.
type Out struct {
	Buf  BufID
	Mode Mode
}

// Op is one operation of the step program. Its Kind determines the meaning and order of In, Out and
// Attr (see Info). Absent optional operands are NoBuf.
type Op struct {
	Kind Kind
	Own  *Operation // set if Define made the operation; nil: the kind table has it
	Name string     // unique within its phase, e.g. "h.3.attn.c_proj" or "h.3.attn.c_proj/dw"
	In   []BufID
	Out  []Out
	Work BufID // workspace, NoBuf if none
	Attr any   // the kind's attribute struct (a value, comparable or nil)

	Stream StreamID
	Wait   []EventID // the operation waits for these events
	Record EventID   // recorded on Stream after the operation; 0: none

	Pass   Pass
	Unit   int    // index into Program.Units of the unit it belongs to, or -1
	Micro  int    // the micro-batch of the phase to which it belongs, from 0
	Source string // name of the operation from which this one was derived
	Skip   BufID  // I32 scalar: the operation does nothing while it is non-zero; NoBuf: always runs
}

// in and out return input i and output k; NoBuf for one that is absent or omitted.
func (o *Op) in(i int) BufID {
	if i < len(o.In) {
		return o.In[i]
	}
	return NoBuf
}

func (o *Op) out(k int) BufID {
	if k < len(o.Out) {
		return o.Out[k].Buf
	}
	return NoBuf
}

// NewOp returns an operation on the compute stream, of the forward pass, without unit, workspace or
// predicate.
func NewOp(kind Kind, name string, in []BufID, out []Out, attr any) Op {
	return Op{Kind: kind, Name: name, In: in, Out: out, Attr: attr, Work: NoBuf, Skip: NoBuf, Unit: -1}
}

// NewCopy returns a copy between two buffers on a stream.
func NewCopy(name string, from, to BufID, stream StreamID, pass Pass, unit int) Op {
	op := NewOp(Copy, name, []BufID{from}, []Out{{Buf: to}}, nil)
	op.Stream, op.Pass, op.Unit = stream, pass, unit
	return op
}

// Buffers calls visit for every buffer ID in the operation, NoBuf included.
func (o *Op) Buffers(visit func(*BufID)) {
	for a := range o.In {
		visit(&o.In[a])
	}
	for a := range o.Out {
		visit(&o.Out[a].Buf)
	}
	visit(&o.Work)
	visit(&o.Skip)
}

// Effect is an operation's access to one operand. Fresh means that the operation replaces all
// old bytes whenever it runs, and reads none of them.
type Effect struct {
	Buf                BufID
	Read, Write, Fresh bool
}

// Effects calls visit for every operand of op: inputs, skip flag, outputs,
// workspace. A workspace's old contents are never read.
func Effects(op *Op, visit func(Effect)) {
	always := op.Skip == NoBuf
	for _, id := range op.In {
		if id != NoBuf {
			visit(Effect{Buf: id, Read: true})
		}
	}
	if op.Skip != NoBuf {
		visit(Effect{Buf: op.Skip, Read: true})
	}
	for _, o := range op.Out {
		if o.Buf != NoBuf {
			fresh := o.Mode == Write
			visit(Effect{Buf: o.Buf, Read: !fresh, Write: true, Fresh: fresh && always})
		}
	}
	if op.Work != NoBuf {
		visit(Effect{Buf: op.Work, Write: true, Fresh: true})
	}
}
