package algo_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/algotest"
	"github.com/spillway-ml/spillway/internal/testkit/nullcomm"
)

// All algorithms that add in the tree's order give inproc's bits, for any number of ranks.
func TestBitsOfOneProcess(t *testing.T) {
	sizes := []int{1, 2, 3, 4, 5, 6, 7, 8}
	if algotest.Race { // one number of ranks that is not a power of two, and one that is
		sizes = []int{3, 4}
	}
	for _, ranks := range sizes {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			w, err := inproc.New([]graph.Axis{{Name: "data", Size: ranks}}, inproc.Options{})
			require.NoError(t, err)
			ends := make(chan error)
			for r := range ranks {
				go func() { ends <- check(w, r) }()
			}
			for range ranks {
				require.NoError(t, <-ends)
			}
		})
	}
}

func check(w *inproc.World, r int) error {
	g, err := w.Group(r, -1)
	if err != nil {
		return err
	}
	ctx := cpu.New(r, cpu.Options{})
	g.OnError(ctx.Abort)
	ctx.OnError(g.Abort)
	arena, err := ctx.Alloc(graph.Device, algotest.ArenaBytes)
	if err != nil {
		return err
	}
	s, err := ctx.NewStream(graph.Comm)
	if err == nil {
		err = errors.Join(algotest.Check(g, arena, s), algotest.CheckLeaves(g, arena, s))
	}
	if wrapped, e := algo.Wrap(g, algo.Options{Algorithm: algo.Tree}); err == nil { // only one algorithm has that order
		err = errors.Join(e, algotest.CheckLeaves(wrapped, arena, s))
	}
	if err != nil {
		g.Abort(err)
	}
	return errors.Join(err, ctx.Close())
}

func TestWrap(t *testing.T) {
	g, err := inproc.New([]graph.Axis{{Name: "data", Size: 2}}, inproc.Options{})
	require.NoError(t, err)
	own, err := g.Group(0, -1)
	require.NoError(t, err)
	for _, o := range []algo.Options{{}, {Algorithm: algo.Direct}, {Algorithm: algo.Auto}} {
		w, err := algo.Wrap(own, o)
		require.NoError(t, err)
		require.Same(t, own, w, "the transport's own way")
	}
	_, err = algo.Wrap(struct{ comm.Group }{&nullcomm.Group{}}, algo.Options{Algorithm: algo.Tree})
	require.ErrorContains(t, err, "Config.Collectives tree")
}

// For a sum, Auto chooses few rounds for few bytes and few bytes sent for many, and never the ring.
func TestBest(t *testing.T) {
	small := algo.Cluster.Best(comm.AllReduce, 64, 1, 64)
	require.Contains(t, []algo.Name{algo.Tree, algo.Halving, algo.Server}, small)
	for _, ranks := range []int{2, 3, 5, 8, 16} {
		for log := range 28 {
			a := algo.Cluster.Best(comm.AllReduce, ranks, 1, 1<<log)
			require.NotEqual(t, algo.Ring, a)
			mine, err := algo.Cluster.Seconds(a, comm.AllReduce, ranks, 1, 1<<log)
			require.NoError(t, err)
			direct, err := algo.Cluster.Seconds(algo.Direct, comm.AllReduce, ranks, 1, 1<<log)
			require.NoError(t, err)
			require.LessOrEqual(t, mine, direct)
		}
	}
}

// Auto chooses the algorithm measured at the nearest size. It uses only algorithms that add in the
// tree's order, and only measurements of groups of the same size.
func TestTheTableOfWhatWasMeasured(t *testing.T) {
	table := algo.Table{Ranks: 4, Choices: []algo.Choice{{comm.AllReduce, 1 << 10, algo.Tree}, {comm.AllReduce, 1 << 20, algo.Halving}, {comm.AllGather, 1 << 10, algo.Ring}, {comm.ReduceScatter, 1 << 10, algo.Hierarchical}}}
	require.Equal(t, algo.Tree, table.Best(comm.AllReduce, 4, 1, 1))
	require.Equal(t, algo.Tree, table.Best(comm.AllReduce, 4, 1, 30<<10))
	require.Equal(t, algo.Halving, table.Best(comm.AllReduce, 4, 1, 40<<10))
	require.Empty(t, table.Best(comm.AllReduce, 2, 1, 1<<10))
	require.Empty(t, table.Best(comm.AllGather, 4, 1, 1<<10), "a ring's order is its own")
	require.Empty(t, table.Best(comm.ReduceScatter, 4, 1, 1<<10))
	require.Equal(t, algo.Hierarchical, table.Best(comm.ReduceScatter, 4, 2, 1<<10))
}
