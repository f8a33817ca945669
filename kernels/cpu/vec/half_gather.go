package vec

import (
	"slices"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// HalfEmbedGrad is EmbedGrad of 16-bit rows; DTable is 16-bit or float32. A row
// of the table is summed in float32 over all its tokens and rounded once. Tasks
// own columns, so that no two write the same element.
type HalfEmbedGrad struct {
	As           Half
	N, V, C      int
	Tokens       []int32  // (N), in [0, V), or with Total in [0, Total)
	DY           []uint16 // (N, C)
	DTable       HalfSum  // (V, C)
	First, Total int      // see EmbedGrad
	// Order is workspace (N): the rows by token, and of a token in their order.
	Order []int64

	zero Fill[float32]
	low  zero16
}

// Run computes the sums.
func (k *HalfEmbedGrad) Run(p *pool.Pool) error {
	c := check{op: "embed gradient"}
	c.half("As", k.As)
	c.dim("N", k.N)
	c.dim("V", k.V)
	c.dim("C", k.C)
	c.size2("DTable", "(V, C)", max(len(k.DTable.To), len(k.DTable.To32)), k.V, k.C)
	c.size2("DY", "(N, C)", len(k.DY), k.N, k.C)
	c.size1("Order", "N", len(k.Order), k.N)
	c.tokens(k.Tokens, k.N, max(k.V, k.Total))
	if c.err != nil {
		return c.err
	}
	if !k.DTable.Accumulate {
		k.zero.Y, k.low = k.DTable.To32, zero16{k.DTable.To}
		if err := k.zero.Run(p); err != nil {
			return err
		}
		run(p, tasks(len(k.low.y), grain), &k.low)
	}
	for n, t := range k.Tokens {
		k.Order[n] = int64(t)<<32 | int64(n)
	}
	slices.Sort(k.Order)
	run(p, tasks(k.C, embedGrain), k)
	return nil
}

// zero16 clears 16-bit elements in pieces.
type zero16 struct{ y []uint16 }

func (k *zero16) RunIndex(i int) {
	lo, hi := piece(i, grain, len(k.y))
	clear(k.y[lo:hi])
}

// RunIndex is a pool.Task's; call Run.
func (k *HalfEmbedGrad) RunIndex(i int) {
	lo, hi := piece(i, embedGrain, k.C)
	s := borrow(2 * embedGrain)
	defer s.giveBack()
	row := s.buf[embedGrain:][:hi-lo]
	for at := 0; at < len(k.Order); {
		token := int(k.Order[at] >> 32)
		if token < k.First || token >= k.First+k.V {
			at++
			continue
		}
		begin := (token-k.First)*k.C + lo
		sum := k.DTable.begin(k.As, s.buf[:hi-lo], begin)
		for ; at < len(k.Order) && int(k.Order[at]>>32) == token; at++ {
			n := int(k.Order[at] & (1<<32 - 1))
			widen(k.As, row, k.DY[n*k.C+lo:n*k.C+hi])
			binary(Add, sum, sum, row, false)
		}
		k.DTable.end(k.As, sum, begin)
	}
}
