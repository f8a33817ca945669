//go:build linux

package cuda_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cuda"
)

// RankSum adds in comm.Adder's order, bit for bit.
func TestRankSum(t *testing.T) {
	compiler, err := shim.New()
	if errors.Is(err, shim.ErrNoCompiler) {
		t.Skip(err)
	}
	require.NoError(t, err)
	d := drivertest.Start(t, drivertest.Options{})
	devices, err := d.Devices()
	require.NoError(t, err)
	lib, err := cuda.New(cuda.Options{API: d, Device: devices[0], Compiler: compiler, Host: cpu.New(pool.New(1))})
	require.NoError(t, err)
	s, err := d.NewStream()
	require.NoError(t, err)
	sumRanks[float32](t, d, lib, s, graph.F32)
	sumRanks[float64](t, d, lib, s, graph.F64)
	sumRanks[int64](t, d, lib, s, graph.I64)
	sumRanks16(t, d, lib, s, graph.BF16, num.BF16, num.FromBF16)
	sumRanks16(t, d, lib, s, graph.F16, num.F16, num.FromF16)
	_, err = lib.RankSum(graph.I32, graph.SumTree)
	require.ErrorContains(t, err, "no sum of i32")
	_, err = lib.RankSum(graph.F64, graph.SumSequential)
	require.ErrorContains(t, err, "no sum of f64 in the order sequential")
	same := func(v float32) float32 { return v }
	sumLeaves(t, d, lib, s, graph.F32, same, same)
	sumLeaves(t, d, lib, s, graph.BF16, num.BF16, num.FromBF16)
	sumLeaves(t, d, lib, s, graph.F16, num.F16, num.FromF16)
	require.NoError(t, errors.Join(d.DestroyStream(s), lib.Close()))
}

// enqueue adds n elements in one sum, with a tail after the last 16 bytes, or in two sums. The
// second then begins at an address that is not a multiple of 16 bytes.
func enqueue(t *testing.T, sum *cuda.RankSum, d *drivertest.Driver, s driver.Stream, dsts, srcs []driver.Address, n int64, src, dst int64, accumulate bool) {
	const first = 5
	if len(srcs)%2 == 0 {
		require.NoError(t, sum.Enqueue(d, s, dsts, srcs, n, accumulate))
		require.NoError(t, d.Synchronize(s))
		return
	}
	from := func(list []driver.Address, size int64) []driver.Address {
		var later []driver.Address
		for _, a := range list {
			later = append(later, a+driver.Address(first*size))
		}
		return later
	}
	require.NoError(t, sum.Enqueue(d, s, dsts, srcs, first, accumulate))
	require.NoError(t, sum.Enqueue(d, s, from(dsts, dst), from(srcs, src), n-first, accumulate))
	require.NoError(t, d.Synchronize(s))
}

func sumRanks[T comm.Number](t *testing.T, d *drivertest.Driver, lib *cuda.Library, s driver.Stream, dtype graph.DType) {
	sum, err := lib.RankSum(dtype, graph.SumTree)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, ranks := range []int{1, 2, 3, 5, 6, 7, 8, 13, 64} {
		const n = 3003
		var zero T
		size := int64(unsafe.Sizeof(zero)) * n
		var at []driver.Address
		var in [][]T
		view := func(a driver.Address) []T {
			b, err := d.Bytes(a, size)
			require.NoError(t, err)
			return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n)
		}
		for range ranks + 1 { // the last is a separate destination
			a, err := d.Alloc(size)
			require.NoError(t, err)
			at = append(at, a)
			v := view(a)
			for i := range v {
				v[i] = T(rng.NormFloat64() * 1e6)
			}
			in = append(in, append([]T(nil), v...))
		}
		want := make([]T, n)
		adder := comm.NewAdder[T](ranks)
		adder.Sum(want, in[:ranks], false)
		added := in[ranks]
		adder.Sum(added, in[:ranks], true)
		enqueue(t, sum, d, s, at[ranks:], at[:ranks], n, dtype.Size(), dtype.Size(), true)
		require.Equal(t, added, view(at[ranks]), "%d ranks, accumulated", ranks)
		if ranks < cuda.MostRanks { // into every source and into the other destination
			enqueue(t, sum, d, s, at, at[:ranks], n, dtype.Size(), dtype.Size(), false)
			for _, a := range at {
				require.Equal(t, want, view(a), "%d ranks", ranks)
			}
		}
		for _, a := range at {
			require.NoError(t, d.Free(a))
		}
	}
}

