package gemm

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// sets are the kernels for a type that this machine can run.
func sets(in Type) []kernels {
	var all []kernels
	for _, l := range levels() {
		k, n := allKernels(in, l)
		all = append(all, k[:n]...)
	}
	return all
}

func (s *kernels) String() string { return fmt.Sprintf("%v %v form %d", s.in, s.level, s.form) }

// dot says that the kernels' instructions fix the rounding of bf16 sums.
func (s *kernels) dot() bool { return s.in == BF16 && s.form != formWide }

// typed is a matrix in memory and its values.
type typed struct {
	bytes  []byte
	values []float64
}

func randomTyped(r *rand.Rand, t Type, n int) typed {
	x := typed{bytes: make([]byte, n*t.size()), values: make([]float64, n)}
	if n == 0 {
		return x
	}
	p := unsafe.Pointer(&x.bytes[0])
	for i := range n {
		switch t {
		case F32:
			v := float32(r.NormFloat64())
			*f32at(p, 4*i), x.values[i] = v, float64(v)
		case BF16, F16:
			h := narrowed(t, float32(r.NormFloat64()))
			*(*uint16)(unsafe.Add(p, 2*i)), x.values[i] = h, float64(widened(t, h))
		case S8:
			v := int8(r.IntN(256) - 128)
			x.bytes[i], x.values[i] = byte(v), float64(v)
		case U8S8: // as A
			v := uint8(r.IntN(256))
			x.bytes[i], x.values[i] = v, float64(v)
		case I32:
			v := int32(r.Uint32())
			*(*int32)(unsafe.Add(p, 4*i)), x.values[i] = v, float64(v)
		}
	}
	return x
}

type typedOperands struct {
	a, b, c typed
	bias    []float32
}

func randomTypedOperands(r *rand.Rand, s Spec) typedOperands {
	m := s.stored()
	inB := s.In
	if inB == U8S8 {
		inB = S8
	}
	o := typedOperands{a: randomTyped(r, s.In, m[0].elements()), b: randomTyped(r, inB, m[1].elements()), c: randomTyped(r, s.Out, m[2].elements())}
	if s.Out != I32 && r.IntN(2) == 0 {
		o.bias = fill(r, make([]float32, s.N))
	}
	return o
}

func runTyped(t testing.TB, s Spec, k kernels, pl *pool.Pool, o typedOperands) []byte {
	require.NoError(t, s.Validate())
	p := new(Product)
	p.reset(s, k)
	c := append([]byte(nil), o.c.bytes...)
	work := make([]byte, Workspace(s))
	for i := range work {
		work[i] = 0xff
	}
	require.NoError(t, p.RunBytes(pl, o.a.bytes, o.b.bytes, c, o.bias, work))
	return c
}

func floats(o typedOperands) operands {
	narrow := func(x []float64) []float32 {
		v := make([]float32, len(x))
		for i := range x {
			v[i] = float32(x[i])
		}
		return v
	}
	return operands{narrow(o.a.values), narrow(o.b.values), narrow(o.c.values), o.bias}
}

// wantFloat is the definition: the float32 product of the widened inputs, added
// to the widened C, rounded once.
func wantFloat(t testing.TB, s Spec, o typedOperands) ([]byte, []float32) {
	f := floats(o)
	wide := s
	wide.In, wide.Out = F32, F32
	sums := append([]float32(nil), f.c...)
	require.NoError(t, Reference(wide, f.a, f.b, sums, f.bias, nil))
	if s.Out == F32 {
		return Bytes(sums), sums
	}
	c := append([]byte(nil), o.c.bytes...)
	m := s.stored()[2]
	for i := range s.M {
		for j := range s.N {
			e := i*m.ld + j
			*(*uint16)(unsafe.Pointer(&c[2*e])) = narrowed(s.Out, sums[e])
		}
	}
	return c, sums
}

func wantInt(s Spec, o typedOperands) []byte {
	m := s.stored()
	c := append([]byte(nil), o.c.bytes...)
	at := func(x typed, i int) int32 { return int32(x.values[i]) }
	for i := range s.M {
		for j := range s.N {
			var sum int32
			for k := range s.K {
				ai, bi := i*m[0].ld+k, k*m[1].ld+j
				if s.TransA {
					ai = k*m[0].ld + i
				}
				if s.TransB {
					bi = j*m[1].ld + k
				}
				sum += at(o.a, ai) * at(o.b, bi)
			}
			p := (*int32)(unsafe.Pointer(&c[4*(i*m[2].ld+j)]))
			if s.Accumulate {
				sum += *p
			}
			*p = sum
		}
	}
	return c
}

func typedSpecs(r *rand.Rand, n int) []Spec {
	specs := append(large(), Spec{M: 70, N: 40, K: 2*chunkDepth + 2*KC + 5, TransA: true},
		Spec{M: 33, N: 65, K: 4096 + 64}, Spec{M: chunkRows/2 + 3, N: 40, K: 2*chunkDepth + 1, Accumulate: true})
	for range n {
		specs = append(specs, randomSpec(r, 7))
	}
	return specs
}

func TestHalfProducts(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i, s := range typedSpecs(r, 80) {
		s.In = []Type{BF16, F16}[i%2]
		s.Out = []Type{F32, BF16, F16}[r.IntN(3)]
		o := randomTypedOperands(r, s)
		want, sums := wantFloat(t, s, o)
		for _, k := range sets(s.In) {
			got := runTyped(t, s, k, []*pool.Pool{onePool, twoPool, threePool}[r.IntN(3)], o)
			if !k.dot() {
				require.Equal(t, want, got, "%v %+v", &k, s)
				continue
			}
			// Sums of K terms of size 1 in another order, then one rounding.
			for e := range sums {
				var v float64
				tolerance := 1e-5*float64(s.K) + 1e-5
				switch s.Out {
				case F32:
					v = float64(*f32at(unsafe.Pointer(&got[0]), 4*e))
				default:
					v = float64(widened(s.Out, *(*uint16)(unsafe.Pointer(&got[2*e]))))
					tolerance += math.Abs(v) * map[Type]float64{BF16: 1.0 / 128, F16: 1.0 / 1024}[s.Out]
				}
				if d := math.Abs(v - float64(sums[e])); !(d <= tolerance) {
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
	for i, s := range typedSpecs(r, 80) {
		s.In, s.Out = []Type{S8, U8S8}[i%2], I32
		o := randomTypedOperands(r, s)
		want := wantInt(s, o)
		for _, k := range sets(s.In) {
			require.Equal(t, want, runTyped(t, s, k, []*pool.Pool{onePool, twoPool, threePool}[r.IntN(3)], o), "%v %+v", &k, s)
		}
	}
}
