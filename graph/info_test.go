package graph_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// declaredKinds reads the Kind constants of kinds.go.
func declaredKinds(t *testing.T) []graph.Kind {
	f, err := parser.ParseFile(token.NewFileSet(), "kinds.go", nil, 0)
	require.NoError(t, err)
	var kinds []graph.Kind
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			if id, ok := v.Type.(*ast.Ident); ok && id.Name == "Kind" {
				name, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
				require.NoError(t, err)
				kinds = append(kinds, graph.Kind(name))
			}
		}
	}
	slices.Sort(kinds)
	return kinds
}

func TestKindTableIsComplete(t *testing.T) {
	require.Equal(t, declaredKinds(t), graph.Kinds())
	for _, k := range graph.Kinds() {
		info, ok := graph.InfoOf(k)
		require.True(t, ok)
		require.Equal(t, k, info.Kind)
		require.NotEmpty(t, info.Doc, k)
		require.Equal(t, info.Differentiable(), info.Derivative != "", "%s: derivative documented", k)
		if !info.Differentiable() {
			require.Empty(t, info.Saves, k)
		}
		ops := append(slices.Clone(info.In), info.Out...)
		if info.Attr != nil {
			// Attention's packed form has operands of its own.
			ins, outs := info.Operands(graph.AttentionAttr{Packed: true})
			ops = append(append(ops, ins...), outs...)
		}
		names := map[string]bool{}
		for _, o := range ops {
			require.NotEmpty(t, o.Name, k)
			require.NotEmpty(t, o.Shape, "%s %s", k, o.Name)
			names[o.Name] = true
		}
		for _, s := range info.Saves {
			require.True(t, names[s], "%s saves %q, which is no operand", k, s)
		}
		for _, o := range info.Out {
			require.NotEmpty(t, o.Modes, "%s %s", k, o.Name)
			require.True(t, o.Over == "" || names[o.Over], "%s %s", k, o.Name)
		}
	}
}

// sample is a valid operation.
type sample struct {
	p  *graph.Program
	op graph.Op
}

