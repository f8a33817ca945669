package cost

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// machine returns a machine whose rates give round times.
func machine() *Machine {
	return &Machine{Name: "test", Matrix: map[graph.DType]float64{graph.F32: 1000, graph.BF16: 4000}, Vector: 100, Memory: 400,
		ToDevice: 50, ToHost: 25, Intra: Link{0.5, 100}, Inter: Link{2, 10}}
}

func collective(t *testing.T, kind graph.Kind, mesh []graph.Axis, axis int, bytes int64, nodeSize int) float64 {
	p := &graph.Program{Mesh: mesh}
	n := int64(p.WorldSize())
	if axis >= 0 {
		n = int64(mesh[axis].Size)
	}
	whole := p.AddBuffer(graph.Buffer{Name: "whole", DType: graph.F32, Shape: []int64{bytes / 4}})
	part := p.AddBuffer(graph.Buffer{Name: "part", DType: graph.F32, Shape: []int64{bytes / 4 / n}})
	op := graph.Op{Kind: kind, Work: graph.NoBuf, Skip: graph.NoBuf, Attr: graph.GroupAttr{Axis: axis}}
	switch kind {
	case graph.AllGather:
		op.In, op.Out = []graph.BufID{part}, []graph.Out{{Buf: whole}}
	case graph.ReduceScatter:
		op.In, op.Out = []graph.BufID{whole}, []graph.Out{{Buf: part}}
	case graph.AllToAll:
		recv := p.AddBuffer(*p.Buf(whole))
		op.In, op.Out = []graph.BufID{whole}, []graph.Out{{Buf: recv}}
	default:
		op.Out = []graph.Out{{Buf: whole, Mode: graph.ReadWrite}}
	}
	m := machine()
	m.NodeSize = nodeSize
	m.Memory = 1e18 // so that only the links take time
	return m.Op(p, &op).Alone
}

func TestCollectives(t *testing.T) {
	flat := func(n int) []graph.Axis { return []graph.Axis{{Name: "shard", Size: n}} }
	// A ring of 4 in one node: 3 hops of latency, 3/4 of the bytes at 100 B/s.
	require.InDelta(t, 3*0.5+750./100, collective(t, graph.AllGather, flat(4), 0, 1000, 8), 1e-9)
	require.InDelta(t, 3*0.5+750./100, collective(t, graph.ReduceScatter, flat(4), 0, 1000, 8), 1e-9)
	require.InDelta(t, 2*(3*0.5+750./100), collective(t, graph.AllReduce, flat(4), -1, 1000, 8), 1e-9)
	require.Zero(t, collective(t, graph.AllGather, flat(1), 0, 1000, 8))
	// 4 nodes of 2: every node receives 3/4 of 1,600 bytes through two ports of 10 B/s. In a ring a
	// part makes 7 hops, of which 3 cross nodes. A sum goes up a tree of two levels over the nodes,
	// with one hop inside a node, and down again.
	require.InDelta(t, 4*0.5+3*2+1200./20, collective(t, graph.AllGather, flat(8), 0, 1600, 2), 1e-9)
	require.InDelta(t, 4*0.5+3*2+1200./20, collective(t, graph.ReduceScatter, flat(8), 0, 1600, 2), 1e-9)
	require.InDelta(t, 2*(0.5+2*2+1200./20), collective(t, graph.AllReduce, flat(8), 0, 1600, 2), 1e-9)
	// On a mesh of 4 replicas × 2 shards, the shards are neighbours in a node. The replicas are all
	// in different nodes, each with its own port.
	mesh := []graph.Axis{{Name: "replicas", Size: 4}, {Name: "shard", Size: 2}}
	require.InDelta(t, 0.5+800./100, collective(t, graph.AllGather, mesh, 1, 1600, 2), 1e-9)
	require.InDelta(t, 2*(2*2+1200./10), collective(t, graph.AllReduce, mesh, 0, 1600, 2), 1e-9)
	// An exchange inside one node costs as much as a scatter. With 8 ranks on 4 nodes each rank
	// sends 6/8 of its bytes through a port of its own, in 6 messages.
	require.InDelta(t, 3*0.5+750./100, collective(t, graph.AllToAll, flat(4), 0, 1000, 8), 1e-9)
	require.InDelta(t, 0.5+6*2+1200./10, collective(t, graph.AllToAll, flat(8), 0, 1600, 2), 1e-9)
	// With nodes of 4, replicas are 2 to a node.
	require.InDelta(t, 2*(0.5+1*2+800./20), collective(t, graph.AllReduce, mesh, 0, 1600, 4), 1e-9)
}

