package attn

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Forwards of different lengths that run together give the bits that each gives alone, with the
// scratch of the largest. Operands that do not belong to one shape are refused.
func TestEachIsForwardAlone(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		const capacity, h, kv, d = 150, 6, 2, 20
		for _, tq := range []int{1, 40} {
			full := Shape{B: 5, Tq: tq, Tk: capacity, H: h, KV: kv, D: d, Causal: true, Window: 70}
			e := &Each[float32]{Work: nan[float32](ForwardWorkspace(full))}
			var want [][]float32
			for i, tk := range []int{tq, tq + 1, 63 + tq, 64 + tq, capacity} {
				one := Shape{B: 1, Tq: tq, Tk: tk, H: h, KV: kv, D: d, Causal: true, Window: 70}
				p := newProblem[float32](rand.New(rand.NewPCG(12, uint64(i))), one, false)
				alone := p.forward()
				alone.Lse = nil
				require.NoError(t, alone.Run(pl))
				want = append(want, append([]float32{}, p.y...))
				e.Of = append(e.Of, Forward[float32]{Shape: one, Scale: alone.Scale, Q: p.q, K: p.k, V: p.v, Y: nan[float32](len(p.y)), LdQ: alone.LdQ, LdK: alone.LdK, LdV: alone.LdV, LdY: alone.LdY})
			}
			for range 2 {
				require.NoError(t, e.Run(pl))
				for i := range want {
					requireBits(t, want[i], e.Of[i].Y, fmt.Sprintf("%d queries, forward %d", tq, i))
				}
			}
			e.Of[1].B = 2
			require.ErrorContains(t, e.Run(pl), "forward 1 of several has B = 2")
		}
		require.NoError(t, (&Each[float32]{}).Run(pl))
	})
}
