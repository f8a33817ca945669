package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Op is an operation of Binary.
type Op int

// Operations.
const (
	Add Op = iota
	Sub
	Mul
)

var opNames = [...]string{"add", "sub", "mul"}

// Binary is Y = A op B, element by element, or Y += that. Y may be A or B.
type Binary[T num.Float] struct {
	Op         Op
	A, B, Y    []T
	Accumulate bool
}

// Run computes.
func (k *Binary[T]) Run(p *pool.Pool) error {
	c := check{op: opNames[k.Op]}
	c.size1("B", "that of A", len(k.B), len(k.A))
	c.size1("Y", "that of A", len(k.Y), len(k.A))
	return c.run(p, tasks(len(k.A), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Binary[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.A))
	binary(k.Op, k.Y[lo:hi], k.A[lo:hi], k.B[lo:hi], k.Accumulate)
}

// Scale is Y = Factor·X, or Y += Factor·X with the product rounded first. Y may
// be X.
type Scale[T num.Float] struct {
	X, Y       []T
	Factor     T
	Accumulate bool
}

// Run computes the product.
func (k *Scale[T]) Run(p *pool.Pool) error {
	c := check{op: "scale"}
	c.size1("Y", "that of X", len(k.Y), len(k.X))
	return c.run(p, tasks(len(k.X), grain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Scale[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.X))
	scale(k.Y[lo:hi], k.X[lo:hi], k.Factor, k.Accumulate)
}

// ScaleRow is Scale of a part of a task.
func ScaleRow(y, x []float32, factor float32, accumulate bool) { scale(y, x, factor, accumulate) }

// AddRow is y = a + b, of a part of a task.
func AddRow(y, a, b []float32) { binary(Add, y, a, b, false) }

// Fill is Y = Value, or Y += Value, for every element.
type Fill[T num.Float] struct {
	Y          []T
	Value      T
	Accumulate bool
}

// Run fills.
func (k *Fill[T]) Run(p *pool.Pool) error {
	run(p, tasks(len(k.Y), grain), k)
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *Fill[T]) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.Y))
	fill(k.Y[lo:hi], k.Value, k.Accumulate)
}

func binary[T num.Float](op Op, y, a, b []T, acc bool) {
	if m := groups[T](len(y)); m > 0 {
		simd.binary[op][index(acc)](ptr(y), ptr(a), ptr(b), m)
		y, a, b = y[m:], a[m:], b[m:]
	}
	switch op {
	case Add:
		for i := range y {
			set(&y[i], a[i]+b[i], acc)
		}
	case Sub:
		for i := range y {
			set(&y[i], a[i]-b[i], acc)
		}
	case Mul:
		for i := range y {
			set(&y[i], T(a[i]*b[i]), acc)
		}
	}
}

func scale[T num.Float](y, x []T, f T, acc bool) {
	if m := groups[T](len(y)); m > 0 {
		simd.scale[index(acc)](ptr(y), ptr(x), m, float32(f))
		y, x = y[m:], x[m:]
	}
	for i := range y {
		set(&y[i], T(f*x[i]), acc)
	}
}

func fill[T num.Float](y []T, v T, acc bool) {
	if !acc && v == 0 && 1/v > 0 {
		clear(y)
		return
	}
	if m := groups[T](len(y)); m > 0 {
		simd.fill[index(acc)](ptr(y), m, float32(v))
		y = y[m:]
	}
	for i := range y {
		set(&y[i], v, acc)
	}
}
