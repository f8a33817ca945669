package gemm

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// sets returns the kernels for a type that this machine can run.
func sets(in Type) []kernels {
	var all []kernels
	for _, l := range levels() {
		k, n := allKernels(in, l)
		all = append(all, k[:n]...)
	}
	return all
}

func (s *kernels) String() string { return fmt.Sprintf("%v %v form %d", s.in, s.level, s.form) }

// dot reports whether instructions determine the rounding of bf16 sums.
func (s *kernels) dot() bool { return s.in == BF16 && s.form != formWide }

func randomTyped(r *rand.Rand, t Type, n int) []byte {
	v := make([]byte, n*t.size())
	for i := range n {
		e := v[i*t.size():]
		switch t {
		case F32:
			binary.NativeEndian.PutUint32(e, math.Float32bits(float32(r.NormFloat64())))
		case BF16, F16:
			binary.NativeEndian.PutUint16(e, narrowed(t, float32(r.NormFloat64())))
		default: // integers get random bits
			for j := range t.size() {
				e[j] = byte(r.Uint32())
			}
		}
	}
	return v
}

type typedOperands struct {
	a, b, c []byte
	bias    []float32
}

func randomTypedOperands(r *rand.Rand, s Spec) typedOperands {
	m := s.stored()
	o := typedOperands{a: randomTyped(r, s.In, m[0].elements()), b: randomTyped(r, s.In, m[1].elements()), c: randomTyped(r, s.Out, m[2].elements())}
	if s.Out != I32 && r.IntN(2) == 0 {
		o.bias = fill(r, make([]float32, s.N))
	}
	return o
}

func runTyped(t testing.TB, s Spec, k kernels, pl *pool.Pool, o typedOperands) []byte {
	require.NoError(t, s.Validate())
	p := new(Product)
	p.reset(s, k)
	c := append([]byte(nil), o.c...)
	work := make([]byte, Workspace(s))
	for i := range work {
		work[i] = 0xff
	}
	require.NoError(t, p.RunBytes(pl, o.a, o.b, c, o.bias, work))
	return c
}

// want returns the result by the definition.
func want(t testing.TB, s Spec, o typedOperands) []byte {
	c := append([]byte(nil), o.c...)
	require.NoError(t, referenceBytes(s, o.a, o.b, c, o.bias))
	return c
}

func typedSpecs(r *rand.Rand, n int) []Spec {
	specs := append(large(), Spec{M: 70, N: 40, K: 2*chunkDepth + 2*KC + 5, TransA: true},
		Spec{M: 33, N: 35, K: 4096 + 64}, Spec{M: chunkRows/2 + 3, N: 5, K: chunkDepth + 1, Accumulate: true})
	for range n {
		specs = append(specs, randomSpec(r, 7))
	}
	return specs
}

func TestHalfProducts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i, s := range typedSpecs(r, 40) {
		s.In = []Type{BF16, F16}[i%2]
		s.Out = []Type{F32, BF16, F16}[r.IntN(3)]
		o := randomTypedOperands(r, s)
		want := want(t, s, o)
		sums := decode(s.Out, want)
		for _, k := range sets(s.In) {
			got := runTyped(t, s, k, []*pool.Pool{onePool, twoPool, threePool}[r.IntN(3)], o)
			if !k.dot() {
				require.Equal(t, want, got, "%v %+v", &k, s)
				continue
			}
			// Allow for another order of K terms of size 1, and then one rounding.
			for e, v := range decode(s.Out, got) {
				tolerance := 1e-5*float64(s.K) + 1e-5 + math.Abs(v)*map[Type]float64{BF16: 1.0 / 128, F16: 1.0 / 1024}[s.Out]
				if d := math.Abs(v - sums[e]); !(d <= tolerance) {
					require.Failf(t, "wrong", "%v %+v: element %d is %v, not %v", &k, s, e, v, sums[e])
				}
			}
		}
	}
}

func TestByteProducts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i, s := range typedSpecs(r, 40) {
		s.In, s.Out = []Type{S8, U8S8}[i%2], I32
		o := randomTypedOperands(r, s)
		want := want(t, s, o)
		for _, k := range sets(s.In) {
			require.Equal(t, want, runTyped(t, s, k, []*pool.Pool{onePool, twoPool, threePool}[r.IntN(3)], o), "%v %+v", &k, s)
		}
	}
}

