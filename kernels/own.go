package kernels

import "github.com/spillway-ml/spillway/graph"

// OwnCall returns the graph.Call of an operation that the user's program defines
// (graph.Definition). Every operand of the definition has a tensor with its type and
// shape, but without elements.
func OwnCall(b *Binding) *graph.Call {
	def := b.Op.Own.Definition()
	c := &graph.Call{Attr: b.Op.Attr, In: make([]graph.Tensor, len(def.In)), Out: make([]graph.Tensor, len(def.Out))}
	describe := func(t *graph.Tensor, id graph.BufID) {
		if id == graph.NoBuf {
			return
		}
		buf := b.Program.Buf(id)
		t.DType = buf.DType
		if t.Shape = buf.Shape; len(t.Shape) == 0 {
			t.Shape = []int64{1}
		}
	}
	for i, id := range b.Op.In {
		describe(&c.In[i], id)
	}
	for i, out := range b.Op.Out {
		describe(&c.Out[i], out.Buf)
		c.Out[i].Accum = out.Buf != graph.NoBuf && out.Mode == graph.Accum
	}
	return c
}

// OwnParams returns the ranges of parameters in the shard that an update operation works
// on. It returns nil for operations that are not updates.
func OwnParams(b *Binding) ([]graph.ParamRange, error) {
	a, ok := b.Op.Attr.(graph.UpdateAttr)
	if !ok {
		return nil, nil
	}
	spans, _, err := b.Spans(a.Shard)
	var list []graph.ParamRange
	for _, s := range spans {
		list = append(list, graph.ParamRange{Lo: s.Lo, Hi: s.Hi, Decay: s.Decay, First: s.First, Param: s.ID})
	}
	return list, err
}
