//go:build linux

package bench

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// For each operation and size, the sample of auto's algorithm is stored.
func TestLinkSamples(t *testing.T) {
	row := func(transport string, op comm.Op, a algo.Name, bytes int64, s float64) CommRow {
		return CommRow{Transport: transport, Ranks: 4, Op: op, Algorithm: a, Bytes: bytes, Seconds: s, perHost: 4}
	}
	got := linkSamples([]CommRow{
		row("shm", comm.AllGather, algo.Tree, 4096, 9), row("shm", comm.AllGather, algo.Direct, 4096, 1), row("shm", comm.AllGather, algo.Ring, 4096, 8),
		row("shm", comm.AllReduce, algo.Direct, 4096, 2), row("shm", comm.Broadcast, algo.Direct, 4096, 3),
	})
	require.Equal(t, []cost.Sample{{Class: "all_gather", Size: cost.Size{Bytes: 3072}, Seconds: 1}, {Class: "all_reduce", Size: cost.Size{Bytes: 6144}, Seconds: 2}}, got)
	best := algo.Cluster.Best(comm.AllReduce, 4, 4, 64)
	require.NotEqual(t, algo.Direct, best)
	got = linkSamples([]CommRow{row("mpi", comm.AllReduce, best, 64, 1), row("mpi", comm.AllReduce, algo.Direct, 64, 2)})
	require.Equal(t, 1.0, got[0].Seconds)
	require.Equal(t, algo.Table{Ranks: 4, Choices: []algo.Choice{{Op: comm.AllReduce, Bytes: 64, Algorithm: algo.Direct}}},
		fastestOf([]CommRow{row("mpi", comm.AllReduce, algo.Tree, 64, 2), row("mpi", comm.AllReduce, algo.Direct, 64, 1), row("mpi", comm.AllReduce, algo.Ring, 64, 0.5), row("mpi", comm.AllGather, algo.Direct, 64, 1)}))
	require.Empty(t, fastestOf([]CommRow{row("shm", comm.AllReduce, algo.Tree, 64, 1), row("shm", comm.AllReduce, algo.Direct, 64, 2)}).Choices)
	require.Empty(t, linkSamples([]CommRow{{Transport: "inproc", Ranks: 1, Op: comm.AllReduce, Algorithm: algo.Direct, Bytes: 64, Seconds: 1}}))
}