// Even where instructions determine the rounding (bf16), an element depends only on K, not on the
// threads or on other rows and columns.
func TestDotProductsDependOnKAlone(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		s := Spec{M: 1 + r.IntN(150), N: 1 + r.IntN(150), K: 1 + r.IntN(1500), TransA: r.IntN(2) == 0, TransB: r.IntN(2) == 0, Accumulate: r.IntN(2) == 0, In: BF16}
		if r.IntN(2) == 0 {
			s.Out = BF16
		}
		if r.IntN(8) == 0 { // sums of more than one chunk are kept in memory
			s.M, s.N, s.K = 1+s.M/2, 1+s.N/2, s.K+2*chunkDepth
		}
		if r.IntN(2) == 0 {
			s.K = (s.K + 31) / 32 * 32 // A can be read in place
		}
		o := randomTypedOperands(r, s)
		r0, r1 := cut(r, s.M)
		c0, c1 := cut(r, s.N)
		part := s
		part.M, part.N = r1-r0, c1-c0
		m := s.stored()
		part.LdA, part.LdB, part.LdC = m[0].ld, m[1].ld, m[2].ld
		skipA, skipB := r0*m[0].ld, c0
		if s.TransA {
			skipA = r0
		}
		if s.TransB {
			skipB = c0 * m[1].ld
		}
		size := s.Out.size()
		po := typedOperands{a: o.a[2*skipA:], b: o.b[2*skipB:], c: append([]byte(nil), o.c[size*(r0*s.N+c0):]...)}
		if o.bias != nil {
			po.bias = o.bias[c0:]
		}
		for _, k := range sets(BF16) {
			whole := runTyped(t, s, k, onePool, o)
			require.Equal(t, whole, runTyped(t, s, k, threePool, o), "%v %+v", &k, s)
			got := runTyped(t, part, k, twoPool, po)
			for i := range part.M {
				require.Equal(t, whole[size*((r0+i)*s.N+c0):][:size*part.N], got[size*i*s.N:][:size*part.N], "%v %+v %+v row %d", &k, s, part, i)
			}
		}
	}
}

// A float32 sum over pieces of K, rounded at the end, equals a 16-bit product over all of K. So the
// head's gradient may be summed either way.
func TestHalfSumOverPieces(t *testing.T) {
	r := rand.New(rand.NewPCG(14, 0))
	for _, k := range sets(BF16) {
		whole := Spec{M: 70, N: 65, K: 4 * KC, TransA: true, In: BF16, Out: BF16}
		o := randomTypedOperands(r, whole)
		o.bias = nil
		piece := whole
		piece.K, piece.Out, piece.Accumulate = k.group*KC, F32, true
		sum := typedOperands{c: make([]byte, 4*whole.M*whole.N)}
		for k0 := 0; k0 < whole.K; k0 += piece.K {
			piece.Accumulate = k0 > 0
			sum.a, sum.b = o.a[2*k0*whole.M:], o.b[2*k0*whole.N:]
			sum.c = runTyped(t, piece, k, twoPool, sum)
		}
		got := decode(BF16, runTyped(t, whole, k, onePool, o))
		for i, v := range decode(F32, sum.c) {
			require.Equal(t, float64(widened(BF16, narrowed(BF16, float32(v)))), got[i], "%v element %d", &k, i)
		}
	}
}

// An infinity in a row of A reaches only that row of C, despite the zeros that pad units and tiles.
func TestHalfInfStaysInItsRow(t *testing.T) {
	r := rand.New(rand.NewPCG(12, 0))
	for _, in := range []Type{BF16, F16} {
		for _, s := range []Spec{{M: 40, N: 37, K: 33}, {M: 17, N: 20, K: 64}, {M: 3, N: 70, K: 35, TransA: true}, {M: 35, N: 16, K: 1, TransB: true}} {
			s.In = in
			o := randomTypedOperands(r, s)
			o.bias = nil
			row, k := r.IntN(s.M), r.IntN(s.K)
			e := row*s.K + k
			if s.TransA {
				e = k*s.M + row
			}
			binary.NativeEndian.PutUint16(o.a[2*e:], narrowed(in, float32(math.Inf(1))))
			for _, set := range sets(in) {
				for i, v := range decode(F32, runTyped(t, s, set, onePool, o)) {
					require.Equal(t, i/s.N == row, math.IsInf(v, 0) || math.IsNaN(v), "%v %+v: element %d is %v", &set, s, i, v)
				}
			}
		}
	}
}

// A signal that stops a goroutine within a kernel saves and restores its registers, including tile
// registers.
func TestRegistersSurviveSignals(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 0))
	for _, in := range []Type{F32, BF16, U8S8} {
		s := Forward(200, 130, 512, false)
		if s.In = in; in.integer() {
			s.Out = I32
		}
		o := randomTypedOperands(r, s)
		for _, k := range sets(in) {
			if k.level == level.Portable {
				continue
			}
			want := runTyped(t, s, k, onePool, o)
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				for {
					select {
					case <-stop:
						return
					default:
						runtime.GC() // interrupts every running goroutine
					}
				}
			}()
			for range 60 {
				require.Equal(t, want, runTyped(t, s, k, twoPool, o), "%v", &k)
			}
			close(stop)
			<-stopped
		}
	}
}

// A portable bf16 product widens at every level, even if the CPU has bf16 products.
func TestPortableProductsWiden(t *testing.T) {
	for _, l := range levels() {
		k := bestKernels(BF16, true, l)
		require.Equal(t, formWide, k.form, "%v", l)
		k = bestKernels(F32, true, l)
		require.Equal(t, formF32, k.form, "%v", l)
		k, whatever := bestKernels(S8, true, l), bestKernels(S8, false, l)
		require.Equal(t, whatever, k, "%v", l)
	}
	require.Equal(t, "float32", Rounding(true))
}
