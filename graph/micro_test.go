package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
)

// twoMicroBatches returns a program whose phase has two micro-batches. Each has its own tokens and
// activation, and both add to one sum.
func twoMicroBatches() *graph.Program {
	n := graph.NoBuf
	p := &graph.Program{Tokens: n, Targets: n, Positions: n, Hyper: n, Key: n, Loss: n, GradNorm: n, Logits: n}
	add := func(name string, d graph.DType, life graph.Life, class graph.Class, micro int) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{4}, Life: life, Class: class, Unit: -1, Micro: micro})
	}
	sum := add("sum", graph.F32, graph.LifeStep, graph.Gradients, 0)
	ph := graph.Phase{Name: "both", Kind: graph.MicroPhase, First: true, Last: true, Repeat: 1}
	for micro, name := range []string{"a", "b"} {
		x := add(name, graph.F32, graph.LifePhase, graph.Activations, micro)
		fill := graph.NewOp(graph.Fill, "fill/"+name, nil, []graph.Out{{Buf: x}}, graph.FillAttr{Value: 1})
		mode := graph.Accum
		if micro == 0 {
			mode = graph.Write
		}
		use := graph.NewOp(graph.Scale, "use/"+name, []graph.BufID{x}, []graph.Out{{Buf: sum, Mode: mode}}, graph.ScaleAttr{Factor: 1})
		fill.Micro, use.Micro = micro, micro
		ph.Ops = append(ph.Ops, fill, use)
	}
	p.Sections = []graph.Section{graph.NewSection(graph.SectionStep, graph.FormWhole, ph)}
	return p
}

// Operations use only buffers of their own micro-batch, or buffers that belong to none, such as
// sums.
func TestMicroBatches(t *testing.T) {
	p := twoMicroBatches()
	require.NoError(t, graph.Verify(p))
	ph := &p.Sections[0].Phases[0]
	require.Equal(t, 2, ph.MicroBatches())
	require.Equal(t, 1, (&graph.Phase{}).MicroBatches())
	_, ok := p.MicroOf(0)
	require.False(t, ok, "a sum is of no micro-batch")
	micro, ok := p.MicroOf(2)
	require.True(t, ok)
	require.Equal(t, 1, micro)

	ph.Ops[3].In[0] = 1
	require.ErrorContains(t, graph.VerifyStructure(p), `step/both/use/b: is of micro-batch 1 and touches a of micro-batch 0`)
	ph.Ops[3].In[0], ph.Ops[3].Micro = 2, 0
	require.ErrorContains(t, graph.VerifyStructure(p), `is of micro-batch 0 and touches b of micro-batch 1`)
	ph.Ops[3].Micro = -1
	require.ErrorContains(t, graph.VerifyStructure(p), "belongs to micro-batch -1, want 0 or more")
}

// Each micro-batch has its own inputs, except those that belong to the step.
func TestMicroBatchesOfInputs(t *testing.T) {
	p := twoMicroBatches()
	buf := func(port graph.Port, d graph.DType, n int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: port.String(), DType: d, Shape: []int64{n}, Life: graph.LifeRun, Class: graph.Inputs, Space: graph.Host, Port: port, Unit: -1, Micro: 1})
	}
	buf(graph.PortHyper, graph.F64, graph.NumHyper)
	require.ErrorContains(t, graph.VerifyStructure(p), "is the port hyper of micro-batch 1; the step has one for all")
	for port, own := range map[graph.Port]bool{graph.PortTokens: true, graph.PortKey: true, graph.PortHyper: false, graph.PortLoss: false, graph.PortStaging: false} {
		_, ok := p.MicroOf(buf(port, graph.I32, 4))
		require.Equal(t, own, ok, port)
		require.Equal(t, own, port.EachMicro())
	}
}

// Workspace belongs to its operation's micro-batch; gathered parameters belong to none.
func TestScratchIsOfAMicroBatch(t *testing.T) {
	p := twoMicroBatches()
	ph := &p.Sections[0].Phases[0]
	add := func(name string, class graph.Class, shape ...int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: graph.F32, Shape: shape, Class: class, Unit: -1})
	}
	w := add("w", graph.Unsharded, 64, 64)
	fill := graph.NewOp(graph.Fill, "fill/w", nil, []graph.Out{{Buf: w}}, graph.FillAttr{})
	ph.Ops = append(ph.Ops, fill)
	for micro := range 2 {
		x, y := add("x", graph.Activations, 64, 64), add("y", graph.Activations, 64, 64)
		p.Buf(x).Micro, p.Buf(y).Micro = micro, micro
		in := graph.NewOp(graph.Fill, "x"+string(rune('0'+micro)), nil, []graph.Out{{Buf: x}}, graph.FillAttr{Value: 1})
		op := graph.NewOp(graph.Linear, "y"+string(rune('0'+micro)), []graph.BufID{x, w}, []graph.Out{{Buf: y}}, graph.LinearAttr{})
		in.Micro, op.Micro = micro, micro
		ph.Ops = append(ph.Ops, in, op)
	}
	q := graph.AddWorkspace(p, graph.CPUTarget())
	require.NoError(t, graph.Verify(q))
	scratch := map[int]bool{}
	for i := range q.Sections[0].Phases[0].Ops {
		if op := &q.Sections[0].Phases[0].Ops[i]; op.Work != graph.NoBuf {
			scratch[q.Buf(op.Work).Micro] = true
			require.Equal(t, op.Micro, q.Buf(op.Work).Micro)
		}
	}
	require.Equal(t, map[int]bool{0: true, 1: true}, scratch)
}

// VerifyStructure requires that sets of scalars have the types that update rules read.
func TestScalars(t *testing.T) {
	p := twoMicroBatches()
	add := func(d graph.DType, n int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: d.String(), DType: d, Shape: []int64{n}, Unit: -1})
	}
	hyper, coef, skip := add(graph.F64, graph.NumHyper), add(graph.F32, 1), add(graph.I32, 1)
	p.Scalars = []graph.Scalars{{Hyper: hyper, Coef: coef, Skip: graph.NoBuf}, {Hyper: hyper, Coef: coef, Skip: skip}}
	require.NoError(t, graph.VerifyStructure(p))
	q, err := progtext.Parse(graph.Format(p))
	require.NoError(t, err)
	require.Equal(t, p.Scalars, q.Scalars)
	c := p.Clone()
	c.Scalars[0].Coef = skip
	require.Equal(t, coef, p.Scalars[0].Coef, "a clone has its own")
	require.ErrorContains(t, graph.VerifyStructure(c), "scalars 0: coef is i32, i32 of 1 elements, want f32 of 1")
	c.Scalars[0].Coef = 99
	require.ErrorContains(t, graph.VerifyStructure(c), "scalars 0: coef is buffer 99")
	c.Scalars[0].Coef = graph.NoBuf
	require.Error(t, graph.VerifyStructure(c))
}
