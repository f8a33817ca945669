package exec_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
)

// TouchedClasses counts, by class, the bytes of the plan's live buffers that operations have
// reached.
func TestTouchedByClass(t *testing.T) {
	z := newZero3(2, 37)
	work := z.buf("work", graph.F32, 30, graph.Device, graph.LifeRun)
	third := z.view("third", graph.F32, 10, graph.View{Base: work})
	begin := &z.p.Sections[0].Phases[0]
	begin.Ops = append(begin.Ops, op(zero, "third/zero", graph.Compute, nil, wr(third)))
	for id, class := range map[graph.BufID]graph.Class{z.shard: graph.Parameters, z.gs: graph.Gradients, z.full: graph.Unsharded, z.g: graph.Activations, work: graph.Workspace} {
		z.p.Buf(id).Class = class
		z.layout.Spaces[graph.Device].Live = append(z.layout.Spaces[graph.Device].Live, id)
	}
	z.p.Buf(z.gs).Pad = 12
	staging := z.p.Port(graph.PortStaging)
	z.p.Buf(staging).Class = graph.Communication
	z.layout.Spaces[graph.Host].Live = []graph.BufID{staging}

	j := newRanks(t, z.builder, jobOptions{})
	for _, e := range j.ex {
		require.Equal(t, exec.Classes{}, e.TouchedClasses(), "nothing has run")
	}
	j.all(func(r int, e *exec.Executor) error {
		if err := e.RunPhase("step", "begin"); err != nil {
			return err
		}
		return e.Sync()
	})
	for _, e := range j.ex {
		got := e.TouchedClasses()[graph.Device]
		want := [graph.NumClasses]int64{graph.Gradients: 4*37 - 12, graph.Workspace: 4 * 10}
		want[graph.Padding] = e.Touched(graph.Device) - (4*37 - 12) - 4*10
		require.Equal(t, want, got)
	}
	j.all(func(r int, e *exec.Executor) error {
		_, err := z.step(e, 0, r)
		return err
	})
	for _, e := range j.ex {
		got := e.TouchedClasses()
		sum := int64(0)
		for _, n := range got[graph.Device] {
			sum += n
		}
		require.Equal(t, e.Touched(graph.Device), sum)
		got[graph.Device][graph.Padding] = 0
		require.Equal(t, [graph.NumClasses]int64{graph.Parameters: 4 * 37, graph.Gradients: 4*37 - 12, graph.Unsharded: 8 * 37, graph.Activations: 8 * 37, graph.Workspace: 4 * 10}, got[graph.Device])
		_, err := e.Scalar(z.p.Loss)
		require.NoError(t, err)
		got = e.TouchedClasses()
		reached := e.Touched(graph.Host) - z.layout.Offset[staging]
		require.Positive(t, reached)
		require.Equal(t, min(reached, z.p.Buf(staging).Bytes()), got[graph.Host][graph.Communication], "no operation has the staging buffer: up to the highest byte")
	}
}
