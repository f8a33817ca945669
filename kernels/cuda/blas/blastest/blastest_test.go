//go:build linux

package blastest

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/drivertest"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// memory is a row-major matrix of small integers, whose products are exact in
// both types, with gaps between its rows.
type memory struct {
	m    blas.Matrix
	at   driver.Address
	data []byte
}

func (m *memory) index(i, j int64) int64 {
	if m.m.Trans {
		i, j = j, i
	}
	return i*m.m.Ld + j
}

func (m *memory) get(i, j int64) float32 {
	at := m.index(i, j)
	if m.m.Type == graph.BF16 {
		return num.FromBF16(*(*uint16)(unsafe.Pointer(&m.data[2*at])))
	}
	return *(*float32)(unsafe.Pointer(&m.data[4*at]))
}

func fill(data []byte, t graph.DType, rng *rand.Rand) {
	for i := 0; i < len(data); i += int(t.Size()) {
		v := float32(rng.IntN(5) - 2)
		if t == graph.BF16 {
			*(*uint16)(unsafe.Pointer(&data[i])) = num.BF16(v)
		} else {
			*(*float32)(unsafe.Pointer(&data[i])) = v
		}
	}
}

func TestProducts(t *testing.T) {
	d := drivertest.Start(t, drivertest.Options{})
	s, err := d.NewStream()
	require.NoError(t, err)
	lib := New(d)
	rng := rand.New(rand.NewPCG(1, 1))
	alloc := func(rows, cols int64, typ graph.DType, trans bool) *memory {
		if trans {
			rows, cols = cols, rows
		}
		m := &memory{m: blas.Matrix{Type: typ, Trans: trans, Ld: cols + rng.Int64N(4)}}
		n := ((rows-1)*m.m.Ld + cols) * typ.Size()
		var err error
		m.at, err = d.Alloc(n)
		require.NoError(t, err)
		m.data, err = d.Bytes(m.at, n)
		require.NoError(t, err)
		fill(m.data, typ, rng)
		return m
	}
	work, err := d.Alloc(1024)
	require.NoError(t, err)
	for i := range 100 {
		m, n, k := 1+rng.Int64N(9), 1+rng.Int64N(9), 1+rng.Int64N(9)
		in, out := graph.F32, graph.F32
		if i%2 == 0 {
			in, out = graph.BF16, []graph.DType{graph.BF16, graph.F32}[rng.IntN(2)]
		}
		a, b := alloc(m, k, in, rng.IntN(2) == 0), alloc(k, n, in, rng.IntN(2) == 0)
		c, bias := alloc(m, n, out, false), alloc(1, n, out, false)
		p := blas.Product{M: m, N: n, K: k, A: a.m, B: b.m, C: c.m, Workspace: 1024}
		switch rng.IntN(3) {
		case 0:
			p.Bias = true
		case 1:
			p.Accumulate = true
		}
		var want []float32
		for r := range m {
			for q := range n {
				sum := float32(0)
				for x := range k {
					sum += a.get(r, x) * b.get(x, q)
				}
				if p.Bias {
					sum += bias.get(0, q)
				}
				if p.Accumulate {
					sum += c.get(r, q)
				}
				want = append(want, sum)
			}
		}
		call, err := lib.Bind(p, blas.Places{A: a.at, B: b.at, C: c.at, Bias: bias.at, Work: work})
		require.NoError(t, err)
		require.NoError(t, call.Enqueue(s))
		require.NoError(t, d.Synchronize(s))
		for r := range m {
			for q := range n {
				require.Equal(t, want[r*n+q], c.get(r, q), "%s: element %d, %d", p, r, q)
			}
		}
		for _, x := range []*memory{a, b, c, bias} {
			require.NoError(t, d.Free(x.at))
		}
	}
	scratch, err := d.Bytes(work, 1024)
	require.NoError(t, err)
	require.Equal(t, byte(0xff), scratch[1023], "workspace has no contents to rely on")
	require.NoError(t, d.Free(work))
	require.NoError(t, d.DestroyStream(s))
}

func TestRefusals(t *testing.T) {
	f := blas.Matrix{Type: graph.F32, Ld: 8}
	h := blas.Matrix{Type: graph.BF16, Ld: 8}
	at := blas.Places{A: 256, B: 512, C: 1024, Bias: 2048, Work: 4096}
	lib := New(nil)
	for _, c := range []struct {
		p    blas.Product
		at   blas.Places
		want string
	}{
		{blas.Product{M: 0, N: 8, K: 8, A: f, B: f, C: f}, at, "sizes are at least 1"},
		{blas.Product{M: 8, N: 9, K: 8, A: f, B: f, C: f}, at, "rows of B have 9 elements and are 8 apart"},
		{blas.Product{M: 9, N: 8, K: 8, A: blas.Matrix{Ld: 8, Trans: true}, B: f, C: f}, at, "rows of A have 9 elements"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: h, C: f}, at, "A is f32, B bf16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: h}, at, "C bf16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f}, blas.Places{A: 8, B: 512, C: 1024}, "A is at 0x8, want a multiple of 16"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Bias: true}, blas.Places{A: 256, B: 512, C: 1024}, "the bias is at 0x0"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Workspace: 16}, blas.Places{A: 256, B: 512, C: 1024, Work: 16}, "workspace at 0x10"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Bias: true, Accumulate: true}, at, "cannot both"},
		{blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: blas.Matrix{Ld: 8, Trans: true}}, at, "C is transposed"},
	} {
		_, err := lib.Bind(c.p, c.at)
		require.ErrorContains(t, err, c.want)
	}
	lib.Unsupported = func(p blas.Product) bool { return p.Bias }
	_, err := lib.Bind(blas.Product{M: 8, N: 8, K: 8, A: f, B: f, C: f, Bias: true}, at)
	require.ErrorIs(t, err, blas.ErrUnsupported)
	require.ErrorContains(t, err, "product 8×8×8 (A f32, B f32, C f32)")
}
