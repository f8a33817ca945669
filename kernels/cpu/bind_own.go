package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// bindOwn prepares an operation made by graph.Define. Its workspace has the size in the definition,
// followed by the 16-bit operands as f32.
func bindOwn(b *binding) func() error {
	def := b.Op.Own.Definition()
	call := kernels.OwnCall(&b.Binding)
	all := b.work()
	if def.Work != nil {
		if n := def.Work(call.Attr, shapesOf(call.In), shapesOf(call.Out)); n > 0 {
			call.Work = take[byte](&all, n)
		}
	}
	o := &ownKernel{call: call, run: def.CPU}
	for i, id := range b.Op.In {
		o.operand(b, &all, &call.In[i], id, func() { b.tensor(&call.In[i], id, "input", i) }, func() []uint16 { return in[uint16](b, i) }, true, false)
	}
	for i, out1 := range b.Op.Out {
		o.operand(b, &all, &call.Out[i], out1.Buf, func() { b.tensor(&call.Out[i], out1.Buf, "output", i) }, func() []uint16 { return out[uint16](b, i) },
			out1.Mode != graph.Write, true)
	}
	if params, err := kernels.OwnParams(&b.Binding); err != nil {
		b.failf("%w", err)
	} else {
		call.Params = params
	}
	if b.err != nil {
		return nil
	}
	p := &parallel{}
	shared := b.pool
	call.Run = func(n int, f func(int)) {
		p.f = f
		shared.Run(n, p)
	}
	return o.Run
}

// parallel is a function as a task of the pool.
type parallel struct{ f func(i int) }

var _ pool.Task = (*parallel)(nil)

func (p *parallel) RunIndex(i int) { p.f(i) }

// ownKernel runs an operation made by graph.Define.
type ownKernel struct {
	call  *graph.Call
	run   func(c *graph.Call) error
	widen []converted
	round []converted
}

// converted is a 16-bit operand and its values as f32.
type converted struct {
	as   vec.Half
	half []uint16
	wide []float32
}

// operand sets a tensor's elements.
func (o *ownKernel) operand(b *binding, all *slab, t *graph.Tensor, id graph.BufID, plain func(), bits func() []uint16, read, written bool) {
	if id == graph.NoBuf || b.err != nil {
		return
	}
	as := halves[b.Program.Buf(id).DType]
	if as == vec.NoHalf {
		plain()
		return
	}
	c := converted{as: as, half: bits(), wide: take[float32](all, b.Program.Buf(id).Elems())}
	t.F32 = c.wide
	if read {
		o.widen = append(o.widen, c)
	}
	if written {
		o.round = append(o.round, c)
	}
}

// tensor views an operand that is not stored in 16 bits.
func (b *binding) tensor(t *graph.Tensor, id graph.BufID, what string, i int) {
	p := b.In
	if what == "output" {
		p = b.Out
	}
	switch b.Program.Buf(id).DType {
	case graph.F32:
		t.F32 = view[float32](b, what, p[i])
	case graph.F64:
		t.F64 = view[float64](b, what, p[i])
	case graph.I64:
		t.I64 = view[int64](b, what, p[i])
	case graph.I32:
		t.I32 = view[int32](b, what, p[i])
	default:
		b.failf("%s %d is %v, which an operation of the program's own cannot have", what, i, b.Program.Buf(id).DType)
	}
}

func (o *ownKernel) Run() error {
	for i := range o.widen {
		vec.WidenRow(o.widen[i].as, o.widen[i].wide, o.widen[i].half)
	}
	if err := o.run(o.call); err != nil {
		return err
	}
	for i := range o.round {
		vec.NarrowRow(o.round[i].as, o.round[i].half, o.round[i].wide)
	}
	return nil
}

func shapesOf(list []graph.Tensor) (shapes [][]int64) {
	for i := range list {
		shapes = append(shapes, list[i].Shape)
	}
	return shapes
}
