package exec_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
)

// An AllToAll of bytes along one axis of a mesh sends part i of the axis's rank j to part j of its
// rank i. A buffer of bytes may hold several types, which one operation moves together.
func TestExchange(t *testing.T) {
	b := newBuilder(graph.Axis{Name: "replicate", Size: 2}, graph.Axis{Name: "shard", Size: 3})
	const part = 8
	send := b.buf("send", graph.U8, 3*part, graph.Device, graph.LifeRun)
	recv := b.buf("recv", graph.U8, 3*part, graph.Device, graph.LifeRun)
	o := op(graph.AllToAll, "exchange", graph.Comm, ins(send), wr(recv))
	o.Attr = graph.GroupAttr{Axis: 1}
	b.p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "only", Repeat: 1, Ops: []graph.Op{o}}}}}
	require.NoError(t, graph.VerifyStructure(b.p))

	b.port(graph.PortStaging, "staging", graph.U8, 48)
	j := newRanks(t, b, jobOptions{})
	value := func(rank, to, i int) byte { return byte(100*rank + 10*to + i) }
	j.all(func(r int, e *exec.Executor) error {
		mem := make([]byte, 3*part)
		for i := range mem {
			mem[i] = value(r, i/part, i%part)
		}
		if err := e.Write(send, 0, mem); err != nil {
			return err
		}
		return e.RunSection("step", nil)
	})
	for r, e := range j.ex {
		got := make([]byte, 3*part)
		require.NoError(t, e.Read(recv, 0, got))
		group, self := r/3*3, r%3
		for i, v := range got {
			require.Equal(t, value(group+i/part, self, i%part), v, "rank %d, byte %d", r, i)
		}
	}
}

// The program sets the order in which a reduction adds. Check refuses an order that no transport
// has.
func TestUnknownOrderOfSummationIsRefused(t *testing.T) {
	z := newZero3(1, 37)
	for i := range z.p.Sections[0].Phases[1].Ops {
		if o := &z.p.Sections[0].Phases[1].Ops[i]; o.Kind == graph.ReduceScatter {
			o.Attr = graph.GroupAttr{Axis: -1, Order: graph.NumSumOrders}
			p := *z.p
			require.ErrorContains(t, graph.Check(&p, o), "sum order(2) is no order of summation, want tree or sequential")
		}
	}
}

// A reduction from left to right must add f32, bf16 or f16 values in f32, and must not write over
// its input.
func TestOrderOfLeavesIsChecked(t *testing.T) {
	b := newBuilder(graph.Axis{Name: "shard", Size: 2})
	leaf := b.buf("leaf", graph.BF16, 16, graph.Device, graph.LifeRun)
	wide := b.buf("wide", graph.F32, 16, graph.Device, graph.LifeRun)
	sum := b.buf("sum", graph.F32, 8, graph.Device, graph.LifeRun)
	half := b.buf("half", graph.BF16, 8, graph.Device, graph.LifeRun)
	long := b.buf("long", graph.F32, 16, graph.Device, graph.LifeRun)
	own := b.p.AddBuffer(graph.Buffer{Name: "own", DType: graph.F32, Shape: []int64{8}, Life: graph.LifeRun, Unit: -1, View: &graph.View{Base: wide}})
	for _, c := range []struct {
		from, to graph.BufID
		wrong    string
	}{
		{leaf, sum, ""}, {wide, sum, ""},
		{leaf, half, "adds bf16 in bf16 from left to right, want f32, bf16 or f16 in f32"},
		{leaf, long, "number of elements"},
		{wide, own, "overlaps input full"},
	} {
		o := op(graph.ReduceScatter, "leaves", graph.Comm, ins(c.from), wr(c.to))
		o.Attr = graph.GroupAttr{Axis: 0, Order: graph.SumSequential}
		if err := graph.Check(b.p, &o); c.wrong == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.wrong)
		}
	}
}
