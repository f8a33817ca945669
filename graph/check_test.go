package graph_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// The slices of a vocabulary must cover it over all ranks, and none may be empty.
func TestSlicesOfAVocabulary(t *testing.T) {
	s := samples(t)[graph.HeadStats][0]
	for _, a := range []graph.SliceAttr{
		{Axis: 0, PerRank: 2, Index: 2, Each: 4, Total: 23}, {Axis: 0, PerRank: 2, Each: 4, Total: 25},
		{Axis: 0, PerRank: 2, Each: 4, Total: 20}, {Axis: -1, PerRank: 2, Each: 4, Total: 23},
	} {
		s.op.Attr = a
		require.ErrorContains(t, graph.Check(s.p, &s.op), "want slices that cover all of them, and none empty")
	}
	embed := graph.Op{Kind: graph.Embed, Name: "embed", Attr: graph.SliceAttr{Axis: 0, PerRank: 2, Each: 4, Total: 23}, In: []graph.BufID{s.op.In[2], s.op.In[1]}, Out: []graph.Out{{Buf: s.op.In[0]}}}
	require.NoError(t, graph.Check(s.p, &embed))
	embed.Attr = graph.SliceAttr{Axis: 0, PerRank: 2, Each: 5, Total: 26}
	require.ErrorContains(t, graph.Check(s.p, &embed), "dimension 0 is 4, want 5 (the elements of a slice)")
	s.op.Attr = graph.SliceAttr{Axis: 1, PerRank: 2, Each: 4, Total: 23}
	require.ErrorContains(t, graph.Check(s.p, &s.op), "a slice along mesh axis 1, want −1 to 0")
}

// Rows can be divided only into equal parts that together make complete samples.
func TestPartsOfRows(t *testing.T) {
	s := samples(t)[graph.Dropout][0]
	n, of := s.p.Buf(s.op.In[0]).Elems(), s.op.Attr.(graph.DropoutAttr)
	for _, c := range []struct {
		part  graph.SliceAttr
		elems int64
		want  string
	}{
		{graph.SliceAttr{Axis: -1, PerRank: 3, Index: 2, Each: n, Total: 3 * n}, 3 * n, ""},
		{graph.SliceAttr{Axis: -1, PerRank: 3, Index: 2, Each: n, Total: 3*n - 1}, 1, "want a part of"},
		{graph.SliceAttr{Axis: -1, PerRank: 3, Index: 2, Each: n + 1, Total: 3*n + 3}, 1, "want a part of"},
		{graph.SliceAttr{Axis: -1, PerRank: 3, Index: 3, Each: n, Total: 3 * n}, 1, "want slices that cover all"},
		{graph.SliceAttr{Axis: -1, PerRank: 3, Index: 2, Each: n, Total: 3 * n}, 2 * n, "of the whole"},
	} {
		of.Part, of.Elems = c.part, c.elems
		s.op.Attr = of
		if err := graph.Check(s.p, &s.op); c.want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.want)
		}
	}
}

// free lists dimensions that an operation alone does not determine.
var free = map[string]bool{
	"embed table 0": true, "embed_grad dtable 0": true, // vocabulary
	"add_pos pos 0": true, "add_pos_grad dpos 0": true, // positions, from Seq up
	"cross_entropy logits 1": true, "head_loss w 0": true, // vocabulary
	"bias_grad dy 0": true, "select_row x 0": true, // rows
	"sum x *":       true, // any shape
	"sum_grad dx *": true, "fill dst *": true,
	"all_reduce buf *": true, "send x *": true, "recv x *": true, "clip_coef acc *": true, "sqsum acc *": true, "overflow_check acc *": true, // a limb more is another accumulator
}

func TestCheckNamesEveryWrongDimension(t *testing.T) {
	all := samples(t)
	kinds := graph.Kinds()
	for _, own := range zero.Operations() {
		kinds = append(kinds, own.Kind())
	}
	for _, k := range kinds {
		require.NotEmpty(t, all[k], "no sample of %s", k)
		for _, s := range all[k] {
			require.NoError(t, graph.Check(s.p, &s.op))
			info, _ := s.op.Info()
			ins, outs := info.Operands(s.op.Attr)
			for i, id := range s.op.In {
				mutate(t, s, id, ins[i].Name, func(op *graph.Op, id graph.BufID) { op.In[i] = id })
			}
			for i, o := range s.op.Out {
				if o.Mode == graph.ReadWrite && slices.Contains(s.op.In, o.Buf) {
					continue
				}
				mutate(t, s, o.Buf, outs[i].Name, func(op *graph.Op, id graph.BufID) { op.Out[i].Buf = id })
			}
		}
	}
}

