package comm_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/graph"
)

// treeSum defines the sum over ranks of one element.
func treeSum(v []float32) float32 {
	if len(v) == 1 {
		return v[0]
	}
	p := 1
	for 2*p < len(v) {
		p *= 2
	}
	return treeSum(v[:p]) + treeSum(v[p:])
}

func TestAdderFollowsTheTree(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, ranks := range []int{1, 2, 3, 4, 5, 6, 7, 8, 13} {
		for _, n := range []int{0, 1, 15, 1024, 1025, 5000} {
			t.Run(fmt.Sprintf("%d ranks/%d", ranks, n), func(t *testing.T) {
				srcs := make([][]float32, ranks)
				for r := range srcs {
					srcs[r] = make([]float32, n)
					for i := range srcs[r] {
						srcs[r][i] = float32(rng.NormFloat64() * 1000)
					}
				}
				want, old, column := make([]float32, n), make([]float32, n), make([]float32, ranks)
				for i := range want {
					for r := range srcs {
						column[r] = srcs[r][i]
					}
					want[i] = treeSum(column)
					old[i] = float32(rng.NormFloat64())
				}
				a := comm.NewAdder[float32](ranks)
				dst := make([]float32, n)
				a.Sum(dst, srcs, false)
				require.Equal(t, want, dst)

				copy(dst, old)
				a.Sum(dst, srcs, true)
				for i := range dst {
					require.Equal(t, old[i]+want[i], dst[i])
				}

				last := srcs[ranks-1] // in place, over the source that is read last
				a.Sum(last, srcs, false)
				require.Equal(t, want, last)
			})
		}
	}
}

func TestRingBytesAddUpOverRanks(t *testing.T) {
	for _, w := range []int{1, 2, 3, 5, 8} {
		for _, bytes := range []int64{0, 4, 1000, 4096} {
			var gather, reduce, norms int64
			for r := range w {
				gather += comm.RingBytes(comm.Signature{Op: comm.AllGather, Bytes: bytes, DType: graph.F32}, r, w)
				reduce += comm.RingBytes(comm.Signature{Op: comm.AllReduce, Bytes: bytes, DType: graph.F32}, r, w)
				norms += comm.RingBytes(comm.Signature{Op: comm.AllReduce, Bytes: bytes, DType: graph.I64}, r, w)
			}
			require.Equal(t, bytes*int64(w-1), gather)
			require.Equal(t, 2*bytes*int64(w-1), reduce)
			require.Zero(t, norms, "accumulators of norms and losses are scalars")
		}
	}
}

func TestCoord(t *testing.T) {
	mesh := []graph.Axis{{Name: "replicate", Size: 2}, {Name: "shard", Size: 3}}
	require.Equal(t, []int{0, 2}, comm.Coord(mesh, 2))
	require.Equal(t, []int{1, 0}, comm.Coord(mesh, 3))
	require.Empty(t, comm.Coord(nil, 0))
}
