package interp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// own computes a user-defined operation: in fp64 with its reference, in f32 with its CPU kernel,
// whose bits the bound kernel must give.
func own[T num.Float](c *call[T]) {
	def := c.op.Own.Definition()
	b := &kernels.Binding{Program: c.w.prog, Op: c.op, Coord: c.w.ranks[c.rank].coord}
	call := kernels.OwnCall(b)
	var err error
	call.Params, err = kernels.OwnParams(b)
	c.note(err)
	for i := range c.op.In {
		if call.In[i].Present() {
			c.tensorOf(&call.In[i], c.op.In[i], c.in, i)
		}
	}
	for i := range c.op.Out {
		if call.Out[i].Present() {
			c.tensorOf(&call.Out[i], c.op.Out[i].Buf, c.out, i)
		}
	}
	if def.Work != nil {
		var in, out [][]int64
		for i := range call.In {
			in = append(in, call.In[i].Shape)
		}
		for i := range call.Out {
			out = append(out, call.Out[i].Shape)
		}
		call.Work = make([]byte, max(0, def.Work(call.Attr, in, out)))
	}
	run := def.CPU
	if _, wide := any(*new(T)).(float64); wide {
		if run = def.Reference; run == nil {
			c.note(fmt.Errorf("operation %q has no reference in fp64", def.Kind))
		}
	}
	if c.err == nil {
		c.note(run(call))
	}
}

// tensorOf fills in the elements of a tensor of a call. floats returns the operand as floats.
func (c *call[T]) tensorOf(t *graph.Tensor, id graph.BufID, floats func(int) tensor[T], i int) {
	var err error
	switch t.DType {
	case graph.F32, graph.BF16, graph.F16:
		switch v := any(floats(i).v).(type) {
		case []float32:
			t.F32 = v
		case []float64:
			t.F64 = v
		}
	case graph.F64:
		t.F64, err = c.w.F64(c.rank, id)
	case graph.I64:
		t.I64, err = c.w.I64(c.rank, id)
	case graph.I32:
		t.I32, err = c.w.I32(c.rank, id)
	default:
		err = fmt.Errorf("operand of %v in an operation of the program's own", t.DType)
	}
	c.note(err)
}
