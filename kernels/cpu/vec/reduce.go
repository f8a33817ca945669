package vec

import (
	"sort"
	"sync/atomic"

	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

const (
	// block is the number of elements whose sum is a fixed expression: 16 float64
	// lanes, combined by the tree.
	block = 256
	// sumGrain is the number of elements of one task of a sum: a power of two of
	// blocks, so that a task's sum is one subtree of the whole.
	sumGrain = 256 * block
)

// SumWork returns the length of Sum.Work for n elements.
func SumWork(n int) int { return tasks(n, sumGrain) }

// Sum is Y = ΣX, or Y += ΣX, in float64: the sums of 256-element blocks are
// combined by the binary tree that splits a range of blocks at the largest power
// of two below its length.
type Sum[T num.Float] struct {
	X          []T
	X16        Half16    // the elements, if X is nil
	Y          []float64 // (1)
	Work       []float64 // (SumWork(len(X)))
	Accumulate bool
}

// Run computes the sum.
func (k *Sum[T]) Run(p *pool.Pool) error {
	c := check{op: "sum"}
	c.size1("Y", "1", len(k.Y), 1)
	c.size1("Work", "SumWork(len(X))", len(k.Work), SumWork(max(len(k.X), len(k.X16.X))))
	if k.X16.X != nil {
		c.half("X16.As", k.X16.As)
	}
	if c.err != nil {
		return c.err
	}
	run(p, len(k.Work), k)
	var t treeSum
	for _, s := range k.Work {
		t.push(s)
	}
	if k.Accumulate {
		k.Y[0] = t.sum() + k.Y[0]
	} else {
		k.Y[0] = t.sum()
	}
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *Sum[T]) RunIndex(i int) {
	lo, hi := piece(i, sumGrain, max(len(k.X), len(k.X16.X)))
	var t treeSum
	if k.X16.X == nil {
		pushBlocks(&t, k.X[lo:hi])
	} else {
		k.X16.widened(nil, lo, hi, func(_, _ int, x []float32) { pushBlocks(&t, x) })
	}
	k.Work[i] = t.sum()
}

func pushBlocks[T num.Float](t *treeSum, x []T) {
	for lo := 0; lo < len(x); lo += block {
		t.push(blockSum(x[lo:min(lo+block, len(x))]))
	}
}

// treeSum adds a sequence by the tree that splits at the largest power of two
// below the count: level[i] holds a complete subtree of 2^i addends where bit i
// of n is set.
type treeSum struct {
	level [48]float64
	n     uint64
}

func (t *treeSum) push(v float64) {
	i := 0
	for ; t.n>>i&1 == 1; i++ {
		v = t.level[i] + v
	}
	t.level[i] = v
	t.n++
}

// sum returns the total; 0 for no addends.
func (t *treeSum) sum() float64 {
	s, some := 0.0, false
	for i := range t.level {
		switch {
		case t.n>>i&1 == 0:
		case some:
			s = t.level[i] + s
		default:
			s, some = t.level[i], true
		}
	}
	return s
}

func blockSum[T num.Float](x []T) float64 {
	if len(x) == block && fast[T](block) {
		return simd.blockSum(ptr(x))
	}
	var a [16]float64
	for i, v := range x {
		a[i&15] += float64(v)
	}
	return tree(&a)
}

// blockSqSum returns the sum of squares of up to 256 elements. The square of a
// float32 is exact in float64.
func blockSqSum(x []float32) float64 {
	if len(x) == block && fast[float32](block) {
		return simd.blockSqSum(ptr(x))
	}
	var a [16]float64
	for i, v := range x {
		a[i&15] += float64(float64(v) * float64(v))
	}
	return tree(&a)
}

// SqSum adds ΣX² to an exact accumulator, as sums of 256-element blocks. X must
// start at a multiple of 256 elements of its parameter, and end at one or at the
// parameter's end: then the accumulated total does not depend on how the
// parameter is split.
type SqSum struct {
	X   []float32
	X16 Half16  // the elements, if X is nil
	Acc []int64 // (exact.Limbs)
}

// Run adds the squares. Several SqSum may run at the same time on one Acc.
func (k *SqSum) Run(p *pool.Pool) error {
	c := check{op: "sqsum"}
	c.size1("Acc", "exact.Limbs", len(k.Acc), exact.Limbs)
	if k.X16.X != nil {
		c.half("X16.As", k.X16.As)
	}
	return c.run(p, tasks(max(len(k.X), len(k.X16.X)), sumGrain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *SqSum) RunIndex(i int) {
	lo, hi := piece(i, sumGrain, max(len(k.X), len(k.X16.X)))
	var limbs [exact.Limbs]int64
	acc := exact.Accumulator(limbs[:])
	k.X16.widened(k.X, lo, hi, func(_, _ int, x []float32) { addSquares(acc, x) }) // blocks of whole sums
	giveTo(k.Acc, acc)
}

// giveTo adds a task's sum to what all of them add to.
func giveTo(to []int64, acc exact.Accumulator) {
	acc.Normalize()
	for j, v := range acc {
		if v != 0 {
			atomic.AddInt64(&to[j], v)
		}
	}
}

func addSquares(acc exact.Accumulator, x []float32) {
	for lo := 0; lo < len(x); lo += block {
		acc.Add(blockSqSum(x[lo:min(lo+block, len(x))]))
	}
}

// ColumnSum is Y[c] = Σ X[n,c] over rows in increasing order, from 0 or, with
// Accumulate, from Y's old value. It is the gradient of a bias.
type ColumnSum[T num.Float] struct {
	N, C       int
	X          []T // (N, C)
	Y          []T // (C)
	Accumulate bool
}

// Run computes the sums.
func (k *ColumnSum[T]) Run(p *pool.Pool) error {
	c := check{op: "column sum"}
	c.dim("N", k.N)
	c.dim("C", k.C)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size1("Y", "C", len(k.Y), k.C)
	return c.run(p, tasks(k.C, colGrain), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *ColumnSum[T]) RunIndex(i int) {
	lo, hi := piece(i, colGrain, k.C)
	colSum(k.Y[lo:hi], k.X, k.N, k.C, lo, k.Accumulate)
}

// position is that of row n of those from row first on, in its document: (first + n) mod seq, less
// where the document starts among the seq rows if there are starts.
func position[T num.Float](n, first, seq int, starts []T) int {
	t := (first + n) % seq
	if len(starts) > 0 {
		t -= startOf(starts[n], t)
	}
	return t
}

// startOf is where the document of row t starts: 0 to t.
func startOf[T num.Float](start T, t int) int {
	if !(start > 0) {
		return 0
	}
	return min(int(start), t)
}

// nextAt is the first row from n on, of rows rows from row first on, whose position is t; rows if
// there is none.
func nextAt[T num.Float](n, t, first, seq, rows int, starts []T) int {
	if len(starts) == 0 {
		return min(n+(t-(first+n)%seq+seq)%seq, rows)
	}
	for begin := n - (first+n)%seq; begin < rows; begin += seq {
		of := starts[:min(begin+seq, rows)]
		for i := max(n, begin+t); i < len(of); {
			switch s := startOf(of[i], i-begin); {
			case i-begin-s == t:
				return i
			case i-begin-s < t:
				i = begin + s + t
			default: // on to the next document
				i += 1 + sort.Search(len(of)-i-1, func(k int) bool { return of[i+1+k] > of[i] }) + t
			}
		}
	}
	return rows
}

// AddPos is Y[n] = X[n] + Pos[t] for every row, t its position. Y may be X.
type AddPos[T num.Float] struct {
	N, C, Seq int
	First     int // of the N rows, in the whole whose row 0 has position 0
	Starts    []T // (N): where in its Seq rows a row's document starts; nil: at 0
	X         []T // (N, C)
	Pos       []T // (P, C), P >= Seq
	Y         []T // (N, C)
}

// Run computes the sum.
func (k *AddPos[T]) Run(p *pool.Pool) error {
	c := check{op: "add positions"}
	c.dim("N", k.N)
	c.positive("C", k.C)
	c.positive("Seq", k.Seq)
	c.size2("X", "(N, C)", len(k.X), k.N, k.C)
	c.size2("Y", "(N, C)", len(k.Y), k.N, k.C)
	c.atLeastRows("Pos", len(k.Pos), k.Seq, k.C)
	c.starts(len(k.Starts), k.N)
	return c.run(p, tasks(k.N, rowGrain(k.C)), k)
}

// starts refuses another number of starts than rows, unless there are none.
func (c *check) starts(got, n int) {
	if c.err == nil && got != 0 && got != n {
		c.fail("Starts has %d elements, want one for each of N = %d rows", got, n)
	}
}

// atLeastRows refuses lengths that are not whole rows of c, seq of them or more.
func (c *check) atLeastRows(name string, got, seq, cols int) {
	if n, ok := product(seq, cols); c.err == nil && (!ok || got < n || got%cols != 0) {
		c.fail("%s has %d elements, want (P, C) with C = %d and P at least Seq = %d", name, got, cols, seq)
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *AddPos[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		a, b, t := n*k.C, (n+1)*k.C, position(n, k.First, k.Seq, k.Starts)
		binary(Add, k.Y[a:b], k.X[a:b], k.Pos[t*k.C:(t+1)*k.C], false)
	}
}

// AddPosGrad is DPos[t] = Σ DY[n] over the rows at position t, in increasing
// order from 0 or, with Accumulate, from the old value. Rows of DPos from Seq on
// become 0 (stay, with Accumulate).
type AddPosGrad[T num.Float] struct {
	N, C, Seq  int
	First      int // as AddPos's
	Starts     []T // as AddPos's
	DY         []T // (N, C)
	DPos       []T // (P, C), P >= Seq
	Accumulate bool
}

// Run computes the sums.
func (k *AddPosGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "add positions gradient"}
	c.dim("N", k.N)
	c.positive("C", k.C)
	c.positive("Seq", k.Seq)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.atLeastRows("DPos", len(k.DPos), k.Seq, k.C)
	c.starts(len(k.Starts), k.N)
	if c.err == nil {
		run(p, tasks(len(k.DPos)/k.C, rowGrain(k.C)), k)
	}
	return c.err
}

// RunIndex is a pool.Task's; call Run.
func (k *AddPosGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), len(k.DPos)/k.C)
	if !k.Accumulate {
		clear(k.DPos[lo*k.C : hi*k.C])
	}
	for t := lo; t < min(hi, k.Seq); t++ {
		d := k.DPos[t*k.C : (t+1)*k.C]
		for n := nextAt(0, t, k.First, k.Seq, k.N, k.Starts); n < k.N; n = nextAt(n+1, t, k.First, k.Seq, k.N, k.Starts) {
			binary(Add, d, d, k.DY[n*k.C:(n+1)*k.C], false)
		}
	}
}
