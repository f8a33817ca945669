package gemm

import (
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// levels returns the levels that this machine can run.
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
	require.NoError(t, s.Validate())
	p.reset(s, bestKernels(s.In, false, l))
	return p
}

func fill(r *rand.Rand, v []float32) []float32 {
	for i := range v {
		v[i] = float32(r.NormFloat64())
	}
	return v
}

// randomSpec draws dimensions near powers of two, and sometimes gaps between rows.
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

// large returns shapes that exceed the limits of blocking: several tiles, chunks and blocks of K,
// strips packed by one tile, and B read in place.
func large() []Spec {
	return []Spec{
		Forward(200, 300, 150, false),
		InputGradient(200, 150, 600, true),
		WeightGradient(300, 150, 200, true),
		Forward(5, 700, 300, false),
		Forward(28, 1100, 129, false),
		Forward(29, 300, 200, true),
		Forward(1, 2100, 513, false),
		Forward(400, 64, 65, true),
		{M: chunkRows + 5, N: 9, K: 70},
		{M: 9, N: chunkCols + 5, K: 70, TransB: true},
		{M: 13, N: chunkCols + 77, K: 70},
		{M: 50, N: 33, K: chunkDepth + KC + 3, TransA: true, Accumulate: true},
		{M: chunkRows + 1, N: chunkCols + 1, K: 2, TransA: true, TransB: true},
	}
}

func run(t testing.TB, s Spec, l level.Level, pl *pool.Pool, o operands) []float32 {
	c := append([]float32(nil), o.c...)
	work := make([]byte, Workspace(s))
	for i := range work {
		work[i] = 0xff // NaN: detects reads of workspace before writes
	}
	require.NoError(t, newAt(t, s, l).Run(pl, o.a, o.b, c, o.bias, work))
	return c
}

func TestProductEqualsReference(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	specs := large()
	for range 300 {
		s := randomSpec(r, 7)
		if r.IntN(8) == 0 {
			s.M, s.N, s.K = 1+r.IntN(7), 1+r.IntN(7), 1+r.IntN(4*KC)
			s.LdA, s.LdB, s.LdC = 0, 0, 0
		}
		specs = append(specs, s)
	}
	pools := []*pool.Pool{onePool, twoPool, threePool}
	for i, s := range specs {
		o := randomOperands(r, s)
		want := append([]float32(nil), o.c...)
		require.NoError(t, Reference(s, o.a, o.b, want, o.bias, nil))
		for j, l := range levels() {
			requireSameBits(t, want, run(t, s, l, pools[(i+j)%3], o), l, s)
		}
	}
}

// A symmetric product gives the bits of a complete product, also with an epilogue that changes
// every element.
func TestSymmetricEqualsWhole(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 1))
	sizes := []int{1, 2, 13, 14, 28, 29, 33, 100, 168, 257, 300, 333}
	for range long.Or(12, 40) {
		sizes = append(sizes, 1+r.IntN(400))
	}
	for i, n := range append(sizes, chunkCols+70, chunkRows+40) {
		depth := 1 + r.IntN(long.Or(100, 300))
		switch {
		case n > 400:
			depth = 3
		case i%8 == 5:
			depth += chunkDepth
		}
		for form := range 3 {
			s := Spec{M: n, N: n, K: depth, TransA: form == 1, TransB: form == 0, LdC: n + r.IntN(3)}
			if form == 2 && n <= 400 {
				s.K = n
			}
			a := fill(r, make([]float32, s.M*s.K))
			if s.TransA == s.TransB { // a symmetric matrix times itself
				if s.K != n {
					continue
				}
				for j := range n {
					for k := range j {
						a[k*n+j] = a[j*n+k]
					}
				}
			}
			o := operands{a: a, b: a, c: fill(r, make([]float32, n*s.LdC))}
			want := run(t, s, level.Best(), onePool, o)
			s.Symmetric = true
			for j, l := range levels() {
				requireSameBits(t, want, run(t, s, l, []*pool.Pool{onePool, twoPool, threePool}[(i+j)%3], o), l, s)
			}
		}
	}
	for _, s := range []Spec{{M: 2, N: 3, K: 1}, {M: 2, N: 2, K: 1, Accumulate: true}, {M: 2, N: 2, K: 1, In: BF16}} {
		s.Symmetric = true
		require.ErrorContains(t, s.Validate(), "symmetric")
	}
}

