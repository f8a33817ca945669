package kernels

import (
	"fmt"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// place is an operand and its memory.
type place struct {
	what string
	buf  graph.BufID
	ptr  device.Ptr
}

// Places checks the memory of an operation's operands; graph.Check must have passed the
// operation. Each operand must lie inside its arena and be as long as its buffer. No output
// may overlap another operand, unless both are the same buffer (an update in place). Places
// returns the memory of all present operands, which an execution reads or writes.
func (b *Binding) Places() ([]device.Ptr, error) {
	if len(b.In) != len(b.Op.In) || len(b.Out) != len(b.Op.Out) {
		return nil, fmt.Errorf("got places for %d inputs and %d outputs, the operation has %d and %d",
			len(b.In), len(b.Out), len(b.Op.In), len(b.Op.Out))
	}
	var in, out []place
	for i, id := range b.Op.In {
		in = append(in, place{fmt.Sprintf("input %d", i), id, b.In[i]})
	}
	if b.Op.Skip != graph.NoBuf {
		in = append(in, place{"skip", b.Op.Skip, b.Skip})
	}
	for i, o := range b.Op.Out {
		out = append(out, place{fmt.Sprintf("output %d", i), o.Buf, b.Out[i]})
	}
	if b.Op.Work != graph.NoBuf {
		out = append(out, place{"workspace", b.Op.Work, b.Work})
	}
	var touches []device.Ptr
	for _, list := range [2][]place{in, out} {
		for _, p := range list {
			if p.buf == graph.NoBuf {
				continue
			}
			buf := b.Program.Buf(p.buf)
			if err := p.ptr.Check(); err != nil {
				return nil, fmt.Errorf("%s (%s): %w", p.what, buf.Name, err)
			}
			if p.ptr.Len != buf.Bytes() {
				return nil, fmt.Errorf("%s (%s): got a place of %d bytes, shape %v of %v takes %d", p.what, buf.Name, p.ptr.Len, buf.Shape, buf.DType, buf.Bytes())
			}
			touches = append(touches, p.ptr)
		}
	}
	for i, o := range out {
		for _, q := range append(in, out[i+1:]...) {
			if o.buf != graph.NoBuf && q.buf != graph.NoBuf && o.buf != q.buf && o.ptr.Overlaps(q.ptr) {
				return nil, fmt.Errorf("%s (%s) and %s (%s) overlap", o.what, b.Program.Buf(o.buf).Name, q.what, b.Program.Buf(q.buf).Name)
			}
		}
	}
	return touches, nil
}
