package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// linearSpec is the product of a linear, or of one of its gradients, over
// m rows: x (m,k), w (k,n) or, transposed, (n,k).
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
	case graph.Linear:
		s = gemm.Forward(m, in, out, trans)
	case graph.LinearGradX: // dy (m,out), w → dx (m,in)
		s = gemm.InputGradient(m, out, in, trans)
	default: // x (m,in), dy (m,out) → dw
		_, out = width(op.In[1])
		s = gemm.WeightGradient(m, in, out, trans)
	}
	s.Accumulate = op.Out[0].Mode == graph.Accum
	return s
}

var acts = map[graph.ActKind]vec.Act{
	graph.ActGELUTanh: vec.GELUTanh,
	graph.ActGELU:     vec.GELU,
	graph.ActSiLU:     vec.SiLU,
	graph.ActReLU:     vec.ReLU,
}

// activate is the epilogue of a linear with an activation: y = act(x), both
// (M, n).
type activate struct {
	act  vec.Act
	x, y []float32
	n    int
}

// Tile applies the activation to rows [r0, r1) and columns [c0, c1).
func (a *activate) Tile(r0, r1, c0, c1 int) {
	for r := r0; r < r1; r++ {
		k := vec.Activation[float32]{Act: a.act, X: a.x[r*a.n+c0 : r*a.n+c1], Y: a.y[r*a.n+c0 : r*a.n+c1]}
		k.RunIndex(0)
	}
}

func bindLinear(b *binding) func() error {
	a := attr[graph.LinearAttr](b)
	x, w, bias := in[float32](b, 0), in[float32](b, 1), in[float32](b, 2)
	y := out[float32](b, 0)
	var epilogue gemm.Epilogue
	if a.Act != graph.ActNone {
		e := &activate{act: acts[a.Act], x: y, y: y}
		_, e.n = b.outShape(0)
		if b.hasOut(1) {
			e.x = out[float32](b, 1)
			y = e.x
		}
		epilogue = e
	}
	return b.product(linearSpec(b.Program, b.Op), epilogue, x, w, y, bias)
}

func bindLinearGrad(b *binding) func() error {
	attr[graph.LinearAttr](b)
	s := linearSpec(b.Program, b.Op)
	first, second, c := in[float32](b, 0), in[float32](b, 1), out[float32](b, 0)
	if b.Op.Kind == graph.LinearGradW && b.Op.Attr.(graph.LinearAttr).TransW {
		first, second = second, first // dyᵀ·x
	}
	return b.product(s, nil, first, second, c, nil)
}

// product prepares C = A·B with the operation's whole workspace.
func (b *binding) product(s gemm.Spec, e gemm.Epilogue, a, w, c, bias []float32) func() error {
	k, err := gemm.New(s)
	if err != nil {
		b.failf("%w", err)
		return nil
	}
	k.Epilogue = e
	work := b.work(workspace(b.Program, b.Op))
	pool := b.pool
	return func() error { return k.Run(pool, a, w, c, bias, work) }
}