// A NaN, infinity or zero in an operand affects exactly the elements of which it is a factor: no
// factor is skipped.
func TestNaNAndInfPropagate(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 0))
	odd := []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)), 0, float32(math.Copysign(0, -1)), math.MaxFloat32, math.SmallestNonzeroFloat32, -1e-40}
	for range 150 {
		s := randomSpec(r, 6)
		o := randomOperands(r, s)
		for _, v := range [][]float32{o.a, o.b, o.c} {
			for range 1 + len(v)/50 {
				v[r.IntN(len(v))] = odd[r.IntN(len(odd))]
			}
		}
		want := append([]float32(nil), o.c...)
		require.NoError(t, Reference(s, o.a, o.b, want, o.bias, nil))
		for _, l := range levels() {
			requireSameBits(t, want, run(t, s, l, onePool, o), l, s)
		}
	}
}

func TestZeroDimensions(t *testing.T) {
	for _, l := range levels() {
		for i := range 8 {
			for _, accumulate := range []bool{false, true} {
				dim := func(b int) int { return i >> b & 1 * 3 }
				s := Spec{M: dim(0), N: dim(1), K: dim(2), Accumulate: accumulate}
				r := rand.New(rand.NewPCG(9, 0))
				o := randomOperands(r, s)
				o.bias = fill(r, make([]float32, s.N))
				want := append([]float32(nil), o.c...)
				require.NoError(t, Reference(s, o.a, o.b, want, o.bias, nil))
				requireSameBits(t, want, run(t, s, l, twoPool, o), l, s)
			}
		}
		s := Spec{M: 2, N: 3}
		p := newAt(t, s, l)
		tiles := &countTiles{seen: make([]int, 6), n: 3}
		p.Epilogue = tiles
		c := []float32{1, 2, 3, 4, 5, 6}
		require.NoError(t, p.Run(onePool, nil, nil, c, nil, nil))
		require.Equal(t, make([]float32, 6), c, "a sum of nothing is 0")
		require.Equal(t, []int{1, 1, 1, 1, 1, 1}, tiles.seen)
	}
}

type countTiles struct {
	mu   sync.Mutex
	seen []int
	n    int
}

func (c *countTiles) Tile(r0, r1, c0, c1 int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := r0; i < r1; i++ {
		for j := c0; j < c1; j++ {
			c.seen[i*c.n+j]++
		}
	}
}

// squareTiles is an activation that must see every finished element exactly once.
type squareTiles struct {
	c  []float32
	ld int
}

func (e *squareTiles) Tile(r0, r1, c0, c1 int) {
	for i := r0; i < r1; i++ {
		row := e.c[i*e.ld:]
		for j := c0; j < c1; j++ {
			row[j] *= row[j]
		}
	}
}

func TestEpilogueSeesFinishedTilesOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 0))
	for _, s := range large() {
		o := randomOperands(r, s)
		o.bias = fill(r, make([]float32, s.N))
		want := run(t, s, level.Best(), onePool, o)
		for i := range want {
			want[i] *= want[i]
		}
		for _, l := range levels()[1:] {
			p := newAt(t, s, l)
			c := append([]float32(nil), o.c...)
			p.Epilogue = &squareTiles{c, s.N}
			require.NoError(t, p.Run(threePool, o.a, o.b, c, o.bias, make([]byte, Workspace(s))))
			requireSameBits(t, want, c, l, s)
		}
	}
}