// samples has at least one valid operation of each kind: those of the gradient
// checks, and hand-made ones of the kinds that rewrites add.
func samples(t *testing.T) map[graph.Kind][]sample {
	all := map[graph.Kind][]sample{}
	for _, c := range gradchecks {
		fwd := build(t, c.f)
		q, err := graph.Differentiate(fwd)
		require.NoError(t, err)
		for _, p := range []*graph.Program{fwd, q} {
			for _, op := range p.Sections[0].Phases[0].Ops {
				all[op.Kind] = append(all[op.Kind], sample{p, op})
			}
		}
	}
	p := build(t, func(b *graph.Builder) { b.SelectRow("row", param(b, "a", 4, 2)) })
	all[graph.SelectRow] = []sample{{p, p.Sections[0].Phases[0].Ops[0]}}
	p = build(t, func(b *graph.Builder) {
		a := graph.AttentionAttr{Batch: 1, Seq: 2, Heads: 6, KVHeads: 3, HeadDim: 4, Scale: 0.5, Causal: true}
		q, k, v := b.Input("q", 2, 24), b.Input("k", 2, 12), b.Input("v", 2, 12)
		b.AttentionCached("separate", q, k, v, b.Positions(1, 2), b.Cache("keys", 3, 7, 12), b.Cache("values", 3, 7, 12), a)
		b.AttentionCached("packed", b.Input("qkv", 2, 48), graph.Value{}, graph.Value{}, b.Positions(1, 2), b.Cache("keys2", 1, 2, 12), b.Cache("values2", 1, 2, 12), a)
		b.RopeAt("turn", b.Input("x", 2, 24), b.Positions(1, 2), graph.RopeAttr{Heads: 6, HeadDim: 4, Theta: 10000})
	})
	for _, op := range p.Sections[0].Phases[0].Ops {
		all[op.Kind] = append(all[op.Kind], sample{p, op})
	}

	p = &graph.Program{
		Mesh:   []graph.Axis{{Name: "shard", Size: 3}},
		Params: []graph.Param{{Name: "a", Shape: []int64{300}}, {Name: "b", Shape: []int64{100}}},
		Units:  []graph.Unit{{Name: "u", FlatLen: 768, Segments: []graph.Segment{{Param: 0, Len: 300}, {Param: 1, Len: 100, Flat: 512}}}},
	}
	buf := func(name string, dt graph.DType, shape ...int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: dt, Shape: shape, Unit: -1})
	}
	const limbs = 5
	whole, part := buf("whole", graph.F32, 768), buf("part", graph.F32, 256)
	moment, second := buf("m", graph.F32, 256), buf("v", graph.F32, 256)
	coef, norm := buf("coef", graph.F32, 1), buf("norm", graph.F64, 1)
	hyper := buf("hyper", graph.F64, graph.NumHyper)
	acc, norms := buf("acc", graph.I64, limbs), buf("norms", graph.I64, 2*2*limbs)
	each := buf("each", graph.F32, 2)
	value := buf("value", graph.F32, 256)
	shard := graph.ShardAttr{Unit: 0, Axis: 0, Len: 256}
	update := graph.UpdateAttr{Shard: shard}
	add := func(kind graph.Kind, attr any, in []graph.BufID, out ...graph.Out) {
		all[kind] = append(all[kind], sample{p, graph.Op{Kind: kind, Own: zero.Operation(kind), Name: "op", Attr: attr, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf}})
	}
	ids := func(ids ...graph.BufID) []graph.BufID { return ids }
	rw := func(id graph.BufID) graph.Out { return graph.Out{Buf: id, Mode: graph.ReadWrite} }
	add(graph.AllGather, graph.GroupAttr{Axis: 0}, ids(part), graph.Out{Buf: whole})
	add(graph.ReduceScatter, graph.GroupAttr{Axis: -1}, ids(whole), graph.Out{Buf: part, Mode: graph.Accum})
	add(graph.AllReduce, graph.GroupAttr{Axis: 0}, nil, rw(whole))
	add(graph.Send, graph.PeerAttr{From: 0, To: 1}, ids(whole))
	add(graph.Recv, graph.PeerAttr{From: 1, To: 0}, nil, graph.Out{Buf: whole})
	add(graph.AllToAll, graph.GroupAttr{Axis: 0}, ids(whole), graph.Out{Buf: buf("recv", graph.F32, 768)})
	add(graph.Join, nil, nil)
	add(graph.LinearAct, graph.LinearAttr{Act: graph.ActGELUTanh}, ids(buf("x", graph.F32, 3, 5), buf("w", graph.F32, 5, 4), buf("bias", graph.F32, 4)),
		graph.Out{Buf: buf("y", graph.F32, 3, 4)}, graph.Out{Buf: buf("pre", graph.F32, 3, 4)})
	add(graph.LinearGradAct, graph.LinearAttr{Act: graph.ActSiLU}, ids(buf("dy", graph.F32, 3, 5), buf("w", graph.F32, 4, 5), buf("pre", graph.F32, 3, 4)),
		graph.Out{Buf: buf("dpre", graph.F32, 3, 4)})
	add(graph.LinearGradWB, graph.LinearAttr{}, ids(buf("x", graph.F32, 3, 4), buf("dy", graph.F32, 3, 5)),
		graph.Out{Buf: buf("dw", graph.F32, 4, 5)}, graph.Out{Buf: buf("db", graph.F32, 5), Mode: graph.Accum})
	add(graph.Copy, nil, ids(part), graph.Out{Buf: moment})
	add(graph.SqSum, shard, ids(part), graph.Out{Buf: acc, Mode: graph.Accum})
	add(graph.ClipCoef, graph.ClipAttr{Max: 1}, ids(acc, hyper), graph.Out{Buf: coef}, graph.Out{Buf: norm})
	flag, scale := buf("flag", graph.I32, 1), buf("scale", graph.F64, graph.NumScale)
	add(graph.Cast, nil, ids(part), graph.Out{Buf: buf("half", graph.BF16, 256)})
	add(graph.SumParts, graph.SumPartsAttr{Order: graph.SumSequential}, ids(whole), graph.Out{Buf: part, Mode: graph.Accum})
	add(graph.OverflowCheck, nil, ids(acc), graph.Out{Buf: flag})
	add(graph.LossScaleUpdate, graph.DefaultLossScale, ids(flag), rw(scale))
	add("adamw", update, ids(part, coef, hyper), rw(value), rw(moment), rw(second), graph.Out{Buf: buf("low", graph.BF16, 256)})
	add("adamw", update, ids(part, coef, hyper), rw(value), rw(moment), rw(second))
	add("sgd", update, ids(part, coef, hyper), rw(value), rw(moment))
	add("adagrad", update, ids(part, coef, hyper), rw(value), rw(moment))
	add("lamb_dir", update, ids(value, coef, hyper), rw(part), rw(moment), rw(second), graph.Out{Buf: norms, Mode: graph.Accum})
	add(graph.ParamNorms, update, ids(value, part), graph.Out{Buf: norms, Mode: graph.Accum})
	add(graph.NewtonSchulz, graph.NewtonSchulzAttr{Axis: -1, Ranks: 1, Factor: 0.5}, ids(buf("x", graph.F32, 3, 5)), graph.Out{Buf: buf("y", graph.F32, 3, 5)})
	add("muon_momentum", update, ids(part, coef, hyper), rw(moment), graph.Out{Buf: buf("d", graph.F32, 256)})
	add("muon_apply", update, ids(part, hyper), rw(value), graph.Out{Buf: buf("low", graph.BF16, 256)})
	add("lamb_apply", update, ids(part, norms, coef, hyper), rw(value))
	add("lars_apply", update, ids(part, norms, coef, hyper), rw(value), rw(moment))
	quant := graph.QuantAttr{Block: graph.QuantBlock, Parts: 1, Shard: shard}
	add(graph.Quantize, quant, ids(part), graph.Out{Buf: buf("q", graph.U8, quant.Bytes(256))})
	rows := graph.QuantAttr{Block: 64, Parts: 1}
	add(graph.Dequantize, rows, ids(buf("rows", graph.U8, rows.Bytes(256))), graph.Out{Buf: buf("x", graph.BF16, 4, 64)})
	parts := graph.QuantAttr{Block: graph.QuantBlock, Parts: 3, Order: graph.SumSequential}
	add(graph.DequantizeSum, parts, ids(buf("parts", graph.U8, parts.Bytes(256))), graph.Out{Buf: part, Mode: graph.Accum})
	add("novograd", update, ids(part, norms, coef, hyper), rw(value), rw(moment), rw(each))
	vocabulary := graph.SliceAttr{Axis: 0, PerRank: 2, Index: 1, Each: 4, Total: 23}
	x, w, targets, lse := buf("x", graph.F32, 7, 5), buf("w", graph.F32, 4, 5), buf("targets", graph.I32, 7), buf("lse", graph.F32, 7)
	add(graph.HeadStats, vocabulary, ids(x, w, targets), graph.Out{Buf: buf("stats", graph.F32, 7, graph.HeadStatistics)})
	add(graph.HeadLSE, vocabulary, ids(buf("all", graph.F32, 6*7, graph.HeadStatistics), targets), graph.Out{Buf: buf("loss", graph.F64, 1), Mode: graph.Accum}, graph.Out{Buf: lse})
	add(graph.HeadSliceGrad, vocabulary, ids(x, w, targets, lse, hyper), graph.Out{Buf: buf("dx", graph.F32, 7, 5)}, graph.Out{Buf: buf("dw", graph.F32, 4, 5)})
	return all
}

