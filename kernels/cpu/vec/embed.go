package vec

import (
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Element is what kernels that only copy take: floats, or 16 bits as they are.
type Element interface{ num.Float | uint16 }

// Embed is Y[n] = Table[Tokens[n]]. With Total the table has the V tokens from First on, of
// Total; rows of others are 0.
type Embed[T Element] struct {
	N, V, C      int
	Tokens       []int32 // (N), in [0, V), or with Total in [0, Total)
	Table        []T     // (V, C)
	Y            []T     // (N, C)
	First, Total int
}

// Run copies the rows.
func (k *Embed[T]) Run(p *pool.Pool) error {
	c := check{op: "embed"}
	c.dim("N", k.N)
	c.dim("V", k.V)
	c.dim("C", k.C)
	c.size2("Table", "(V, C)", len(k.Table), k.V, k.C)
	c.size2("Y", "(N, C)", len(k.Y), k.N, k.C)
	c.tokens(k.Tokens, k.N, max(k.V, k.Total))
	return c.run(p, tasks(k.N, rowGrain(k.C)), k)
}

// tokens refuses tokens outside [0, v).
func (c *check) tokens(t []int32, n, v int) {
	c.size1("Tokens", "N", len(t), n)
	if c.err != nil {
		return
	}
	for i, x := range t {
		if x < 0 || int(x) >= v {
			c.fail("Tokens[%d] is %d, want in [0, V = %d)", i, x, v)
			return
		}
	}
}

// RunIndex is a pool.Task's; call Run.
func (k *Embed[T]) RunIndex(i int) {
	lo, hi := piece(i, rowGrain(k.C), k.N)
	for n := lo; n < hi; n++ {
		t, y := int(k.Tokens[n])-k.First, k.Y[n*k.C:(n+1)*k.C]
		if t < 0 || t >= k.V {
			clear(y)
			continue
		}
		copy(y, k.Table[t*k.C:(t+1)*k.C])
	}
}

// EmbedGrad is DTable[v] = Σ DY[n] over the rows n whose token is v, in
// increasing order from 0 or, with Accumulate, from the old value. Tasks own
// columns, so that no two write the same element. With Total the table has the V tokens from
// First on, of Total; rows of others are skipped.
type EmbedGrad[T num.Float] struct {
	N, V, C      int
	Tokens       []int32 // (N), in [0, V), or with Total in [0, Total)
	DY           []T     // (N, C)
	DTable       []T     // (V, C)
	Accumulate   bool
	First, Total int

	zero Fill[T]
}

// Run computes the sums.
func (k *EmbedGrad[T]) Run(p *pool.Pool) error {
	c := check{op: "embed gradient"}
	c.dim("N", k.N)
	c.dim("V", k.V)
	c.dim("C", k.C)
	c.size2("DTable", "(V, C)", len(k.DTable), k.V, k.C)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.tokens(k.Tokens, k.N, max(k.V, k.Total))
	if c.err != nil {
		return c.err
	}
	if !k.Accumulate {
		k.zero.Y = k.DTable
		if err := k.zero.Run(p); err != nil {
			return err
		}
	}
	run(p, tasks(k.C, embedGrain), k)
	return nil
}

// embedGrain is the number of columns of one task: rows of the table are touched
// at random, so a piece of a row should be several cache lines.
const embedGrain = 128

// RunIndex is a pool.Task's; call Run.
func (k *EmbedGrad[T]) RunIndex(i int) {
	lo, hi := piece(i, embedGrain, k.C)
	for n, token := range k.Tokens {
		t := int(token) - k.First
		if t < 0 || t >= k.V {
			continue
		}
		d := k.DTable[t*k.C:][lo:hi]
		binary(Add, d, d, k.DY[n*k.C+lo:n*k.C+hi], false)
	}
}