// mutate checks that op is refused with one operand of another shape or type, or without it.
func mutate(t *testing.T, s sample, id graph.BufID, operand string, set func(op *graph.Op, id graph.BufID)) {
	if id == graph.NoBuf || slices.Contains(s.op.In, id) && slices.ContainsFunc(s.op.Out, func(o graph.Out) bool { return o.Buf == id }) {
		return
	}
	check := func(b graph.Buffer) error {
		p := s.p.Clone()
		b.Name = "changed"
		op := graph.CloneOps([]graph.Op{s.op})[0]
		set(&op, p.AddBuffer(b))
		return graph.Check(p, &op)
	}
	buf := *s.p.Buf(id)
	buf.View = nil
	what := fmt.Sprintf("%s %s", s.op.Kind, operand)
	require.NoError(t, check(buf), what)
	for d := range buf.Shape {
		b := buf
		b.Shape = slices.Clone(buf.Shape)
		b.Shape[d]++
		err := check(b)
		if free[fmt.Sprintf("%s %d", what, d)] || free[what+" *"] {
			require.NoError(t, err, "%s %d", what, d)
			continue
		}
		if a, ok := s.op.Attr.(graph.ConvAttr); ok && a.Stride > 1 && len(b.Shape) == 4 && (d == 1 || d == 2) && err == nil {
			continue // the stride skips the new row
		}
		require.Error(t, err, "%s: dimension %d is %d", what, d, b.Shape[d])
		require.ErrorContains(t, err, s.op.Name+" ("+string(s.op.Kind)+"): ")
		require.Regexp(t, `operand \w+ \(.*\).*(is \d+, want \d+|is not a multiple of|number of elements|does not fit)`, err.Error())
		b.Shape[d] = 0
		require.ErrorContains(t, check(b), fmt.Sprintf("operand %s (changed): dimension %d is 0", operand, d))
	}
	if k := s.op.Kind; k != graph.Copy && k != graph.Fill && k != graph.Send && k != graph.Recv && operand != "q" {
		b := buf
		b.DType = graph.U8
		switch {
		case k == "adamw" && (operand == "m" || operand == "v"): // with its scales
			require.ErrorContains(t, check(b), "operand "+operand+"_scales ")
		case k != graph.AllGather && k != graph.AllToAll:
			require.ErrorContains(t, check(b), fmt.Sprintf("operand %s (changed) is u8, want ", operand), what)
		default:
			require.Error(t, check(b))
		}
	}
	op := graph.CloneOps([]graph.Op{s.op})[0]
	set(&op, graph.BufID(len(s.p.Buffers)))
	require.ErrorContains(t, graph.Check(s.p, &op), "the program has no buffer", what)
	set(&op, graph.NoBuf)
	info, _ := op.Info()
	ins, outs := info.Operands(op.Attr)
	sig := append(slices.Clone(ins), outs...)
	if i := slices.IndexFunc(sig, func(o graph.Operand) bool { return o.Name == operand }); !sig[i].Optional {
		require.ErrorContains(t, graph.Check(s.p, &op), "operand "+operand+" is missing", what)
	} else if op.Kind == graph.Linear {
		require.NoError(t, graph.Check(s.p, &op))
	}
}

func TestCheckRefuses(t *testing.T) {
	p := build(t, func(b *graph.Builder) {
		b.SumLoss("loss", b.Add("y", param(b, "a", 2, 2), param(b, "b", 2, 2)))
	})
	add := p.Sections[0].Phases[0].Ops[0]
	for want, change := range map[string]func(op *graph.Op){
		`unknown kind "plus"`:                                    func(op *graph.Op) { op.Kind = "plus" },
		"attribute is graph.PosAttr, want <nil>":                 func(op *graph.Op) { op.Attr = graph.PosAttr{} },
		"has 3 inputs, want at most 2":                           func(op *graph.Op) { op.In = append(op.In, op.In[0]) },
		"has 2 outputs, want at most 1":                          func(op *graph.Op) { op.Out = append(op.Out, op.Out[0]) },
		"output y (y) has mode rw, want one of [write accum]":    func(op *graph.Op) { op.Out[0].Mode = graph.ReadWrite },
		"output y (a) is in place of a in mode write, want rw":   func(op *graph.Op) { op.Out[0].Buf = op.In[0] },
		"output y (b) overlaps input b (b), which the kind does": func(op *graph.Op) { op.Out[0] = graph.Out{Buf: op.In[1], Mode: graph.ReadWrite} },
	} {
		op := graph.CloneOps([]graph.Op{add})[0]
		change(&op)
		require.ErrorContains(t, graph.Check(p, &op), want)
	}
	op := graph.CloneOps([]graph.Op{add})[0]
	op.Out[0] = graph.Out{Buf: op.In[0], Mode: graph.ReadWrite}
	require.NoError(t, graph.Check(p, &op))

	// A view of an input's memory overlaps the input.
	op.Out[0].Buf = p.AddBuffer(graph.Buffer{Name: "view", Shape: []int64{2, 2}, View: &graph.View{Base: op.In[1]}})
	require.ErrorContains(t, graph.Check(p, &op), "output y (view) overlaps input b (b)")
}

// A rank's shard may be a view of the buffer into which it is gathered.
func TestCollectiveOverItsOwnShard(t *testing.T) {
	p := &graph.Program{Mesh: []graph.Axis{{Name: "shard", Size: 2}}}
	full := p.AddBuffer(graph.Buffer{Name: "full", Shape: []int64{8}})
	part := p.AddBuffer(graph.Buffer{Name: "part", Shape: []int64{4}, View: &graph.View{Base: full, RankStride: 16}})
	op := graph.Op{Kind: graph.AllGather, Name: "ag", Attr: graph.GroupAttr{}, In: []graph.BufID{part}, Out: []graph.Out{{Buf: full}}}
	require.NoError(t, graph.Check(p, &op))
	op.Attr = graph.GroupAttr{Axis: 1}
	require.ErrorContains(t, graph.Check(p, &op), "mesh axis is 1, want −1 (all ranks) to 0")
}