// A vocabulary's slices cover it, over all ranks, and none is empty.
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

// A part of the rows is one of equal parts, which have whole samples together.
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

// free are dimensions that an operation alone does not determine.
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

// mutate checks op with one operand of another shape, type or absent.
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

	// A view of the input's memory is the input's memory.
	op.Out[0].Buf = p.AddBuffer(graph.Buffer{Name: "view", Shape: []int64{2, 2}, View: &graph.View{Base: op.In[1]}})
	require.ErrorContains(t, graph.Check(p, &op), "output y (view) overlaps input b (b)")
}

// A rank's shard may be a view of the whole that is gathered.
func TestCollectiveOverItsOwnShard(t *testing.T) {
	p := &graph.Program{Mesh: []graph.Axis{{Name: "shard", Size: 2}}}
	full := p.AddBuffer(graph.Buffer{Name: "full", Shape: []int64{8}})
	part := p.AddBuffer(graph.Buffer{Name: "part", Shape: []int64{4}, View: &graph.View{Base: full, RankStride: 16}})
	op := graph.Op{Kind: graph.AllGather, Name: "ag", Attr: graph.GroupAttr{}, In: []graph.BufID{part}, Out: []graph.Out{{Buf: full}}}
	require.NoError(t, graph.Check(p, &op))
	op.Attr = graph.GroupAttr{Axis: 1}
	require.ErrorContains(t, graph.Check(p, &op), "mesh axis is 1, want −1 (all ranks) to 0")
}

