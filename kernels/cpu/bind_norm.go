package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// runner is a kernel of package vec.
type runner interface{ Run(*pool.Pool) error }

// run returns a function that executes a prepared kernel.
func (b *binding) run(k runner) func() error {
	if b.err != nil {
		return nil
	}
	pool := b.pool
	return func() error { return k.Run(pool) }
}

func bindLayerNorm(b *binding) func() error {
	n, c := b.inShape(0)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfLayerNorm(as, float32(attr[graph.NormAttr](b).Eps), in[uint16](b, 0), in[uint16](b, 1), in[uint16](b, 2),
			out[uint16](b, 0), out[float32](b, 1), out[float32](b, 2)))
	}
	return b.run(&vec.LayerNorm[float32]{
		N: n, C: c, Eps: float32(attr[graph.NormAttr](b).Eps),
		X: in[float32](b, 0), Gamma: in[float32](b, 1), Beta: in[float32](b, 2),
		Y: out[float32](b, 0), Mean: out[float32](b, 1), Rstd: out[float32](b, 2),
	})
}

func bindLayerNormGrad(b *binding) func() error {
	n, c := b.inShape(1)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfLayerNormGrad(vec.HalfNormGrad{
			As: as, DY: in[uint16](b, 0), X: in[uint16](b, 1), Gamma: in[uint16](b, 2), Mean: in[float32](b, 3), Rstd: in[float32](b, 4),
			DX: out[uint16](b, 0), AccumulateDX: b.accum(0), DGamma: b.sum(1), DBeta: b.sum(2),
		}))
	}
	return b.run(&vec.LayerNormGrad[float32]{
		N: n, C: c,
		DY: in[float32](b, 0), X: in[float32](b, 1), Gamma: in[float32](b, 2), Mean: in[float32](b, 3), Rstd: in[float32](b, 4),
		DX: out[float32](b, 0), DGamma: out[float32](b, 1), DBeta: out[float32](b, 2),
		AccumulateDX: b.accum(0), AccumulateDGamma: b.accum(1), AccumulateDBeta: b.accum(2),
	})
}

// gain returns scratch for the gain 1 + gamma, if the RMS norm uses it, else nil.
func (b *binding) gain(c int) []float32 {
	if !attr[graph.NormAttr](b).PlusOne {
		return nil
	}
	work := b.work()
	return take[float32](&work, int64(c))
}

func bindRMSNorm(b *binding) func() error {
	n, c := b.inShape(0)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfRMSNorm(as, float32(attr[graph.NormAttr](b).Eps), attr[graph.NormAttr](b).PlusOne, in[uint16](b, 0), in[uint16](b, 1),
			out[uint16](b, 0), out[float32](b, 1)))
	}
	return b.run(&vec.RMSNorm[float32]{
		N: n, C: c, Eps: float32(attr[graph.NormAttr](b).Eps),
		X: in[float32](b, 0), Gamma: in[float32](b, 1), Gain: b.gain(c),
		Y: out[float32](b, 0), Rstd: out[float32](b, 1),
	})
}

func bindRMSNormGrad(b *binding) func() error {
	n, c := b.inShape(1)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfRMSNormGrad(vec.HalfNormGrad{
			As: as, DY: in[uint16](b, 0), X: in[uint16](b, 1), Gamma: in[uint16](b, 2), Rstd: in[float32](b, 3),
			DX: out[uint16](b, 0), AccumulateDX: b.accum(0), DGamma: b.sum(1), PlusOne: attr[graph.NormAttr](b).PlusOne,
		}))
	}
	return b.run(&vec.RMSNormGrad[float32]{
		N: n, C: c,
		DY: in[float32](b, 0), X: in[float32](b, 1), Gamma: in[float32](b, 2), Gain: b.gain(c), Rstd: in[float32](b, 3),
		DX: out[float32](b, 0), DGamma: out[float32](b, 1),
		AccumulateDX: b.accum(0), AccumulateDGamma: b.accum(1),
	})
}

func bindSoftmax(b *binding) func() error {
	n, c := b.inShape(0)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfSoftmax(as, c, in[uint16](b, 0), out[uint16](b, 0)))
	}
	return b.run(&vec.Softmax[float32]{N: n, C: c, X: in[float32](b, 0), Y: out[float32](b, 0)})
}

func bindSoftmaxGrad(b *binding) func() error {
	n, c := b.inShape(1)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfSoftmaxGrad(as, c, in[uint16](b, 0), in[uint16](b, 1), out[uint16](b, 0), b.accum(0)))
	}
	return b.run(&vec.SoftmaxGrad[float32]{
		N: n, C: c, DY: in[float32](b, 0), Y: in[float32](b, 1), DX: out[float32](b, 0), Accumulate: b.accum(0),
	})
}
