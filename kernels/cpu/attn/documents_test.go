package attn

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// drawDocuments draws starts of documents of at most most rows, in b sequences of n.
func drawDocuments[T Float](r *rand.Rand, b, n, most int) (starts []T) {
	for range b {
		for at := 0; at < n; {
			rows := min(1+r.IntN(most), n-at)
			for range rows {
				starts = append(starts, T(at))
			}
			at += rows
		}
	}
	return starts
}

// Attention over several documents in a row equals that over each document alone. The bits are the
// same at every level and for any number of threads.
func TestDocuments(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	for i, s := range shapes {
		if !s.Causal || s.Tq != s.Tk {
			continue
		}
		most := []int{3, 20, 90, s.Tq}[i%4]
		t.Run(fmt.Sprintf("%s.most=%d", s, most), func(t *testing.T) {
			starts := drawDocuments[float32](rand.New(rand.NewPCG(7, uint64(i))), s.B, s.Tq, most)
			make1 := func() *problem[float32] {
				p := newProblem[float32](rand.New(rand.NewPCG(8, uint64(i))), s, i%2 == 1)
				p.limit, p.starts = limitOf(i), starts
				return p
			}
			want := make1()
			atLevel(level.Portable, func() { want.run(t, pl) })
			if s.Tq > 1 {
				requireClose(t, naive(want), want.result(), 3e-6)
			}
			for _, l := range simdLevels(t) {
				got := make1()
				atLevel(l, func() { got.run(t, pl) })
				requireSame(t, want.result(), got.result(), l.String())
			}
		})
	}
}

// Rows with one document each give the bits of rows without documents. A document that begins at a
// tile of keys gives the bits that it gives alone.
func TestDocumentsKeepBits(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	s := Shape{B: 2, Tq: 200, Tk: 200, H: 4, KV: 2, D: 24, Causal: true}
	make1 := func(s Shape) *problem[float32] { return newProblem[float32](rand.New(rand.NewPCG(9, 9)), s, false) }
	plain, one := make1(s), make1(s)
	one.starts = make([]float32, s.B*s.Tq)
	plain.run(t, pl)
	one.run(t, pl)
	requireSame(t, plain.result(), one.result(), "one document")

	two := make1(s)
	two.starts = make([]float32, s.B*s.Tq)
	for i := range two.starts {
		if i%s.Tq >= 2*KeyTile {
			two.starts[i] = 2 * KeyTile
		}
	}
	two.run(t, pl)
	alone := s
	alone.B, alone.Tq, alone.Tk = 1, s.Tq-2*KeyTile, s.Tk-2*KeyTile
	p, from := newProblem[float32](rand.New(rand.NewPCG(1, 1)), alone, false), 2*KeyTile
	copy(p.q, two.q[from*two.ldq:])
	copy(p.dy, two.dy[from*two.ldq:])
	copy(p.k, two.k[from*two.ldk:])
	copy(p.v, two.v[from*two.ldv:])
	p.run(t, pl)
	requireBits(t, p.y, two.y[from*two.ldq:s.Tq*two.ldq], "y")
	requireBits(t, p.dq, two.dq[from*two.ldq:s.Tq*two.ldq], "dq")
	requireBits(t, p.dk, two.dk[from*two.ldk:s.Tk*two.ldk], "dk")
	requireBits(t, p.dv, two.dv[from*two.ldv:s.Tk*two.ldv], "dv")
}

// Document starts need causal attention over all positions; other shapes are refused.
func TestStartsAreRefused(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	for _, s := range []Shape{{B: 1, Tq: 2, Tk: 2, H: 1, KV: 1, D: 2}, {B: 1, Tq: 2, Tk: 3, H: 1, KV: 1, D: 2, Causal: true}} {
		p := newProblem[float32](rand.New(rand.NewPCG(1, 1)), s, false)
		p.starts = make([]float32, s.B*s.Tk)
		require.ErrorContains(t, p.forward().Run(pl), "Starts")
		require.ErrorContains(t, p.backward().Run(pl), "Starts")
	}
	p := newProblem[float32](rand.New(rand.NewPCG(1, 1)), Shape{B: 1, Tq: 3, Tk: 3, H: 1, KV: 1, D: 2, Causal: true}, false)
	p.starts = make([]float32, 2)
	require.ErrorContains(t, p.forward().Run(pl), "Starts has 2 elements, must have 3")
}