// A row of C does not depend on other rows, nor a column on other columns. So decoding equals
// prefill, and a head in tiles equals a complete one.
func TestSlicesEqualTheWhole(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 0))
	for range 60 {
		s := randomSpec(r, 7)
		s.LdA, s.LdB, s.LdC = 0, 0, 0
		o := randomOperands(r, s)
		whole := run(t, s, level.Best(), onePool, o)
		r0, r1 := cut(r, s.M)
		c0, c1 := cut(r, s.N)
		mem := s.stored()
		part := s
		part.M, part.N = r1-r0, c1-c0
		part.LdA, part.LdB, part.LdC = mem[0].ld, mem[1].ld, mem[2].ld
		skipA, skipB := r0*mem[0].ld, c0
		if s.TransA {
			skipA = r0
		}
		if s.TransB {
			skipB = c0 * mem[1].ld
		}
		po := operands{a: o.a[skipA:], b: o.b[skipB:], c: append([]float32(nil), o.c[r0*s.N+c0:]...)}
		if o.bias != nil {
			po.bias = o.bias[c0:]
		}
		for _, l := range levels() {
			got := run(t, part, l, twoPool, po)
			for i := range part.M {
				requireSameBits(t, whole[(r0+i)*s.N+c0:][:part.N], got[i*s.N:][:part.N], l, s, part)
			}
		}
	}
}

func cut(r *rand.Rand, n int) (int, int) {
	i, j := r.IntN(n), r.IntN(n)
	return min(i, j), max(i, j) + 1
}

// Products over pieces of K, cut at multiples of KC and accumulated, equal the complete product.
func TestPiecesOfK(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 0))
	s := Spec{M: 20, N: 40, K: 5*KC + 17}
	o := randomOperands(r, s)
	o.bias = nil
	for _, l := range levels() {
		whole := run(t, s, l, onePool, o)
		got := o
		got.c = make([]float32, s.M*s.N)
		for _, k := range [][2]int{{0, 2 * KC}, {2 * KC, 3 * KC}, {3 * KC, s.K}} {
			piece := Spec{M: s.M, N: s.N, K: k[1] - k[0], LdA: s.K, Accumulate: k[0] > 0}
			got.a, got.b = o.a[k[0]:], o.b[k[0]*s.N:]
			got.c = run(t, piece, l, twoPool, got)
		}
		requireSameBits(t, whole, got.c, l)
	}
}

func TestRunAllocatesNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, in := range []Type{F32, BF16, F16, S8, U8S8} {
		for _, s := range []Spec{Forward(64, 96, 80, false), Forward(190, 150, 40, true), Forward(2, 40, 300, false), WeightGradient(90, 70, 80, false)} {
			s.In, s.Out = in, F32
			if in.integer() {
				s.Out = I32
			} else if s.TransB {
				s.Out = BF16
			}
			o := randomTypedOperands(r, s)
			work := make([]byte, Workspace(s))
			for _, k := range sets(in) {
				p := new(Product)
				require.Zero(t, alloctest.PerRun(2, func() {
					if err := p.Reset(s); err != nil {
						t.Error(err)
					}
					p.reset(s, k)
					if err := p.RunBytes(twoPool, o.a, o.b, o.c, o.bias, work); err != nil {
						t.Error(err)
					}
				}), "%v %+v", &k, s)
			}
		}
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		s   Spec
		err string
	}{
		{Spec{M: -1}, "gemm: M is -1; a dimension is at least 0"},
		{Spec{M: 2, N: 3, K: -4}, "gemm: K is -4; a dimension is at least 0"},
		{Spec{M: 2, N: 3, K: 4, LdA: 3}, "gemm: LdA is 3; A is stored in rows of 4 elements, so it is at least that (or 0)"},
		{Spec{M: 2, N: 3, K: 4, TransB: true, LdB: 3}, "gemm: LdB is 3; B is stored in rows of 4 elements, so it is at least that (or 0)"},
		{Spec{M: 2, N: 3, K: 4, LdC: -1}, "gemm: LdC is -1; C is stored in rows of 3 elements, so it is at least that (or 0)"},
		{Spec{In: I32}, "gemm: In is i32; inputs are f32, bf16, f16, s8 or u8s8"},
		{Spec{In: S8}, "gemm: Out is f32; a product of s8 is i32, or scaled bf16 or f16"},
		{Spec{In: U8S8}, "gemm: Out is f32; a product of u8s8 is i32"},
		{Spec{In: BF16, Out: I32}, "gemm: Out is i32; a product of bf16 is f32, bf16 or f16"},
		{Spec{M: 1 << 40, N: 1 << 40, K: 1}, "gemm: C of 1099511627776 rows, 1099511627776 elements apart, is larger than memory"},
	} {
		_, err := New(c.s)
		require.EqualError(t, err, c.err)
		require.Zero(t, Workspace(c.s))
		require.EqualError(t, Reference[float64](c.s, nil, nil, nil, nil, nil), c.err)
		require.EqualError(t, referenceBytes(c.s, nil, nil, nil, nil), c.err)
	}
	s := Spec{M: 2, N: 3, K: 4, LdA: 6}
	p, err := New(s)
	require.NoError(t, err)
	a, b, c, bias, work := make([]float32, 10), make([]float32, 12), make([]float32, 6), make([]float32, 3), make([]byte, Workspace(s))
	require.NoError(t, p.Run(onePool, a, b, c, bias, work))
	require.EqualError(t, p.Run(onePool, a[:9], b, c, bias, work), "gemm: A has 9 elements; 2 rows of 4, 6 apart, need 10")
	require.EqualError(t, p.Run(onePool, a, b[:11], c, bias, work), "gemm: B has 11 elements; 4 rows of 3, 3 apart, need 12")
	require.EqualError(t, p.Run(onePool, a, b, c[:5], bias, work), "gemm: C has 5 elements; 2 rows of 3, 3 apart, need 6")
	require.EqualError(t, p.Run(onePool, a, b, c, bias[:2], work), "gemm: bias has 2 elements; N is 3")
	require.EqualError(t, p.Run(onePool, a, b, c, bias, work[1:]), fmt.Sprintf("gemm: the workspace has %d bytes; M 2, N 3, K 4 need %d", len(work)-1, len(work)))
	require.EqualError(t, p.Run(onePool, a, b, b[3:], nil, work), "gemm: C overlaps B")
	bytes := make([]byte, 100)
	require.EqualError(t, p.RunBytes(onePool, bytes[:39], bytes[40:88], bytes[:0], nil, work), "gemm: A has 9 elements; 2 rows of 4, 6 apart, need 10")
	require.NoError(t, p.Reset(Spec{M: 1, N: 1, K: 1, In: BF16}))
	require.EqualError(t, p.Run(onePool, a, b, c, nil, work), "gemm: Run on a product of bf16 with output f32: it takes f32; RunBytes takes any")
	require.NoError(t, p.Reset(Spec{M: 1, N: 1, K: 1, In: S8, Out: I32}))
	require.EqualError(t, p.RunBytes(onePool, bytes, bytes, bytes, bias, work), "gemm: a bias on a product of s8: an i32 result takes none")
	require.EqualError(t, Reference(s, a[:9], b, c, nil, nil), "gemm: A has 9 elements; 2 rows of 4, 6 apart, need 10")
}

// The float64 reference gives the same result as the definition.
func TestReferenceFloat64(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 0))
	s := Spec{M: 7, N: 5, K: 2*KC + 30, TransA: true}
	o := randomOperands(r, s)
	o.bias = fill(r, make([]float32, s.N))
	wide := func(v []float32) []float64 {
		w := make([]float64, len(v))
		for i := range v {
			w[i] = float64(v[i])
		}
		return w
	}
	a, b, c, bias := wide(o.a), wide(o.b), wide(o.c), wide(o.bias)
	require.NoError(t, Reference(s, a, b, c, bias, nil))
	for i := range s.M {
		for j := range s.N {
			var sum float64
			for k := range s.K {
				sum += a[k*s.M+i] * b[k*s.N+j]
			}
			require.InDelta(t, sum+bias[j], c[i*s.N+j], 1e-11)
		}
	}
}

// The bits are the same on every architecture: they match a fixed hash.
func TestGolden(t *testing.T) {
	r := rand.New(rand.NewPCG(2026, 3))
	h := fnv.New64a()
	for _, s := range []Spec{Forward(19, 37, 600, false), InputGradient(33, 20, 290, false), WeightGradient(31, 18, 45, true)} {
		s.Accumulate = s.TransA
		o := randomOperands(r, s)
		o.bias = fill(r, make([]float32, s.N))
		o.a[3], o.b[2] = 1e-42, -3e38 // a subnormal, and a value near overflow
		h.Write(Bytes(run(t, s, level.Best(), onePool, o)))
	}
	require.Equal(t, uint64(0x1c5034eaac49a5cc), h.Sum64())
}
