package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// headStatistics is the number of statistics of a row: see HeadStats.
const headStatistics = 3

// HeadStats computes, for each row of the logits of one slice of the classes, the largest
// logit, Σ exp(logit - largest), and the logit of the target or 0 where the slice does not have
// the target.
type HeadStats[T num.Float] struct {
	N, V    int
	First   int     // the slice's first class
	Logits  []T     // (N, V)
	Targets []int32 // (N)
	Stats   []T     // (N, 3)
}

// Run computes the statistics.
func (k *HeadStats[T]) Run(p *pool.Pool) error {
	c := check{op: "head statistics"}
	c.dim("N", k.N)
	c.positive("V", k.V)
	c.size2("Logits", "(N, V)", len(k.Logits), k.N, k.V)
	c.size1("Targets", "N", len(k.Targets), k.N)
	c.size2("Stats", "(N, 3)", len(k.Stats), k.N, headStatistics)
	return c.run(p, tasks(k.N, rowGrain(k.V)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *HeadStats[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.V), k.N)
	for n := lo; n < hi; n++ {
		x, s := k.Logits[n*k.V:(n+1)*k.V], k.Stats[n*headStatistics:][:headStatistics]
		m := rowMax(x)
		s[0], s[1], s[2] = m, rowExpSum(nil, x, m), 0
		if t := within(k.Targets[n], k.First, k.V); t >= 0 {
			s[2] = x[t]
		}
	}
}

// elsewhere is the class of a target that another slice has.
const elsewhere = -2

// within returns a target's index among the v classes from first on: −1 for no target, elsewhere
// for one that is not among them.
func within(target int32, first, v int) int32 {
	switch t := int(target) - first; {
	case target < 0:
		return -1
	case t < 0 || t >= v:
		return elsewhere
	default:
		return int32(t)
	}
}

// HeadLSE combines the statistics of all slices of Each classes, in order, in float64:
//
//	LSE = max + log Σ sum·exp(its max - max), rounded to T
//	Loss += LSE - the target's logit, row by row in increasing order
//
// Rows with the target -1 add nothing.
type HeadLSE[T num.Float] struct {
	N, Each int
	Total   int     // classes of all slices
	Stats   []T     // (slices, N, 3)
	Targets []int32 // (N): -1 or in [0, Total)
	LSE     []T     // (N)
	Loss    []float64
}

// Run combines the statistics.
func (k *HeadLSE[T]) Run(p *pool.Pool) error {
	c := check{op: "head log-sum-exp"}
	c.dim("N", k.N)
	c.positive("Each", k.Each)
	slices := len(k.Stats) / max(headStatistics*k.N, 1)
	c.size2("Stats", "(slices·N, 3)", len(k.Stats), slices*k.N, headStatistics)
	c.size1("LSE", "N", len(k.LSE), k.N)
	c.size1("Loss", "1", len(k.Loss), 1)
	c.targets(k.Targets, k.N, min(k.Total, slices*k.Each))
	if c.err != nil {
		return c.err
	}
	run(p, tasks(k.N, rowGrain(slices*headStatistics)), k)
	for n, t := range k.Targets {
		if t >= 0 {
			k.Loss[0] += float64(k.LSE[n]) - float64(k.row(int(t)/k.Each, n)[2])
		}
	}
	return nil
}

// row returns a slice's statistics of a row.
func (k *HeadLSE[T]) row(slice, n int) []T {
	return k.Stats[(slice*k.N+n)*headStatistics:][:headStatistics]
}

// RunIndex is a pool.Task's; call Run.
func (k *HeadLSE[T]) RunIndex(i int) {
	slices := len(k.Stats) / (headStatistics * k.N)
	lo, hi := piece(i, rowGrain(slices*headStatistics), k.N)
	for n := lo; n < hi; n++ {
		m := float64(k.row(0, n)[0])
		for s := 1; s < slices; s++ {
			m = max(m, float64(k.row(s, n)[0]))
		}
		sum := 0.0
		for s := range slices {
			r := k.row(s, n)
			sum += float64(r[1]) * num.Exp(float64(r[0])-m)
		}
		k.LSE[n] = T(m + num.Log(sum))
	}
}

// HeadSliceGrad replaces the logits of one slice of the classes by their gradient,
// (exp(Logits - LSE) - onehot(target))·Scale; rows whose target is -1 become 0. With LowAs the
// rows are then rounded to 16 bits, each over the first half of its own memory.
type HeadSliceGrad[T num.Float] struct {
	N, V    int
	First   int     // the slice's first class
	Logits  []T     // (N, V)
	Targets []int32 // (N)
	LSE     []T     // (N)
	Scale   T
	LowAs   Half
}

// Run computes the gradient.
func (k *HeadSliceGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "head slice gradient"}
	c.dim("N", k.N)
	c.positive("V", k.V)
	c.size2("Logits", "(N, V)", len(k.Logits), k.N, k.V)
	c.size1("LSE", "N", len(k.LSE), k.N)
	c.size1("Targets", "N", len(k.Targets), k.N)
	return c.run(p, tasks(k.N, rowGrain(k.V)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *HeadSliceGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.V), k.N)
	for n := lo; n < hi; n++ {
		x := k.Logits[n*k.V : (n+1)*k.V]
		if t := within(k.Targets[n], k.First, k.V); t == elsewhere {
			expScale(x, x, k.LSE[n], k.Scale)
		} else {
			crossEntropyGrad(x, x, t, k.LSE[n], k.Scale, 0)
		}
		if k.LowAs != NoHalf {
			narrowInPlace(k.LowAs, x)
		}
	}
}
