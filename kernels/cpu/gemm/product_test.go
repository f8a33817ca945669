package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// levels are those that this machine can run.
func levels() []level.Level {
	var l []level.Level
	for x := level.Portable; x <= level.Best(); x++ {
		l = append(l, x)
	}
	return l
}

var (
	onePool   = pool.New(1)
	twoPool   = pool.New(2)
	threePool = pool.New(3)
)

func newAt(t testing.TB, s Spec, l level.Level) *Product {
	p := new(Product)
	require.NoError(t, p.reset(s, l))
	return p
}

func fill(r *rand.Rand, v []float32) []float32 {
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// randomSpec has dimensions about a power of two, and sometimes gaps.
func randomSpec(r *rand.Rand, most int) Spec {
	dim := func() int {
		d := 1 << r.IntN(most)
		return max(1, d+r.IntN(d+1)-r.IntN(3))
	}
	s := Spec{M: dim(), N: dim(), K: dim(), TransA: r.IntN(2) == 0, TransB: r.IntN(2) == 0, Accumulate: r.IntN(2) == 0}
	for i, m := range s.stored() {
		if r.IntN(2) == 0 {
			*[3]*int{&s.LdA, &s.LdB, &s.LdC}[i] = m.cols + r.IntN(5)
		}
	}
	return s
}

type operands struct{ a, b, c, bias []float32 }

func randomOperands(r *rand.Rand, s Spec) operands {
	m := s.stored()
	o := operands{a: fill(r, make([]float32, m[0].elements())), b: fill(r, make([]float32, m[1].elements())), c: fill(r, make([]float32, m[2].elements()))}
	if r.IntN(2) == 0 {
		o.bias = fill(r, make([]float32, s.N))
	}
	return o
}

func requireSameBits(t testing.TB, want, got []float32, msg ...any) {
	t.Helper()
	require.Len(t, got, len(want), msg...)
	for i := range want {
		if math.Float32bits(want[i]) != math.Float32bits(got[i]) && (want[i] == want[i] || got[i] == got[i]) {
			require.Failf(t, "other bits", "element %d: want %v (%08x), got %v (%08x) %s", i, want[i], math.Float32bits(want[i]), got[i], math.Float32bits(got[i]), fmt.Sprint(msg...))
		}
	}
}

func TestProductEqualsReference(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	pools := []*pool.Pool{onePool, twoPool, threePool}
	for i := range 300 {
		s := randomSpec(r, 8)
		if i%10 == 0 {
			s = randomSpec(r, 3)
			s.K = 1 + r.IntN(700)
		}
		if s.M*s.N*s.K > 1<<20 {
			continue
		}
		s.LdA, s.LdB, s.LdC = max(s.LdA, 0), max(s.LdB, 0), max(s.LdC, 0)
		if s.Validate() != nil {
			s.LdA, s.LdB, s.LdC = 0, 0, 0
		}
		o := randomOperands(r, s)
		want := append([]float32(nil), o.c...)
		require.NoError(t, Reference(s, o.a, o.b, want, o.bias, nil))
		for _, l := range levels() {
			got := append([]float32(nil), o.c...)
			work := make([]byte, Workspace(s))
			require.NoError(t, newAt(t, s, l).Run(pools[i%3], o.a, o.b, got, o.bias, work))
			requireSameBits(t, want, got, l, s)
		}
	}
}