func TestCost(t *testing.T) {
	const b, s, c, f, v = 2, 8, 16, 64, 50
	p := build(t, func(bl *graph.Builder) {
		x := bl.Embed("embed", bl.Tokens(b, s), param(bl, "table", v, c))
		x = bl.AttentionPacked("attn", bl.Linear("qkv", x, param(bl, "w", c, 3*c), param(bl, "bias", 3*c), graph.LinearAttr{}),
			graph.AttentionAttr{Batch: b, Seq: s, Heads: 2, KVHeads: 2, HeadDim: c / 2, Scale: 1, Causal: true})
		x = bl.Linear("up", x, param(bl, "w2", f, c), graph.Value{}, graph.LinearAttr{TransW: true})
		bl.HeadLoss("loss", x, param(bl, "head", v, f), bl.Targets(b, s))
	})
	p, err := graph.Differentiate(p)
	require.NoError(t, err)
	cost := map[string][2]int64{}
	for _, op := range p.Sections[0].Phases[0].Ops {
		fl, by := graph.Cost(p, &op)
		cost[op.Name] = [2]int64{fl, by}
	}
	const n = b * s
	require.Equal(t, [2]int64{0, n*4 + 2*n*c*4}, cost["embed"], "rows of the table, not all of it")
	require.Equal(t, [2]int64{2*n*c*3*c + n*3*c, 4 * (n*c + c*3*c + 3*c + n*3*c)}, cost["qkv"])
	require.Equal(t, [2]int64{2 * n * c * f, 4 * (n*c + c*f + n*f)}, cost["up"])
	require.Equal(t, int64(2*n*c*f), cost["up/dw"][0])
	require.Equal(t, int64(2*n*c*f), cost["up/dx"][0])
	pairs := int64(b * 2 * s * (s + 1) / 2)
	require.Equal(t, pairs*(2*2*c/2+8), cost["attn"][0], "two products and an exponential for each visible pair")
	require.Equal(t, pairs*(5*2*c/2+8), cost["attn/dx"][0])
	require.Equal(t, int64(n*v*(3*2*f+10)), cost["loss"][0], "logits and two gradients")

	for k, list := range samples(t) {
		for _, s := range list {
			fl, by := graph.Cost(s.p, &s.op)
			require.GreaterOrEqual(t, fl, int64(0), k)
			if k != graph.Join {
				require.Positive(t, by, k)
			}
		}
	}
}

// What the table says is saved is what derivatives read, all of it and no more
// (Differentiate refuses more).
func TestSavesIsWhatDerivativesRead(t *testing.T) {
	reads := map[graph.Kind]map[string]bool{}
	for _, c := range gradchecks {
		q, err := graph.Differentiate(build(t, c.f))
		require.NoError(t, err)
		ops := q.Sections[0].Phases[0].Ops
		reused := map[graph.BufID]bool{} // logits that their gradient overwrote: a gradient from then on
		for _, op := range ops {
			if op.Kind == graph.CrossEntropyGrad && op.Out[0].Mode == graph.ReadWrite {
				reused[op.Out[0].Buf] = true
			}
		}
		for _, fwd := range ops {
			if fwd.Pass != graph.Forward || len(fwd.In) > 1 && fwd.In[0] == fwd.In[1] || len(fwd.In) > 2 && fwd.In[1] == fwd.In[2] {
				continue // of one buffer under two names it is open which one was read
			}
			if len(fwd.In) > 0 && len(fwd.Out) > 0 && fwd.In[0] == fwd.Out[0].Buf {
				continue // and of an operation in place
			}
			info, _ := graph.InfoOf(fwd.Kind)
			ins, outs := info.Operands(fwd.Attr)
			if reads[fwd.Kind] == nil {
				reads[fwd.Kind] = map[string]bool{}
			}
			for _, bwd := range ops {
				if bwd.Source != fwd.Name {
					continue
				}
				for i, id := range fwd.In {
					if id != graph.NoBuf && slices.Contains(bwd.In, id) {
						reads[fwd.Kind][ins[i].Name] = true
					}
				}
				for i, o := range fwd.Out {
					if o.Buf != graph.NoBuf && !reused[o.Buf] && slices.Contains(bwd.In, o.Buf) {
						reads[fwd.Kind][outs[i].Name] = true
					}
				}
			}
		}
	}
	for k, got := range reads {
		info, _ := graph.InfoOf(k)
		want := map[string]bool{}
		for _, s := range info.Saves {
			if !(k == graph.Linear && s == "pre") { // of a fused linear: see TestDifferentiateOfFusedLinear
				want[s] = true
			}
		}
		require.Equal(t, want, got, k)
	}
}
