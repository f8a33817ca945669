//go:build linux

package gemm

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// guarded returns n bytes that end, or begin, at an inaccessible page.
func guarded(t testing.TB, n int, atEnd bool) []byte {
	page := syscall.Getpagesize()
	size := (n + page - 1) / page * page
	m, err := syscall.Mmap(-1, 0, size+2*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(m)) })
	require.NoError(t, syscall.Mprotect(m[:page], syscall.PROT_NONE))
	require.NoError(t, syscall.Mprotect(m[page+size:], syscall.PROT_NONE))
	if atEnd {
		return m[page+size-n : page+size]
	}
	return m[page : page+n]
}

func guardedFloats(t testing.TB, v []float32, atEnd bool) []float32 {
	if len(v) == 0 {
		return nil
	}
	g := guarded(t, 4*len(v), atEnd)
	f := unsafe.Slice((*float32)(unsafe.Pointer(&g[0])), len(v))
	copy(f, v)
	return f
}

// A read or write outside a slice crashes the test's process.
func TestNothingOutsideIsTouched(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	specs := large()[:10]
	for range 60 {
		specs = append(specs, randomSpec(r, 6))
	}
	for i, s := range specs {
		o := randomOperands(r, s)
		for _, l := range levels()[1:] {
			want := run(t, s, l, onePool, o)
			for j, end := range []bool{false, true, false, true} {
				c := guardedFloats(t, o.c, end)
				work := guarded(t, int(Workspace(s)), end)
				a, b, bias := guardedFloats(t, o.a, end), guardedFloats(t, o.b, end), guardedFloats(t, o.bias, end)
				pl := []*pool.Pool{twoPool, onePool}[j/2] // with one thread, B is packed during the product
				require.NoError(t, newAt(t, s, l).Run(pl, a, b, c, bias, work))
				requireSameBits(t, want, c, l, s, i)
			}
		}
	}
}

// The gaps between rows of C are not changed. Slices need no alignment.
func TestGapsAndAlignment(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	s := Spec{M: 45, N: 50, K: 33, LdC: 53, LdA: 35}
	o := randomOperands(r, s)
	for shift := range 4 {
		move := func(v []float32) []float32 { return append(make([]float32, shift, shift+len(v)), v...)[shift:] }
		for _, l := range levels() {
			c := move(o.c)
			work := make([]byte, int(Workspace(s))+7)[7:]
			require.NoError(t, newAt(t, s, l).Run(onePool, move(o.a), move(o.b), c, nil, work))
			for i := range s.M - 1 {
				requireSameBits(t, o.c[i*53+50:i*53+53], c[i*53+50:i*53+53])
			}
			want := append([]float32(nil), o.c...)
			require.NoError(t, Reference(s, o.a, o.b, want, nil, nil))
			requireSameBits(t, want, c)
		}
	}
}

func TestNothingOutsideIsTouchedByTypes(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range 60 {
		s := randomSpec(r, 7)
		if i%3 == 0 {
			s.K, s.LdA, s.LdB = (s.K+63)/64*64, 0, 0
		}
		s.In = []Type{BF16, F16, S8, U8S8}[i%4]
		if s.Out = []Type{F32, BF16, F16}[r.IntN(3)]; s.In.integer() {
			s.Out = I32
		}
		o := randomTypedOperands(r, s)
		for _, k := range sets(s.In) {
			want := runTyped(t, s, k, onePool, o)
			for _, end := range []bool{false, true} {
				at := func(v []byte) []byte { g := guarded(t, len(v), end); copy(g, v); return g }
				c := at(o.c)
				p := new(Product)
				p.reset(s, k)
				require.NoError(t, p.RunBytes(twoPool, at(o.a), at(o.b), c, guardedFloats(t, o.bias, end), guarded(t, int(Workspace(s)), end)))
				require.Equal(t, want, c, "%v %+v", &k, s)
			}
		}
	}
}
