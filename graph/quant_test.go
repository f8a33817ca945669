package graph_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
	"github.com/spillway-ml/spillway/zero"
)

// quantised returns a program with an update of 512 elements whose moments are in 8 bits.
func quantised(t *testing.T) (p *graph.Program, op *graph.Op) {
	n := graph.NoBuf
	p = &graph.Program{Tokens: n, Targets: n, Positions: n, Hyper: n, Key: n, Loss: n, GradNorm: n, Logits: n}
	p.Mesh = []graph.Axis{{Name: "shard", Size: 1}}
	p.Params = []graph.Param{{Name: "w", Shape: []int64{512}, Value: n, Grad: n}}
	p.Units = []graph.Unit{{Name: "u", Segments: []graph.Segment{{Len: 512}}}}
	buf := func(name string, d graph.DType, n int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{n}, Unit: -1, Life: graph.LifeRun, Class: graph.Inputs})
	}
	rw := func(id graph.BufID) graph.Out { return graph.Out{Buf: id, Mode: graph.ReadWrite} }
	g, value, coef, hyper := buf("g", graph.F32, 512), buf("value", graph.F32, 512), buf("coef", graph.F32, 1), buf("hyper", graph.F64, graph.NumHyper)
	moment := func(name string) (values, scales graph.BufID) {
		values, scales, err := p.AddQuantized(graph.Buffer{Name: name, DType: graph.U8, Shape: []int64{512}, Unit: -1, Life: graph.LifeRun, Class: graph.Optimizer, Pad: 3}, graph.QuantBlock)
		require.NoError(t, err)
		return values, scales
	}
	m, ms := moment("m")
	v, vs := moment("v")
	rule := graph.NewOp("adamw", "adamw", []graph.BufID{g, coef, hyper}, []graph.Out{rw(value), rw(m), rw(v), {Buf: n}, rw(ms), rw(vs)},
		graph.UpdateAttr{Shard: graph.ShardAttr{Unit: 0, Axis: 0, Len: 512}})
	rule.Own = zero.Operation("adamw")
	p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "update", Repeat: 1, Ops: []graph.Op{rule}}}}}
	return p, &p.Sections[0].Phases[0].Ops[0]
}

func find(t *testing.T, p *graph.Program, name string) *graph.Buffer {
	for i := range p.Buffers {
		if p.Buffers[i].Name == name {
			return &p.Buffers[i]
		}
	}
	t.Fatalf("no buffer %q", name)
	return nil
}

// Values and scales are views of one allocation of n + 4·n/256 bytes.
func TestQuantisedBuffers(t *testing.T) {
	p, op := quantised(t)
	require.NoError(t, graph.VerifyStructure(p))
	root := find(t, p, "m")
	require.EqualValues(t, 512+4*2, root.Bytes())
	require.EqualValues(t, 3, root.Pad)
	require.Equal(t, op.Out[4].Buf, p.ScalesOf(op.Out[1].Buf))
	require.Equal(t, graph.NoBuf, p.ScalesOf(op.Out[0].Buf))
	_, _, err := p.AddQuantized(graph.Buffer{Name: "odd", DType: graph.I8, Shape: []int64{300}}, graph.QuantBlock)
	require.ErrorContains(t, err, "300 values of i8 in blocks of 256; want i8 or u8 in whole blocks")
	_, _, err = p.AddQuantized(graph.Buffer{Name: "wide", DType: graph.F32, Shape: []int64{256}}, graph.QuantBlock)
	require.ErrorContains(t, err, "want i8 or u8")

	// The text form keeps the link between values and scales, and Sweep keeps both or neither.
	q, err := progtext.Parse(graph.Format(p), zero.Operations()...)
	require.NoError(t, err)
	require.Equal(t, graph.Format(p), graph.Format(q))
	require.Contains(t, graph.Format(p), "scale-of=m/values block=256")
	swept := graph.Sweep(p)
	require.NoError(t, graph.VerifyStructure(swept))
	require.Equal(t, len(p.Buffers), len(swept.Buffers))
}

