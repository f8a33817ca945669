package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func bindActivation(b *binding) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfActivation(as, acts[attr[graph.ActAttr](b).Act], in[uint16](b, 0), out[uint16](b, 0)))
	}
	return b.run(&vec.Activation[float32]{
		Act: acts[attr[graph.ActAttr](b).Act], X: in[float32](b, 0), Y: out[float32](b, 0),
	})
}

func bindActivationGrad(b *binding) func() error {
	return b.activationGrad(acts[attr[graph.ActAttr](b).Act], b.inMatrix(0), b.inMatrix(1), b.outMatrix(0), b.accum(0))
}

func (b *binding) activationGrad(act vec.Act, dy, x, dx matrix, accumulate bool) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfActivationGrad(as, act, dy.u16, x.u16, dx.u16, accumulate))
	}
	return b.run(&vec.ActivationGrad[float32]{Act: act, DY: dy.f32, X: x.f32, DX: dx.f32, Accumulate: accumulate})
}

func bindSoftCap(b *binding) func() error {
	limit := float32(attr[graph.CapAttr](b).Cap)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfSoftCap(as, in[uint16](b, 0), out[uint16](b, 0), limit))
	}
	return b.run(&vec.SoftCap[float32]{Cap: limit, X: in[float32](b, 0), Y: out[float32](b, 0)})
}

func bindSoftCapGrad(b *binding) func() error {
	limit := float32(attr[graph.CapAttr](b).Cap)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfSoftCapGrad(as, in[uint16](b, 0), in[uint16](b, 1), out[uint16](b, 0), limit, b.accum(0)))
	}
	return b.run(&vec.SoftCapGrad[float32]{
		Cap: limit, DY: in[float32](b, 0), Y: in[float32](b, 1), DX: out[float32](b, 0), Accumulate: b.accum(0),
	})
}

func bindSwiGLU(b *binding) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfSwiGLU(as, in[uint16](b, 0), in[uint16](b, 1), out[uint16](b, 0)))
	}
	return b.run(&vec.SwiGLU[float32]{Gate: in[float32](b, 0), Up: in[float32](b, 1), Y: out[float32](b, 0)})
}

func bindSwiGLUGrad(b *binding) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfSwiGLUGrad(as, in[uint16](b, 0), in[uint16](b, 1), in[uint16](b, 2), out[uint16](b, 0), out[uint16](b, 1)))
	}
	return b.run(&vec.SwiGLUGrad[float32]{
		DY: in[float32](b, 0), Gate: in[float32](b, 1), Up: in[float32](b, 2),
		DGate: out[float32](b, 0), DUp: out[float32](b, 1),
	})
}

var ops = map[graph.Kind]vec.Op{graph.Add: vec.Add, graph.Sub: vec.Sub, graph.Mul: vec.Mul}

func bindBinary(b *binding) func() error {
	op := ops[b.Op.Kind]
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfBinary(op, as, in[uint16](b, 0), in[uint16](b, 1), out[uint16](b, 0), b.accum(0)))
	}
	return b.run(&vec.Binary[float32]{Op: op, A: in[float32](b, 0), B: in[float32](b, 1), Y: out[float32](b, 0), Accumulate: b.accum(0)})
}

func bindScale(b *binding) func() error {
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfScale(as, in[uint16](b, 0), out[uint16](b, 0), float32(attr[graph.ScaleAttr](b).Factor), b.accum(0)))
	}
	return b.run(&vec.Scale[float32]{
		Factor: float32(attr[graph.ScaleAttr](b).Factor),
		X:      in[float32](b, 0), Y: out[float32](b, 0), Accumulate: b.accum(0),
	})
}
