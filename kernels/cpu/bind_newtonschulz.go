package cpu

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// newtonSchulz makes a matrix nearly orthogonal, by the products of package gemm: its bits
// do not depend on SIMD level and threads. See graph.NewtonSchulz.
type newtonSchulz struct {
	x, y          []float32 // (R,C)
	other         []float32 // (R,C): X takes turns in it and in y
	gram, squared []float32 // (K,K), K the smaller of R and C
	sums          []float64 // of squares, by piece
	work          []byte
	tall          bool // R > C
	toGram        *gemm.Product
	square, apply *gemm.Product

	pool                       *pool.Pool
	norm                       float64
	from, to                   []float32 // X and the next one
	sum, begin, mix, copy, end pieces
}

// pieces is work on the elements of a buffer, a piece at a time.
type pieces struct {
	n    int
	each func(lo, hi int)
}

func (p *pieces) RunIndex(i int) {
	lo := i * graph.NewtonSchulzPiece
	p.each(lo, min(lo+graph.NewtonSchulzPiece, p.n))
}

func (p *pieces) run(pl *pool.Pool) { pl.Run(int(graph.NewtonSchulzPieces(int64(p.n))), p) }

// newtonSchulzSpecs are the products of a step.
func newtonSchulzSpecs(rows, cols int) (gram, square, apply gemm.Spec) {
	k := min(rows, cols)
	gram = gemm.Spec{M: k, N: k, K: max(rows, cols), TransA: rows > cols, TransB: rows <= cols}
	return gram, gemm.Spec{M: k, N: k, K: k}, gemm.Spec{M: rows, N: cols, K: k, Accumulate: true}
}

func newtonSchulzWork(rows, cols int) int64 {
	gram, square, apply := newtonSchulzSpecs(rows, cols)
	k, n := int64(min(rows, cols)), int64(rows)*int64(cols)
	return 2*aligned(4*k*k) + aligned(4*n) + aligned(8*graph.NewtonSchulzPieces(n)) +
		aligned(max(gemm.Workspace(gram), gemm.Workspace(square), gemm.Workspace(apply)))
}

func bindNewtonSchulz(b *binding) func() error {
	a := attr[graph.NewtonSchulzAttr](b)
	rows, cols := b.inShape(0)
	small, n := min(rows, cols), rows*cols
	k := &newtonSchulz{x: in[float32](b, 0), y: out[float32](b, 0), tall: rows > cols, pool: b.pool}
	if b.err == nil && a.Axis >= len(b.Coord) {
		b.failf("its owner lies along mesh axis %d, the rank has %d coordinates", a.Axis, len(b.Coord))
	}
	work := slab(b.work(workspace(b.Program, b.Op)))
	if b.err != nil {
		return nil
	}
	if a.Axis >= 0 && b.Coord[a.Axis] != a.Owner {
		return func() error { clear(k.y); return nil }
	}
	k.gram, k.squared = take[float32](&work, int64(small*small)), take[float32](&work, int64(small*small))
	k.other, k.sums = take[float32](&work, int64(n)), take[float64](&work, graph.NewtonSchulzPieces(int64(n)))
	k.work = work
	gram, square, apply := newtonSchulzSpecs(rows, cols)
	k.toGram, k.square, k.apply = b.matmul(gram, nil), b.matmul(square, nil), b.matmul(apply, nil)
	k.elements(n, small*small, float32(a.Factor))
	return k.run
}

// elements prepares what is done element by element. Conversions keep compilers from
// fusing, which would change bits.
func (k *newtonSchulz) elements(n, small int, factor float32) {
	c := graph.NewtonSchulzCoefficients
	first, second, third := float32(c[0]), float32(c[1]), float32(c[2])
	k.sum = pieces{n, func(lo, hi int) {
		s := 0.0
		for _, v := range k.x[lo:hi] {
			s += float64(v) * float64(v) // the product is exact
		}
		k.sums[lo/graph.NewtonSchulzPiece] = s
	}}
	k.begin = pieces{n, func(lo, hi int) {
		for i, v := range k.x[lo:hi] {
			k.to[lo+i] = float32(float64(v) / k.norm)
		}
	}}
	k.mix = pieces{small, func(lo, hi int) {
		for i, g := range k.gram[lo:hi] {
			k.squared[lo+i] = float32(second*g) + float32(third*k.squared[lo+i])
		}
	}}
	k.copy = pieces{n, func(lo, hi int) {
		for i, v := range k.from[lo:hi] {
			k.to[lo+i] = first * v
		}
	}}
	k.end = pieces{n, func(lo, hi int) {
		for i, v := range k.y[lo:hi] {
			k.y[lo+i] = float32(factor*v) + 0 // no −0, which a sum over ranks would make 0
		}
	}}
}

func (k *newtonSchulz) run() error {
	k.sum.run(k.pool)
	squares := 0.0
	for _, s := range k.sums {
		squares += s
	}
	k.norm = math.Sqrt(squares) + 1e-7
	k.to, k.from = k.other, k.y // an odd number of steps ends in y
	k.begin.run(k.pool)
	for range graph.NewtonSchulzSteps {
		k.from, k.to = k.to, k.from
		if err := k.toGram.Run(k.pool, k.from, k.from, k.gram, nil, k.work); err != nil {
			return err
		}
		if err := k.square.Run(k.pool, k.gram, k.gram, k.squared, nil, k.work); err != nil {
			return err
		}
		k.mix.run(k.pool)
		k.copy.run(k.pool)
		left, right := k.squared, k.from
		if k.tall {
			left, right = k.from, k.squared
		}
		if err := k.apply.Run(k.pool, left, right, k.to, nil, k.work); err != nil {
			return err
		}
	}
	k.end.run(k.pool)
	return nil
}
