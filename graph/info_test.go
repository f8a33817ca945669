package graph_test

import (
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

// declaredKinds returns the Kind constants of kinds.go.
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
			// Packed attention has different operands.
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

// samples returns at least one valid operation of each kind: those of the gradient checks, and
// hand-made ones for the kinds that rewrites add.
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
	add(graph.Fill, graph.FillAttr{Value: 1}, nil, graph.Out{Buf: part})
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

// The operands that the table marks as saved are exactly those that derivatives read. Differentiate
// refuses to read others.
func TestSavesIsWhatDerivativesRead(t *testing.T) {
	reads := map[graph.Kind]map[string]bool{}
	for _, c := range gradchecks {
		q, err := graph.Differentiate(build(t, c.f))
		require.NoError(t, err)
		ops := q.Sections[0].Phases[0].Ops
		reused := map[graph.BufID]bool{} // logits overwritten by their gradient, and so gradients from then on
		for _, op := range ops {
			if op.Kind == graph.CrossEntropyGrad && op.Out[0].Mode == graph.ReadWrite {
				reused[op.Out[0].Buf] = true
			}
		}
		for _, fwd := range ops {
			if fwd.Pass != graph.Forward || len(fwd.In) > 1 && fwd.In[0] == fwd.In[1] || len(fwd.In) > 2 && fwd.In[1] == fwd.In[2] {
				continue // with one buffer under two names it is unknown which one was read
			}
			if len(fwd.In) > 0 && len(fwd.Out) > 0 && fwd.In[0] == fwd.Out[0].Buf {
				continue // the same holds for an operation in place
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
