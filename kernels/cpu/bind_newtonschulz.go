package cpu

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// newtonSchulz makes a matrix nearly orthogonal with the products of package gemm. Its bits do not
// depend on SIMD level and threads. See graph.NewtonSchulz.
//
// Two of a step's three products are symmetric, so only half of each is computed. The third product
// includes a·X: its factor has a on the diagonal. The last step's factor is multiplied by Factor.
// So after the first product, only products read or write matrices of x's shape.
type newtonSchulz struct {
	x, y          []float32          // (R,C)
	other         []float32          // (R,C): X alternates between this and y
	gram, squared []float32          // (K,K), K the smaller of R and C
	zeros         []float32          // (C)
	norm          [exact.Limbs]int64 // the squares of x
	work          []byte
	tall          bool // R > C
	toGram        *gemm.Product
	square, apply *gemm.Product
	squares       vec.SqSum
	begin         vec.Scale[float32]
	factor        float32
	mix           polynomial

	pool *pool.Pool
}

// newtonSchulzSpecs returns the products of a step.
func newtonSchulzSpecs(rows, cols int) (gram, square, apply gemm.Spec) {
	k := min(rows, cols)
	gram = gemm.Spec{M: k, N: k, K: max(rows, cols), TransA: rows > cols, TransB: rows <= cols, Symmetric: true}
	return gram, gemm.Spec{M: k, N: k, K: k, Symmetric: true}, gemm.Spec{M: rows, N: cols, K: k}
}

func bindNewtonSchulz(b *binding) func() error {
	a := attr[graph.NewtonSchulzAttr](b)
	rows, cols := b.inShape(0)
	small, n := min(rows, cols), rows*cols
	k := &newtonSchulz{x: in[float32](b, 0), y: out[float32](b, 0), tall: rows > cols, pool: b.pool}
	k.factor = float32(a.Factor)
	if b.err == nil && a.Axis >= len(b.Coord) {
		b.failf("its owner lies along mesh axis %d, the rank has %d coordinates", a.Axis, len(b.Coord))
	}
	work := b.work()
	if b.err != nil {
		return nil
	}
	if a.Axis >= 0 && b.Coord[a.Axis] != a.Owner {
		return func() error { clear(k.y); return nil }
	}
	k.gram, k.squared = take[float32](&work, int64(small*small)), take[float32](&work, int64(small*small))
	k.other, k.zeros = take[float32](&work, int64(n)), take[float32](&work, int64(cols))
	k.work = work
	gram, square, apply := newtonSchulzSpecs(rows, cols)
	k.toGram, k.square, k.apply = b.matmul(gram, nil), b.matmul(square, &k.mix), b.matmul(apply, nil)
	k.squares = vec.SqSum{X: k.x, Acc: k.norm[:]}
	k.begin = vec.Scale[float32]{X: k.x, Y: k.other}
	c := graph.NewtonSchulzCoefficients
	k.mix = polynomial{gram: k.gram, squared: k.squared, n: small, a: float32(c[0]), b: float32(c[1]), c: float32(c[2])}
	return k.run
}

// polynomial changes squared, finished tiles of G², to a·I + b·G + c·G², times factor in the last
// step.
type polynomial struct {
	gram, squared []float32 // (n,n)
	n             int
	a, b, c       float32
	factor        float32 // or 0
}

func (p *polynomial) Tile(r0, r1, c0, c1 int) {
	for r := r0; r < r1; r++ {
		s := p.squared[r*p.n+c0 : r*p.n+c1]
		vec.ScaleRow(s, s, p.c, false)
		vec.ScaleRow(s, p.gram[r*p.n+c0:r*p.n+c1], p.b, true)
		if r >= c0 && r < c1 {
			s[r-c0] += p.a
		}
		if p.factor != 0 {
			vec.ScaleRow(s, s, p.factor, false)
		}
	}
}

func (k *newtonSchulz) run() error {
	clear(k.zeros)
	clear(k.norm[:])
	if err := k.squares.Run(k.pool); err != nil {
		return err
	}
	k.begin.Factor = float32(1 / (math.Sqrt(exact.Accumulator(k.norm[:]).Float64()) + 1e-7))
	if err := k.begin.Run(k.pool); err != nil {
		return err
	}
	from, to := k.other, k.y // an odd number of steps ends in y
	for step := range graph.NewtonSchulzSteps {
		var bias []float32
		k.mix.factor = 0
		if step == graph.NewtonSchulzSteps-1 {
			k.mix.factor = k.factor
			bias = k.zeros // without −0, which a sum over ranks would change to 0
		}
		if err := k.toGram.Run(k.pool, from, from, k.gram, nil, k.work); err != nil {
			return err
		}
		if err := k.square.Run(k.pool, k.gram, k.gram, k.squared, nil, k.work); err != nil {
			return err
		}
		left, right := k.squared, from
		if k.tall {
			left, right = from, k.squared
		}
		if err := k.apply.Run(k.pool, left, right, to, bias, k.work); err != nil {
			return err
		}
		from, to = to, from
	}
	return nil
}
