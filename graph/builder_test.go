package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func TestBuilderErrorsStickAndNameTheOperation(t *testing.T) {
	for want, f := range map[string]func(b *graph.Builder){
		`graph: fc (linear): operand w (w, shape [3 4]): dimension 0 is 3, want 5 (the width of x)`: func(b *graph.Builder) {
			b.Linear("fc", b.Input("x", 2, 5), param(b, "w", 3, 4), graph.Value{}, graph.LinearAttr{})
		},
		`graph: fc (linear): operand w (w, shape [4 3]): dimension 1 is 3, want 5 (the width of x)`: func(b *graph.Builder) {
			b.Linear("fc", b.Input("x", 2, 5), param(b, "w", 4, 3), graph.Value{}, graph.LinearAttr{TransW: true})
		},
		`graph: fc (linear): operand w (w, shape [4]): has 1 dimensions, want 2`: func(b *graph.Builder) {
			b.Linear("fc", b.Input("x", 2, 5), param(b, "w", 4), graph.Value{}, graph.LinearAttr{TransW: true})
		},
		`graph: fc (linear): operand bias (bias, shape [3]): dimension 0 is 3, want 4 (a bias per column of y)`: func(b *graph.Builder) {
			b.Linear("fc", b.Input("x", 2, 5), param(b, "w", 5, 4), param(b, "bias", 3), graph.LinearAttr{})
		},
		`graph: fc: operand w is missing`: func(b *graph.Builder) {
			b.Linear("fc", b.Input("x", 2, 5), graph.Value{}, graph.Value{}, graph.LinearAttr{})
		},
		`graph: fc: a linear is built without activation`: func(b *graph.Builder) {
			b.Linear("fc", b.Input("x", 2, 5), param(b, "w", 5, 5), graph.Value{}, graph.LinearAttr{Act: graph.ActGELU})
		},
		`graph: y (attention): Heads 3 is not a multiple of KVHeads 2`: func(b *graph.Builder) {
			b.AttentionPacked("y", b.Input("x", 2, 14), graph.AttentionAttr{Batch: 1, Seq: 2, Heads: 3, KVHeads: 2, HeadDim: 2, Scale: 1})
		},
		`graph: y: Heads is 0 and HeadDim 2, want 1 to`: func(b *graph.Builder) {
			b.AttentionPacked("y", b.Input("x", 2, 14), graph.AttentionAttr{Batch: 1, Seq: 2, HeadDim: 2, Scale: 1})
		},
		`graph: y (rope): HeadDim is 3, want an even number`: func(b *graph.Builder) {
			b.Rope("y", b.Input("x", 2, 6), graph.RopeAttr{Heads: 2, HeadDim: 3, Seq: 2, Theta: 1})
		},
		`graph: y (rope): operand x (x, shape [3 8]): the number of rows 3 is not a multiple of Seq 2`: func(b *graph.Builder) {
			b.Rope("y", b.Input("x", 3, 8), graph.RopeAttr{Heads: 2, HeadDim: 4, Seq: 2, Theta: 1})
		},
		`graph: y (add_pos): operand pos (pos, shape [3 4]): dimension 0 is 3, want at least 4 (Seq)`: func(b *graph.Builder) {
			b.AddPos("y", b.Input("x", 8, 4), param(b, "pos", 3, 4), 4)
		},
		`graph: y (dropout): P is 1, want a probability in [0, 1)`: func(b *graph.Builder) { b.Dropout("y", b.Input("x", 8, 4), 1, 2) },
		`graph: y: 32 elements are not a multiple of a batch of 3 samples`: func(b *graph.Builder) {
			b.Dropout("y", b.Input("x", 8, 4), 0.5, 3)
		},
		`graph: y (act): activation is "tanh", want gelu_tanh, gelu, silu or relu`: func(b *graph.Builder) { b.Activation("y", b.Input("x", 8, 4), "tanh") },
		`graph: y (layernorm): Eps is -1, want a number in [0, 1)`: func(b *graph.Builder) {
			b.LayerNorm("y", b.Input("x", 8, 4), param(b, "g", 4), param(b, "b", 4), -1)
		},
		`graph: y: a window of (5, 5), stride 1, padding 0 does not fit an image of (4, 4)`: func(b *graph.Builder) {
			b.MaxPool("y", b.Input("x", 1, 4, 4, 1), graph.ConvAttr{KH: 5, KW: 5, Stride: 1})
		},
		`graph: y: operand x has shape [4 4], want 4 dimensions (B,H,W,C)`: func(b *graph.Builder) {
			b.Im2Col("y", b.Input("x", 4, 4), graph.ConvAttr{KH: 2, KW: 2, Stride: 1})
		},
		`graph: y: shape [3 3] has 9 elements, want the 8 of x [2 4]`:                       func(b *graph.Builder) { b.Reshape("y", b.Input("x", 2, 4), 3, 3) },
		`graph: x: shape [2 0]: dimension 1 is 0, want at least 1`:                          func(b *graph.Builder) { b.Input("x", 2, 0) },
		`graph: x: shape [1099511627776 1099511627776]: dimension 1 is 1099511627776, want`: func(b *graph.Builder) { b.Input("x", 1<<40, 1<<40) },
		`graph: "x": a buffer needs a name that no other has`:                               func(b *graph.Builder) { b.Input("x", 2); b.Input("x", 2) },
		`graph: scale "y": an operation needs a name that no other has`: func(b *graph.Builder) {
			x := b.Input("x", 2)
			b.Scale("y", x, 2)
			b.Scale("y", x, 2)
		},
		`graph: tokens: shape is [2 3], and [2 2] before`: func(b *graph.Builder) { b.Tokens(2, 2); b.Tokens(2, 3) },
		`graph: loss (head_loss): operand targets (targets, shape [2 2]): number of elements is 4, want 6 (a target per row of x)`: func(b *graph.Builder) {
			b.HeadLoss("loss", b.Input("x", 6, 4), param(b, "w", 5, 4), b.Targets(2, 2))
		},
		`graph: z: operand x (y) was overwritten in place by r`: func(b *graph.Builder) {
			y := b.Scale("y", b.Input("x", 2), 2)
			b.Scale("r", y, 3, graph.InPlace)
			b.Activation("z", y, graph.ActReLU)
		},
		`graph: y: cannot be in place of x, which is inputs`:     func(b *graph.Builder) { b.Scale("y", b.Input("x", 2), 2, graph.InPlace) },
		`graph: y: cannot be in place of p, which is parameters`: func(b *graph.Builder) { b.Scale("y", param(b, "p", 2), 2, graph.InPlace) },
	} {
		b := graph.NewBuilder()
		b.Unit("u")
		f(b)
		b.Scale("after", param(b, "after.p", 2), 2)
		_, err := b.Program()
		require.Error(t, err)
		require.Equal(t, err, b.Err())
		require.ErrorContains(t, err, want)
	}

	b := graph.NewBuilder()
	b.Param("w", graph.Ones, 2)
	_, err := b.Program()
	require.ErrorContains(t, err, "parameter w: belongs to no unit")
}