// sumRanks16 is sumRanks for 16-bit floats: their float32 values are added in the same order, and
// the sum is rounded once.
func sumRanks16(t *testing.T, d *drivertest.Driver, lib *cuda.Library, s driver.Stream, dtype graph.DType, narrow func(float32) uint16, widen func(uint16) float32) {
	sum, err := lib.RankSum(dtype, graph.SumTree)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, ranks := range []int{1, 2, 3, 6, 7, 21, 64} {
		const n = 3003
		var at []driver.Address
		var wide [][]float32
		view := func(a driver.Address) []uint16 {
			b, err := d.Bytes(a, 2*n)
			require.NoError(t, err)
			return unsafe.Slice((*uint16)(unsafe.Pointer(&b[0])), n)
		}
		for range ranks + 1 { // the last is a separate destination
			a, err := d.Alloc(2 * n)
			require.NoError(t, err)
			at = append(at, a)
			v := make([]float32, n)
			for i, bits := 0, view(a); i < n; i++ {
				bits[i] = narrow(float32(rng.NormFloat64() * 100))
				v[i] = widen(bits[i])
			}
			wide = append(wide, v)
		}
		comm.NewAdder[float32](ranks).Sum(wide[ranks], wide[:ranks], true)
		enqueue(t, sum, d, s, at[ranks:], at[:ranks], n, 2, 2, true)
		for i, bits := range view(at[ranks]) {
			require.Equal(t, narrow(wide[ranks][i]), bits, "%v, %d ranks, element %d", dtype, ranks, i)
		}
		for _, a := range at {
			require.NoError(t, d.Free(a))
		}
	}
}

// sumLeaves compares sums in the ranks' order with f32 arithmetic. When accumulating, a sum begins
// with the destination's value.
func sumLeaves[T float32 | uint16](t *testing.T, d *drivertest.Driver, lib *cuda.Library, s driver.Stream, dtype graph.DType, narrow func(float32) T, widen func(T) float32) {
	sum, err := lib.RankSum(dtype, graph.SumSequential)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, ranks := range []int{1, 2, 3, 6, 7, 21, 64} {
		const n = 3003
		alloc := func(size int64) (driver.Address, []byte) {
			a, err := d.Alloc(n * size)
			require.NoError(t, err)
			b, err := d.Bytes(a, n*size)
			require.NoError(t, err)
			return a, b
		}
		to, mem := alloc(4)
		got := unsafe.Slice((*float32)(unsafe.Pointer(&mem[0])), n)
		var at []driver.Address
		var leaves [][]T
		for range ranks {
			a, b := alloc(dtype.Size())
			v := unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n)
			for i := range v {
				v[i] = narrow(float32(rng.NormFloat64() * 100))
			}
			at, leaves = append(at, a), append(leaves, v)
		}
		for _, accumulate := range []bool{false, true} {
			want := make([]float32, n)
			for i := range want {
				got[i] = float32(rng.NormFloat64() * 100)
				if accumulate {
					want[i] = got[i]
				}
				for r, v := range leaves {
					if r == 0 && !accumulate {
						want[i] = widen(v[i])
					} else {
						want[i] += widen(v[i])
					}
				}
			}
			enqueue(t, sum, d, s, []driver.Address{to}, at, n, dtype.Size(), 4, accumulate)
			require.Equal(t, want, got, "%v, %d ranks, accumulate %v", dtype, ranks, accumulate)
		}
		for _, a := range append(at, to) {
			require.NoError(t, d.Free(a))
		}
	}
}