// Scales that differ from the values in number, place or name are refused, because an operation
// would silently use the scales of other blocks.
func TestScalesGoWithTheirValues(t *testing.T) {
	for name, c := range map[string]struct {
		change func(p *graph.Program, op *graph.Op)
		want   string
	}{
		"another's scales": {func(_ *graph.Program, op *graph.Op) { op.Out[4], op.Out[5] = op.Out[5], op.Out[4] },
			"operand m_scales (v/scales) is not the scales of m (m/values)"},
		"none":       {func(_ *graph.Program, op *graph.Op) { op.Out = op.Out[:4] }, "operand m_scales is missing, and m (m/values) is u8"},
		"of f32":     {func(p *graph.Program, op *graph.Op) { op.Out[1].Buf = op.In[0]; op.In[0] = op.Out[0].Buf }, ""},
		"ratio":      {func(p *graph.Program, op *graph.Op) { p.Buf(op.Out[4].Buf).Scale.Block = 128 }, "2 scales of the 512 values of m/values, want one for each 128"},
		"of nothing": {func(p *graph.Program, op *graph.Op) { p.Buf(op.Out[4].Buf).Scale.Of = 99 }, "is the scale of buffer 99, want another of the program's"},
		"of floats":  {func(p *graph.Program, op *graph.Op) { p.Buf(op.Out[4].Buf).Scale.Of = op.In[0] }, "want f32 scales of i8 or u8"},
		"twice":      {func(p *graph.Program, op *graph.Op) { p.Buf(op.Out[5].Buf).Scale.Of = op.Out[1].Buf }, "are both the scales of m/values"},
		"elsewhere": {func(p *graph.Program, op *graph.Op) {
			p.Buf(op.Out[4].Buf).Scale.Of, p.Buf(op.Out[5].Buf).Scale.Of = op.Out[2].Buf, op.Out[1].Buf
		}, "want views of one buffer"},
		"overlapping": {func(p *graph.Program, op *graph.Op) { p.Buf(op.Out[4].Buf).View.Offset = 504 }, "overlaps m/values, whose scales it has"},
		"tied, of the first blocks": {func(p *graph.Program, op *graph.Op) {
			values, scales := *p.Buf(op.Out[1].Buf), *p.Buf(op.Out[4].Buf)
			values.Name, values.Shape, values.View = "part", []int64{256}, &graph.View{Base: op.Out[1].Buf, Offset: 256}
			scales.Name, scales.Shape, scales.View = "part/scales", []int64{1}, &graph.View{Base: op.Out[4].Buf}
			scales.Scale.Of = p.AddBuffer(values)
			p.AddBuffer(scales)
		}, "buffer part/scales: is not the part of m/scales that goes with part of m/values"},
		"of a part with the first blocks' scales": {func(p *graph.Program, op *graph.Op) {
			// The second half of the values with the scales of the first.
			a := op.Attr.(graph.UpdateAttr)
			a.Shard.Part, a.Shard.Start, a.Shard.Len = 512, 256, 256
			op.Attr = a
			half := func(id graph.BufID, n, at int64) graph.BufID {
				b := *p.Buf(id)
				b.Shape, b.View, b.Pad, b.Scale = []int64{n}, &graph.View{Base: id, Offset: at * b.DType.Size()}, 0, graph.ScaleOf{}
				b.Name += "/half"
				return p.AddBuffer(b)
			}
			op.In[0] = half(op.In[0], 256, 256)
			for i := range 3 {
				op.Out[i].Buf = half(op.Out[i].Buf, 256, 256)
			}
			op.Out[4].Buf, op.Out[5].Buf = half(op.Out[4].Buf, 1, 0), half(op.Out[5].Buf, 1, 0)
		}, "operand m_scales (m/scales/half) is not the scales of m (m/values/half)"},
	} {
		p, op := quantised(t)
		c.change(p, op)
		err := graph.VerifyStructure(p)
		if c.want == "" {
			require.Error(t, err, name)
			continue
		}
		require.ErrorContains(t, err, c.want, name)
		require.False(t, strings.Contains(err.Error(), "%!"), err)
	}
}
