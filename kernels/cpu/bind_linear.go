package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// linearSpec returns the product of a linear, or of one of its gradients, over m rows: x (m,k), w
// (k,n) or, transposed, (n,k).
func linearSpec(p *graph.Program, op *graph.Op) gemm.Spec {
	trans := op.Attr.(graph.LinearAttr).TransW
	width := func(id graph.BufID) (rows, cols int) {
		b := p.Buf(id)
		cols = int(b.Shape[len(b.Shape)-1])
		return int(b.Elems()) / cols, cols
	}
	var s gemm.Spec
	m, in := width(op.In[0])
	_, out := width(op.Out[0].Buf)
	switch op.Kind {
	case graph.Linear, graph.LinearAct:
		s = gemm.Forward(m, in, out, trans)
	case graph.LinearGradX, graph.LinearGradAct: // dy (m,out), w → dx (m,in)
		s = gemm.InputGradient(m, out, in, trans)
	default: // x (m,in), dy (m,out) → dw
		_, out = width(op.In[1])
		s = gemm.WeightGradient(m, in, out, trans)
	}
	s.Accumulate = op.Out[0].Mode == graph.Accum
	s.In, s.Out = gemmTypes[p.Buf(op.In[0]).DType], gemmTypes[p.Buf(op.Out[0].Buf).DType]
	if op.Attr.(graph.LinearAttr).Int8 {
		s.In = gemm.S8
	}
	return s
}

var gemmTypes = map[graph.DType]gemm.Type{graph.F32: gemm.F32, graph.BF16: gemm.BF16, graph.F16: gemm.F16}

var acts = map[graph.ActKind]vec.Act{
	graph.ActGELUTanh: vec.GELUTanh,
	graph.ActGELU:     vec.GELU,
	graph.ActSiLU:     vec.SiLU,
	graph.ActReLU:     vec.ReLU,
}

// activate is the epilogue of a linear with an activation: y = act(x), both (M, n). 16-bit x is
// already rounded, so y has the same bits whether x is kept or y is recomputed from it.
type activate struct {
	act  vec.Act
	as   vec.Half
	x, y matrix
	n    int
}

// Tile applies the activation to rows [r0, r1) and columns [c0, c1).
func (a *activate) Tile(r0, r1, c0, c1 int) {
	if a.as != vec.NoHalf {
		vec.ActivateTile16(a.as, a.act, a.x.u16, a.y.u16, a.n, r0, r1, c0, c1)
		return
	}
	for r := r0; r < r1; r++ {
		k := vec.Activation[float32]{Act: a.act, X: a.x.f32[r*a.n+c0 : r*a.n+c1], Y: a.y.f32[r*a.n+c0 : r*a.n+c1]}
		k.RunIndex(0)
	}
}

// activateSums is the epilogue of a linear whose activation uses the unrounded sums: y = act(sums),
// pre = sums, all (M, n).
type activateSums struct {
	act    vec.Act
	as     vec.Half
	sums   []float32
	pre, y []uint16
	n      int
}

// Tile finishes rows [r0, r1) and columns [c0, c1).
func (a *activateSums) Tile(r0, r1, c0, c1 int) {
	vec.ActivateSums16(a.as, a.act, a.sums, a.pre, a.y, a.n, r0, r1, c0, c1)
}

// bindLinearAct keeps the sums of a 16-bit product in workspace until its epilogue has
// rounded them.
func bindLinearAct(b *binding) func() error {
	a := attr[graph.LinearAttr](b)
	if b.asIn(0) == vec.NoHalf {
		return bindLinear(b)
	}
	s := linearSpec(b.Program, b.Op)
	s.Out = gemm.F32
	work := b.work()
	e := &activateSums{act: acts[a.Act], as: b.asIn(0), pre: out[uint16](b, 1), y: out[uint16](b, 0)}
	e.sums = take[float32](&work, int64(len(e.y)))
	_, e.n = b.outShape(0)
	k := b.matmul(s, e)
	x, w, bias, pool := in[uint16](b, 0), in[uint16](b, 1), in[uint16](b, 2), b.pool
	return func() error { return k.RunHalf(pool, x, w, gemm.Bytes(e.sums), bias, work) }
}

func bindLinear(b *binding) func() error {
	a := attr[graph.LinearAttr](b)
	y := b.outMatrix(0)
	var epilogue gemm.Epilogue
	if a.Act != graph.ActNone {
		e := &activate{act: acts[a.Act], as: b.asIn(0), x: y, y: y}
		_, e.n = b.outShape(0)
		if b.hasOut(1) {
			e.x = b.outMatrix(1)
			y = e.x
		}
		epilogue = e
	}
	return b.product(linearSpec(b.Program, b.Op), epilogue, b.inMatrix(0), b.inMatrix(1), y, b.inMatrix(2))
}

func bindLinearGrad(b *binding) func() error {
	a := attr[graph.LinearAttr](b)
	first, second := b.inMatrix(0), b.inMatrix(1)
	if ofWeight(b.Op) && a.TransW {
		first, second = second, first // dyᵀ·x
	}
	return b.product(linearSpec(b.Program, b.Op), nil, first, second, b.outMatrix(0), matrix{})
}

// ofWeight says whether an operation is the gradient of a linear's weight.
func ofWeight(op *graph.Op) bool {
	return op.Kind == graph.LinearGradW || op.Kind == graph.LinearGradWB
}

// bindLinearGradWB runs the product and then the column sums.
func bindLinearGradWB(b *binding) func() error {
	product, sums := bindLinearGrad(b), columnSums(b, 1, 1)
	return func() error {
		if err := product(); err != nil {
			return err
		}
		return sums()
	}
}

// bindLinearGradAct computes the product, rounds it, and multiplies it in place by the
// activation's derivative.
func bindLinearGradAct(b *binding) func() error {
	product, act := bindLinearGrad(b), acts[attr[graph.LinearAttr](b).Act]
	d := b.outMatrix(0)
	derivative := b.activationGrad(act, d, b.inMatrix(2), d, false)
	return func() error {
		if err := product(); err != nil {
			return err
		}
		return derivative()
	}
}

// matmul returns a product of the given shape. It is invalid once the binding has an error.
func (b *binding) matmul(s gemm.Spec, e gemm.Epilogue) *gemm.Product {
	s.Portable = b.portable
	k, err := gemm.New(s)
	if err != nil {
		b.failf("%w", err)
		return nil
	}
	k.Epilogue = e
	return k
}

// product prepares C = A·B, of 16-bit or float32 factors, with the operation's complete workspace.
// c has the type in s.
func (b *binding) product(s gemm.Spec, e gemm.Epilogue, a, w, c, bias matrix) func() error {
	if s.In == gemm.S8 {
		return b.int8Product(s, e, a.u16, w.u16, c.bytes(), bias.u16)
	}
	k := b.matmul(s, e)
	work := b.work()
	pool := b.pool
	if s.In != gemm.F32 {
		return func() error { return k.RunHalf(pool, a.u16, w.u16, c.bytes(), bias.u16, work) }
	}
	return func() error { return k.Run(pool, a.f32, w.f32, c.f32, bias.f32, work) }
}
