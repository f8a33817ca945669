package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Act names an elementwise activation.
type Act uint8

// Activations, defined in package num.
const (
	GELUTanh Act = iota // GELU's tanh form, as GPT-2 uses
	GELU                // x·Φ(x)
	SiLU                // x·sigmoid(x)
	ReLU                // max(x, 0); its derivative at 0 is 0
	numActs
)

// Activation is Y = Act(X), elementwise. Y may be X.
type Activation[T num.Float] struct {
	Act  Act
	X, Y []T
}

// Run computes the activation.
func (k *Activation[T]) Run(p *pool.Pool) error {
	c := check{op: "activation"}
	if k.Act >= numActs {
		c.fail("Act is %d, want one of the activations, below %d", k.Act, numActs)
	}
	c.size1("Y", "that of X", len(k.Y), len(k.X))
	return c.run(p, tasks(len(k.X), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Activation[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.X))
	activate(k.Act, k.Y[lo:hi], k.X[lo:hi])
}

// ActivationGrad is DX = DY·Act'(X), or DX += that. DX may be DY or X.
type ActivationGrad[T num.Float] struct {
	Act        Act
	DY, X, DX  []T
	Accumulate bool
}

// Run computes the gradient.
func (k *ActivationGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "activation gradient"}
	if k.Act >= numActs {
		c.fail("Act is %d, want one of the activations, below %d", k.Act, numActs)
	}
	c.size1("DY", "that of X", len(k.DY), len(k.X))
	c.size1("DX", "that of X", len(k.DX), len(k.X))
	return c.run(p, tasks(len(k.X), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *ActivationGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.X))
	activateGrad(k.Act, k.DX[lo:hi], k.DY[lo:hi], k.X[lo:hi], k.Accumulate)
}

// SwiGLU is Y = SiLU(Gate)·Up, elementwise (Shazeer, "GLU variants improve
// transformer", 2020). Y may be Gate or Up.
type SwiGLU[T num.Float] struct{ Gate, Up, Y []T }

// Run computes the product.
func (k *SwiGLU[T]) Run(p *pool.Pool) error {
	c := check{op: "swiglu"}
	c.size1("Up", "that of Gate", len(k.Up), len(k.Gate))
	c.size1("Y", "that of Gate", len(k.Y), len(k.Gate))
	return c.run(p, tasks(len(k.Gate), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *SwiGLU[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Gate))
	swiglu(k.Y[lo:hi], k.Gate[lo:hi], k.Up[lo:hi])
}

// SwiGLUGrad writes DGate = DY·Up·SiLU'(Gate) and DUp = DY·SiLU(Gate). Either
// output may be any of the inputs, but not the other output.
type SwiGLUGrad[T num.Float] struct {
	DY, Gate, Up, DGate, DUp []T
}

// Run computes the gradients.
func (k *SwiGLUGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "swiglu gradient"}
	n := len(k.Gate)
	c.size1("Up", "that of Gate", len(k.Up), n)
	c.size1("DY", "that of Gate", len(k.DY), n)
	c.size1("DGate", "that of Gate", len(k.DGate), n)
	c.size1("DUp", "that of Gate", len(k.DUp), n)
	return c.run(p, tasks(n, grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *SwiGLUGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Gate))
	swigluGrad(k.DGate[lo:hi], k.DUp[lo:hi], k.DY[lo:hi], k.Gate[lo:hi], k.Up[lo:hi])
}

func activate[T num.Float](a Act, y, x []T) {
	if m := groups[T](len(x)); m > 0 {
		simd.act[a](ptr(y), ptr(x), m)
		y, x = y[m:], x[m:]
	}
	switch a {
	case GELUTanh:
		for i, v := range x {
			y[i] = num.GELUTanh(v)
		}
	case GELU:
		for i, v := range x {
			y[i] = num.GELU(v)
		}
	case SiLU:
		for i, v := range x {
			y[i] = num.SiLU(v)
		}
	case ReLU:
		for i, v := range x {
			y[i] = num.ReLU(v)
		}
	}
}

func activateGrad[T num.Float](a Act, dx, dy, x []T, acc bool) {
	if m := groups[T](len(x)); m > 0 {
		simd.actGrad[a][index(acc)](ptr(dx), ptr(dy), ptr(x), m)
		dx, dy, x = dx[m:], dy[m:], x[m:]
	}
	switch a {
	case GELUTanh:
		for i, v := range x {
			set(&dx[i], T(dy[i]*num.GELUTanhGrad(v)), acc)
		}
	case GELU:
		for i, v := range x {
			set(&dx[i], T(dy[i]*num.GELUGrad(v)), acc)
		}
	case SiLU:
		for i, v := range x {
			set(&dx[i], T(dy[i]*num.SiLUGrad(v)), acc)
		}
	case ReLU:
		for i, v := range x {
			d := dy[i]
			if v <= 0 {
				d = 0
			}
			set(&dx[i], d, acc)
		}
	}
}

func swiglu[T num.Float](y, gate, up []T) {
	if m := groups[T](len(gate)); m > 0 {
		simd.swiglu(ptr(y), ptr(gate), ptr(up), m)
		y, gate, up = y[m:], gate[m:], up[m:]
	}
	for i, g := range gate {
		y[i] = T(T(g*num.Sigmoid(g)) * up[i])
	}
}

func swigluGrad[T num.Float](dgate, dup, dy, gate, up []T) {
	if m := groups[T](len(gate)); m > 0 {
		simd.swigluGrad(ptr(dgate), ptr(dup), ptr(dy), ptr(gate), ptr(up), m)
		dgate, dup, dy, gate, up = dgate[m:], dup[m:], dy[m:], gate[m:], up[m:]
	}
	for i, g := range gate {
		s := num.Sigmoid(g)
		q := T(g * s)
		d, u := dy[i], up[i]
		dup[i] = T(d * q)
		dgate[i] = T(T(d*u) * num.Fma(q, T(1-s), s))
	}
}
