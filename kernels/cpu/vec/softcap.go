package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// SoftCap is Y = Cap·tanh(X/Cap), elementwise (Bello et al., "Neural combinatorial
// optimization with reinforcement learning", 2016). Y may be X.
type SoftCap[T num.Float] struct {
	Cap  T
	X, Y []T
}

// Run computes the bounded values.
func (k *SoftCap[T]) Run(p *pool.Pool) error {
	c := check{op: "softcap"}
	c.size1("Y", "that of X", len(k.Y), len(k.X))
	return c.run(p, tasks(len(k.X), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *SoftCap[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.X))
	softCap(k.Y[lo:hi], k.X[lo:hi], k.Cap)
}

// SoftCapGrad is DX = DY·(1 - (Y/Cap)²), or DX += that. DX may be DY or Y.
type SoftCapGrad[T num.Float] struct {
	Cap        T
	DY, Y, DX  []T
	Accumulate bool
}

// Run computes the gradient.
func (k *SoftCapGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "softcap gradient"}
	c.size1("DY", "that of Y", len(k.DY), len(k.Y))
	c.size1("DX", "that of Y", len(k.DX), len(k.Y))
	return c.run(p, tasks(len(k.Y), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *SoftCapGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Y))
	softCapGrad(k.DX[lo:hi], k.DY[lo:hi], k.Y[lo:hi], k.Cap, k.Accumulate)
}

func softCap[T num.Float](y, x []T, limit T) {
	for i, v := range x {
		y[i] = num.SoftCap(v, limit)
	}
}

func softCapGrad[T num.Float](dx, dy, y []T, limit T, acc bool) {
	for i, v := range y {
		set(&dx[i], T(dy[i]*num.SoftCapGrad(v, limit)), acc)
	}
}

// HalfSoftCap is SoftCap of 16-bit operands.
func HalfSoftCap(as Half, x, y []uint16, limit float32) *HalfRows {
	return elementwise16("softcap", as, [3][]uint16{x}, y, false, func(t *tile) { softCap(t.out[0], t.in[0], limit) })
}

// HalfSoftCapGrad is SoftCapGrad of 16-bit operands.
func HalfSoftCapGrad(as Half, dy, y, dx []uint16, limit float32, accumulate bool) *HalfRows {
	return elementwise16("softcap gradient", as, [3][]uint16{dy, y}, dx, accumulate, func(t *tile) {
		softCapGrad(t.out[0], t.in[0], t.in[1], limit, accumulate)
	})
}