func TestBuilderProgram(t *testing.T) {
	b := graph.NewBuilder()
	b.Unit("embed")
	table := b.Param("table", graph.Normal(0.5), 7, 4)
	x := b.Embed("e", b.Tokens(2, 3), table)
	b.Unit("h")
	x = b.LayerNorm("ln", x, b.Param("g", graph.Ones, 4), b.Param("b", graph.Zeros, 4), 1e-5)
	x = b.Dropout("drop", x, 0.5, 2, graph.InPlace)
	b.Unit("embed") // a unit may be returned to
	b.HeadLoss("loss", x, table, b.Targets(2, 3))
	p, err := b.Program()
	require.NoError(t, err)

	require.Equal(t, []string{"embed", "h"}, []string{p.Units[0].Name, p.Units[1].Name})
	require.Len(t, p.Units, 2)
	require.Equal(t, graph.Param{Name: "table", Shape: []int64{7, 4}, Init: graph.InitNormal, Std: 0.5, Unit: 0, Decay: true, Value: table.Buf(), Grad: graph.NoBuf}, p.Params[0])
	require.False(t, p.Params[1].Decay, "vectors do not decay")
	require.EqualValues(t, 28+4+4, p.ParamElems())
	lines(t, `
		e: embed(tokens, table) → e
		ln: layernorm(e, g, b) → ln, ln.mean, ln.rstd
		drop: dropout(ln, key) → ~ln
		loss: head_loss(ln, table, targets) → +=loss
	`, dump(p))
	require.Equal(t, "forward", p.Sections[0].Name)
	require.Equal(t, "micro", p.Sections[0].Phases[0].Name)
	require.Equal(t, 1, p.Sections[0].Phases[0].Repeat)
	units := []int{0, 1, 1, 0}
	for i, op := range p.Sections[0].Phases[0].Ops {
		require.Equal(t, graph.Compute, op.Stream)
		require.Equal(t, graph.Forward, op.Pass)
		require.Equal(t, graph.NoBuf, op.Work)
		require.Equal(t, graph.NoBuf, op.Skip)
		require.Equal(t, units[i], op.Unit, op.Name)
	}
	for name, want := range map[string]graph.Buffer{
		"table":   {DType: graph.F32, Shape: []int64{7, 4}, Class: graph.Parameters, Life: graph.LifeRun, Unit: 0},
		"e":       {DType: graph.F32, Shape: []int64{6, 4}, Class: graph.Activations, Life: graph.LifePhase, Unit: 0},
		"ln.mean": {DType: graph.F32, Shape: []int64{6}, Class: graph.Activations, Life: graph.LifePhase, Unit: 1},
		"tokens":  {DType: graph.I32, Shape: []int64{2, 3}, Class: graph.Inputs, Life: graph.LifeStep, Unit: -1},
		"targets": {DType: graph.I32, Shape: []int64{2, 3}, Class: graph.Inputs, Life: graph.LifeStep, Unit: -1},
		"key":     {DType: graph.I64, Shape: []int64{graph.NumKey}, Class: graph.Inputs, Life: graph.LifeStep, Unit: -1},
		"loss":    {DType: graph.F64, Shape: []int64{1}, Class: graph.Activations, Life: graph.LifeStep, Unit: -1},
	} {
		want.Name = name
		require.Equal(t, want, *normal(p.Buf(p.Find(name))))
	}
	require.Equal(t, p.Find("tokens"), p.Tokens)
	require.Equal(t, p.Find("loss"), p.Loss)
	require.Equal(t, graph.NoBuf, p.Hyper)

	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	require.Equal(t, graph.NoBuf, p.Params[0].Grad, "the input is left alone")
	require.Len(t, p.Sections[0].Phases[0].Ops, 4)
	require.Equal(t, graph.Buffer{Name: "table.grad", DType: graph.F32, Shape: []int64{7, 4}, Class: graph.Gradients, Life: graph.LifeStep, Unit: 0},
		*normal(q.Buf(q.Params[0].Grad)))
	require.Equal(t, graph.Buffer{Name: "hyper", DType: graph.F64, Shape: []int64{graph.NumHyper}, Class: graph.Inputs, Life: graph.LifeStep, Unit: -1}, *normal(q.Buf(q.Hyper)))
	for _, op := range q.Sections[0].Phases[0].Ops[4:] {
		require.Equal(t, graph.Backward, op.Pass)
		require.NotEmpty(t, op.Source)
		require.GreaterOrEqual(t, op.Unit, 0)
	}
}

// normal replaces empty slices by nil, because Clone makes empty slices of nil ones.
func normal(b *graph.Buffer) *graph.Buffer {
	c := *b
	if len(c.Global) == 0 {
		c.Global = nil
	}
	if len(c.Place) == 0 {
		c.Place = nil
	}
	return &c
}

// Each dropout of a program has a different site.
func TestDropoutSites(t *testing.T) {
	p := build(t, func(b *graph.Builder) {
		x := b.Dropout("one", b.Input("x", 4, 6), 0.5, 2)
		b.Dropout("two", x, 0.25, 2)
	})
	ops := p.Sections[0].Phases[0].Ops
	require.Equal(t, graph.DropoutAttr{P: 0.5, Site: 1, Elems: 12}, ops[0].Attr)
	require.Equal(t, graph.DropoutAttr{P: 0.25, Site: 2, Elems: 12}, ops[1].Attr)
}
