//go:build linux

package blastest

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// matrix is a row-major matrix in device memory, with gaps between its rows, and a copy of its
// contents.
type matrix struct {
	m    blas.Matrix
	at   driver.Address
	host unsafe.Pointer // page-locked
	n    int64          // elements
}

func (m *matrix) index(i, j int64) int64 {
	if m.m.Trans {
		i, j = j, i
	}
	return i*m.m.Ld + j
}

func (m *matrix) elements() elements {
	if m.m.Type != graph.F32 {
		return elements{half: unsafe.Slice((*uint16)(m.host), m.n), m: m.m}
	}
	return elements{f32: unsafe.Slice((*float32)(m.host), m.n), m: m.m}
}

func (m *matrix) get(i, j int64) float64 { return float64(m.elements().get(m.index(i, j))) }

// checker compares a library's products with sums on the host.
type checker struct {
	t   testing.TB
	api driver.API
	lib blas.Library
	s   driver.Stream
	rng *rand.Rand

	packed bool // no gaps between rows
}

// Check compares the library's products with sums on the host. It draws shapes with tails,
// transposes, types, biases and accumulation. Small integers are exact in every type and order;
// integers up to 256 also in 16 bits, so twice half a unit detects every wrong sum. With normal
// numbers a product in TF32 would fail. The driver's context must be current.
func Check(t testing.TB, api driver.API, lib blas.Library) {
	t.Helper()
	s, err := api.NewStream()
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 1))
	c := &checker{t: t, api: api, lib: lib, s: s, rng: rng}
	for i := range 150 {
		most, deep := int64(9), int64(9)
		if i%10 == 0 {
			most, deep = 90, 1500
		}
		c.product(most, deep, rng.IntN(2) == 0, rng.IntN(3) == 0, plain)
	}
	for range 12 {
		c.product(40, 300, true, true, derivative)
		c.product(40, 300, true, true, activation)
	}
	for i := range 24 {
		c.product(40, 300, true, i%3 == 0, sumsOfA+i%2)
	}
	require.NoError(t, api.DestroyStream(s))
}

func (c *checker) alloc(rows, cols int64, typ graph.DType, trans, integers bool) *matrix {
	if trans {
		rows, cols = cols, rows
	}
	m := &matrix{m: blas.Matrix{Type: typ, Trans: trans, Ld: cols + c.rng.Int64N(4)}}
	if c.packed {
		m.m.Ld = cols
	}
	m.n = (rows-1)*m.m.Ld + cols
	var err error
	m.at, err = c.api.Alloc(m.n * typ.Size())
	require.NoError(c.t, err)
	m.host, _, err = c.api.HostAlloc(m.n * typ.Size())
	require.NoError(c.t, err)
	e := m.elements()
	for i := range m.n {
		v := float32(c.rng.IntN(5) - 2)
		if !integers {
			v = float32(c.rng.NormFloat64())
		}
		e.set(i, v)
	}
	require.NoError(c.t, c.api.CopyToDevice(m.at, m.host, m.n*typ.Size(), c.s))
	return m
}

func (c *checker) free(list ...*matrix) {
	for _, m := range list {
		require.NoError(c.t, c.api.Free(m.at))
		require.NoError(c.t, c.api.HostFree(m.host))
	}
}

// The additional work of a product.
const (
	plain = iota
	derivative
	activation
	sumsOfA
	sumsOfB
)

func (c *checker) product(most, deep int64, half, real bool, epilogue int) {
	t, rng := c.t, c.rng
	m, n, k := 1+rng.Int64N(most), 1+rng.Int64N(most), 1+rng.Int64N(deep)
	in, out := graph.F32, graph.F32
	if half {
		in = []graph.DType{graph.BF16, graph.F16}[rng.IntN(2)]
		out = []graph.DType{in, graph.F32}[rng.IntN(2)]
	}
	sums := map[int]blas.Side{sumsOfA: blas.SumsA, sumsOfB: blas.SumsB}[epilogue]
	if c.packed = sums != blas.NoSums; c.packed { // as for a weight's gradient: complete packs of 16 bytes
		m, n, k = packs(m), packs(n), packs(k)
	}
	if epilogue == derivative || epilogue == activation {
		n, out = blas.AuxLd*(1+n/blas.AuxLd), in
	}
	a, b := c.alloc(m, k, in, rng.IntN(2) == 0, !real), c.alloc(k, n, in, rng.IntN(2) == 0, !real)
	y, bias := c.alloc(m, n, out, false, !real), c.alloc(1, n, out, false, !real)
	work := c.alloc(1, 1<<18, graph.F32, false, true)
	p := blas.Product{M: m, N: n, K: k, A: a.m, B: b.m, C: y.m, Workspace: 1 << 20}
	var aux, of *matrix
	switch kind := rng.IntN(3); {
	case epilogue == derivative:
		p.DGELU = true
	case epilogue == activation:
		p.GELU, p.Bias = true, kind > 0
	case sums != blas.NoSums:
		p.Sums, p.Accumulate = sums, kind == 0
		of = c.alloc(1, p.SumsLen(), out, false, false)
		defer c.free(of)
	case kind == 0:
		p.Bias = true
	case kind == 1:
		p.Accumulate = true
	}
	at := blas.Places{A: a.at, B: b.at, C: y.at, Bias: bias.at, Work: work.at}
	if p.GELU || p.DGELU {
		aux = c.alloc(1, m*n, out, false, false)
		at.Aux = aux.at
		defer c.free(aux)
	}
	if of != nil {
		at.Sums = of.at
	}
	call, err := c.lib.Bind(p, at)
	if ((p.GELU || p.DGELU) && real || of != nil) && errors.Is(err, blas.ErrUnsupported) {
		return // rows begin anywhere here; training has aligned rows, compared with the CPU
	}
	require.NoError(t, err)
	want, pre, tanh := expected(p, a, b, y, bias, aux)
	tolerance := 0.0
	if real {
		tolerance = 1e-5 * math.Sqrt(float64(k)+1)
	}
	before := append([]float32(nil), c.gaps(y, n)...)
	require.NoError(t, call.Enqueue(c.s))
	require.NoError(t, c.api.CopyToHost(y.host, y.at, y.n*out.Size(), c.s))
	require.NoError(t, c.api.Synchronize(c.s))
	if p.GELU {
		c.argument(p, aux, bias, pre, tolerance)
	}
	for i := range m {
		for j := range n {
			w, slack := want[i*n+j], tolerance
			if out != graph.F32 {
				rounded := elements{half: make([]uint16, 1), m: y.m}
				rounded.set(0, float32(w))
				if real {
					slack += math.Abs(w)/256 + tanh[i*n+j]
				} else {
					w = float64(rounded.get(0))
				}
				if p.Bias { // cuBLASLt may round the product before it adds the bias
					slack += (math.Abs(want[i*n+j]-bias.get(0, j)) + math.Abs(w)) / 256
				}
			}
			if got := y.get(i, j); !(math.Abs(got-w) <= slack) {
				t.Fatalf("%s, bias %v, accumulate %v: element (%d, %d) is %g, want %g", p, p.Bias, p.Accumulate, i, j, got, w)
			}
		}
	}
	require.Equal(t, before, c.gaps(y, n), "%s: what is between rows is left alone", p)
	if of != nil {
		c.sums(p, a, b, of, tolerance)
	}
	c.free(a, b, y, bias, work)
}

