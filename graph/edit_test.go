package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func names(ops []graph.Op) (list []string) {
	for i := range ops {
		list = append(list, ops[i].Name)
	}
	return list
}

func op(name string) graph.Op { return graph.NewOp(graph.Join, name, nil, nil, nil) }

func TestEditor(t *testing.T) {
	ph := graph.Phase{Ops: []graph.Op{op("a"), op("b"), op("c")}, Throttles: []graph.Throttle{{Before: "a", After: "b"}, {Before: "b", After: "c"}}}
	e := graph.NewEditor(&ph)
	x := e.Before(1, op("x"))
	e.Before(1, op("y"))
	z := e.After(0, op("z"))
	end := e.Before(3, op("end"))
	e.Split(1, []graph.Op{op("b.0"), op("b.1")})
	e.Throttle(e.Base[0], x)
	e.Throttle(end, z) // in the opposite direction: dropped
	e.Base[2].Op.Unit = 7
	require.Equal(t, []string{"a", "b", "c"}, names(ph.Ops), "nothing before Commit")
	e.Commit()
	require.Equal(t, []string{"a", "z", "x", "y", "b.0", "b.1", "c", "end"}, names(ph.Ops))
	require.Equal(t, 7, ph.Ops[6].Unit)
	require.Equal(t, []graph.Throttle{{Before: "a", After: "b.0"}, {Before: "b.1", After: "c"}, {Before: "a", After: "x"}}, ph.Throttles)
}

// Sweep removes unused buffers. Views of kept buffers and bases of used views stay, and all
// references are updated.
func TestSweep(t *testing.T) {
	b := graph.NewBuilder()
	b.Block("h", 0)
	x := b.Input("x", 4, 8)
	y := b.Linear("fc", x, b.Param("w", graph.Ones, 8, 8), graph.Value{}, graph.LinearAttr{})
	b.SumLoss("loss", y)
	p, err := b.Program()
	require.NoError(t, err)
	add := func(name string, view *graph.View) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: graph.F32, Shape: []int64{4}, Space: graph.Host, Life: graph.LifeRun, Unit: -1, View: view})
	}
	require.Equal(t, graph.Format(p), graph.Format(graph.Sweep(p)), "nothing to sweep")
	base := add("base", nil)
	p.Buf(add("port", &graph.View{Base: base})).Port = graph.PortPrefix
	add("dead view", &graph.View{Base: add("dead base", nil)})
	before := graph.Format(p)
	q := graph.Sweep(p)
	require.Equal(t, before, graph.Format(p), "the input is left alone")
	require.Len(t, q.Buffers, len(p.Buffers)-2)
	require.Equal(t, "base", q.Buf(q.Buf(q.Port(graph.PortPrefix)).View.Base).Name)
	require.NoError(t, graph.Verify(q))
}