// two builds a program with a phase that runs repeat times. It has an activation on compute, a copy
// in beside it, and a matrix product that needs both.
func two(t *testing.T, repeats ...int) *graph.Program {
	p := &graph.Program{Events: 1}
	b := func(name string, space graph.Space, shape ...int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: graph.F32, Shape: shape, Space: space, Unit: -1})
	}
	host, w := b("host", graph.Host, 10, 10), b("w", graph.Device, 10, 10)
	x, y, z := b("x", graph.Device, 5, 10), b("y", graph.Device, 5, 10), b("z", graph.Device, 5, 10)
	op := func(kind graph.Kind, name string, st graph.StreamID, in []graph.BufID, out graph.BufID, attr any) graph.Op {
		return graph.Op{Kind: kind, Name: name, In: in, Out: []graph.Out{{Buf: out}}, Work: graph.NoBuf, Skip: graph.NoBuf, Stream: st, Attr: attr, Unit: -1}
	}
	ops := []graph.Op{
		op(graph.Copy, "w/in", graph.CopyIn, []graph.BufID{host}, w, nil),
		op(graph.Activation, "act", graph.Compute, []graph.BufID{x}, y, graph.ActAttr{Act: graph.ActReLU}),
		op(graph.Linear, "fc", graph.Compute, []graph.BufID{y, w}, z, graph.LinearAttr{}),
	}
	ops[0].Record, ops[2].Wait = 1, []graph.EventID{1}
	sec := graph.Section{Name: "step"}
	for _, n := range repeats {
		sec.Phases = append(sec.Phases, graph.Phase{Name: "p", Repeat: n, Ops: graph.CloneOps(ops)})
	}
	p.Sections = []graph.Section{sec}
	return p
}

func TestSimulateOverlapsStreams(t *testing.T) {
	m := machine()
	m.Vector = 1e9 // so that the memory traffic limits the activation
	r, err := Simulate(two(t, 1), "step", m)
	require.NoError(t, err)
	// Copy: 400 B at 50 B/s = 8 s. Activation: reads and writes 200 B each at
	// 400 B/s = 1 s. Product: 1,000 FLOP = 1 s, but 800 B at 400 B/s = 2 s.
	require.InDeltaSlice(t, []float64{0, 0, 8}, r.Start, 1e-9)
	require.InDeltaSlice(t, []float64{8, 1, 10}, r.End, 1e-9)
	require.InDelta(t, 10, r.Seconds, 1e-9)
	require.InDelta(t, 3, r.Busy[graph.Compute], 1e-9)
	require.InDelta(t, 7, r.Exposed, 1e-9)

}

// Simulate extrapolates a repeated phase from two copies. Time and busy times must equal those of a
// program with every repetition written out.
func TestSimulateRepeats(t *testing.T) {
	m := machine()
	m.Vector = 1e9
	m.ToDevice = 500 // computing takes longer, so copies run ahead
	whole, err := Simulate(two(t, 1, 7, 1), "step", m)
	require.NoError(t, err)
	apart, err := Simulate(two(t, 1, 1, 1, 1, 1, 1, 1, 1, 1), "step", m)
	require.NoError(t, err)
	require.InDelta(t, apart.Seconds, whole.Seconds, 1e-9)
	for st := range whole.Busy {
		require.InDelta(t, apart.Busy[st], whole.Busy[st], 1e-9)
	}
	for pass, s := range apart.Pass {
		require.InDelta(t, s, whole.Pass[pass], 1e-9)
	}
}

func TestBadMachines(t *testing.T) {
	p := two(t, 1)
	_, err := Simulate(p, "step", &Machine{Name: "none"})
	require.ErrorContains(t, err, `machine "none"`)
	_, err = Simulate(p, "eval", machine())
	require.ErrorContains(t, err, `no section "eval"`)
}

func TestMeasuredRatesReplaceTheRoofline(t *testing.T) {
	m := machine()
	m.Measured = map[Class]Rates{Class(graph.Linear): {Alone: Rate{PerOp: 5, PerFlop: 0.001, PerByte: 0.01}}}
	r, err := Simulate(two(t, 1), "step", m)
	require.NoError(t, err)
	require.InDelta(t, 8+5+1000*0.001+800*0.01, r.Seconds, 1e-9)
}