// expected returns the expected C before rounding. With GELU it also returns the expected aux, and
// how much a tanh of 11 bits may change C.
func expected(p blas.Product, a, b, y, bias, aux *matrix) (want, pre, tanh []float64) {
	want, pre, tanh = make([]float64, p.M*p.N), make([]float64, p.M*p.N), make([]float64, p.M*p.N)
	rows, columns := make([]float64, p.M*p.K), make([]float64, p.N*p.K)
	for x := range p.K {
		for i := range p.M {
			rows[i*p.K+x] = a.get(i, x)
		}
		for j := range p.N {
			columns[j*p.K+x] = b.get(x, j)
		}
	}
	for i := range p.M {
		for j := range p.N {
			sum, at := 0.0, i*p.N+j
			column := columns[j*p.K:][:p.K]
			for x, v := range rows[i*p.K:][:p.K] {
				sum += v * column[x]
			}
			if p.Bias {
				sum += bias.get(0, j)
			}
			if p.Accumulate {
				sum += y.get(i, j)
			}
			if p.GELU {
				pre[at], tanh[at] = sum, math.Abs(sum)/512
				sum = gelu(sum)
			}
			if p.DGELU {
				tanh[at] = math.Abs(sum) / 512
				sum *= geluDerivative(aux.get(0, at))
			}
			want[at] = sum
		}
	}
	return want, pre, tanh
}

// argument checks the argument of GELU that a product has written.
func (c *checker) argument(p blas.Product, aux, bias *matrix, want []float64, tolerance float64) {
	require.NoError(c.t, c.api.CopyToHost(aux.host, aux.at, aux.n*p.C.Type.Size(), c.s))
	require.NoError(c.t, c.api.Synchronize(c.s))
	for i, w := range want {
		slack := tolerance + math.Abs(w)/256
		if p.Bias {
			slack += math.Abs(w-bias.get(0, int64(i)%p.N)) / 256
		}
		if got := aux.get(0, int64(i)); !(math.Abs(got-w) <= slack) {
			c.t.Fatalf("%s, bias %v: aux %d is %g, want %g", p, p.Bias, i, got, w)
		}
	}
}

// sums checks the sums of a factor over K that a product has written.
func (c *checker) sums(p blas.Product, a, b, of *matrix, tolerance float64) {
	require.NoError(c.t, c.api.CopyToHost(of.host, of.at, of.n*p.C.Type.Size(), c.s))
	require.NoError(c.t, c.api.Synchronize(c.s))
	for i := range of.n {
		want := 0.0
		for k := range p.K {
			if p.Sums == blas.SumsA {
				want += a.get(i, k)
			} else {
				want += b.get(k, i)
			}
		}
		slack := tolerance
		if p.C.Type != graph.F32 {
			slack += math.Abs(want) / 256
		}
		if got := of.get(0, i); !(math.Abs(got-want) <= slack) {
			c.t.Fatalf("%s, accumulate %v: sum %d is %g, want %g", p, p.Accumulate, i, got, want)
		}
	}
}

// packs returns n rounded up to a multiple of 8 elements, which is 16 bytes in 16-bit types.
func packs(n int64) int64 { return (n + 7) / 8 * 8 }

// gaps returns the contents between the rows of n elements.
func (c *checker) gaps(m *matrix, n int64) (list []float32) {
	e := m.elements()
	for i := range m.n {
		if i%m.m.Ld >= n {
			list = append(list, e.get(i))
		}
	}
	return list
}
