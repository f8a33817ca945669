package attn

import (
	"math/rand/v2"
	"testing"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// atLevel runs fn with the kernels of level l.
func atLevel(l level.Level, fn func()) {
	old := levelNow
	levelNow = func() level.Level { return l }
	defer func() { levelNow = old }()
	fn()
}

func simdLevels(t testing.TB) (ls []level.Level) {
	for l := level.AVX2; l <= level.Best(); l++ {
		ls = append(ls, l)
	}
	if len(ls) == 0 {
		t.Skip("this CPU has no SIMD level to compare with the portable code")
	}
	return ls
}

// Portable, AVX2 and AVX-512 kernels give the same bits, for any number of threads (promise 1).
func TestLevelsAndThreadsGiveTheSameBits(t *testing.T) {
	for i, s := range shapes {
		t.Run(s.String(), func(t *testing.T) {
			make1 := func() *problem[float32] {
				p := newProblem[float32](rand.New(rand.NewPCG(2, uint64(i))), s, s.Tq == s.Tk && i%2 == 1)
				p.limit = limitOf(i)
				return p
			}
			want := make1()
			one := pool.New(1)
			defer one.Close()
			atLevel(level.Portable, func() { want.run(t, one) })
			for _, threads := range []int{1, 2, 5} {
				pl := pool.New(threads)
				defer pl.Close()
				for _, l := range simdLevels(t) {
					got := make1()
					atLevel(l, func() { got.run(t, pl) })
					requireSame(t, want.result(), got.result(), l.String())
				}
			}
		})
	}
}
