package lora

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
)

// Suffixes that name an adapter's two parameters, after the name of its layer.
const (
	SuffixA = ".lora_A.weight" // (r, K)
	SuffixB = ".lora_B.weight" // (N, r)
)

// Layer returns the layer's name of a weight: "h.0.attn.c_attn" for "h.0.attn.c_attn.weight".
func Layer(weight string) string { return strings.TrimSuffix(weight, ".weight") }

// IsAdapter says whether a parameter's name is that of an adapter.
func IsAdapter(name string) bool {
	return strings.HasSuffix(name, SuffixA) || strings.HasSuffix(name, SuffixB)
}

// Adapt returns a forward program in which linear products have adapters, and all of the program's
// other parameters are frozen. A product has an adapter if a target names its weight; without
// targets, if it is in a block that repeats.
//
//	y = x·W + bias    →    y = x·W + bias
//	                       a = x·Aᵀ               (M,r), A (r,K)
//	                       a = a·(Alpha/Rank)     in place; left out if that is 1
//	                       b = a·Bᵀ               (M,N), B (N,r)
//	                       y = y + b              in place
//
// With Dropout the adapter reads dropout(x). A and B belong to the unit of W, of which they become
// the trained half. A begins uniform in ±1/√K (PEFT's Kaiming uniform with a = √5), B at zero, so
// that the first step computes the same as the model. Weights that other kinds of operations use
// (embeddings, a head's loss) have no adapters.
func Adapt(p *graph.Program, o Options) (*graph.Program, error) {
	q := p.Clone()
	if len(q.Params) > 0 {
		if _, err := graph.Freeze(q, "*"); err != nil {
			return nil, fmt.Errorf("lora: %w", err)
		}
	}
	a := &adapter{p: q, o: o, weights: map[graph.BufID]int{}, made: map[int][2]graph.BufID{}, matched: make([]bool, len(o.Targets))}
	for i := range q.Params {
		a.weights[q.Params[i].Value] = i
	}
	ph := q.Sections[0].Micro()
	a.w = graph.NewEditor(ph)
	a.sites(ph)
	for i := range a.w.Base {
		if err := a.product(i); err != nil {
			return nil, err
		}
	}
	a.w.Commit()
	for i, ok := range a.matched {
		if !ok {
			return nil, a.noMatch(o.Targets[i])
		}
	}
	if len(a.made) == 0 {
		return nil, fmt.Errorf("lora: no block of the model repeats; name targets, as in targets=%s", strings.Join(nearest.Patterns("*", a.names, 3), ","))
	}
	return q, nil
}

// adapter holds the state of one Adapt.
type adapter struct {
	p       *graph.Program
	o       Options
	w       *graph.Editor
	weights map[graph.BufID]int    // parameter index by its value's buffer
	made    map[int][2]graph.BufID // A and B by the index of the base parameter
	names   []string               // of weights that may have adapters
	matched []bool                 // by target, whether it matched a weight
	site    int64                  // of the last dropout; a site identifies a dropout's random numbers
}

// sites finds the highest dropout site that the program uses.
func (a *adapter) sites(ph *graph.Phase) {
	for i := range ph.Ops {
		if d, ok := ph.Ops[i].Attr.(graph.DropoutAttr); ok {
			a.site = max(a.site, d.Site)
		}
	}
}

// product adds an adapter to operation i, if it is a product that a target names.
func (a *adapter) product(i int) error {
	op := &a.w.Base[i].Op
	if op.Kind != graph.Linear {
		return nil
	}
	k, ok := a.weights[op.In[1]]
	if !ok {
		return nil
	}
	a.names = append(a.names, a.p.Params[k].Name)
	if !a.wants(&a.p.Params[k]) {
		return nil
	}
	ab, ok := a.made[k]
	if !ok {
		ab = a.parameters(k, op.Attr.(graph.LinearAttr).TransW)
		a.made[k] = ab
	}
	x, y := op.In[0], op.Out[0].Buf
	if a.o.Dropout > 0 {
		var err error
		if x, err = a.dropout(i, x); err != nil {
			return err
		}
	}
	rows := append([]int64(nil), a.p.Buf(y).Shape...)
	rows[len(rows)-1] = int64(a.o.Rank)
	trans := graph.LinearAttr{TransW: true}
	low := a.value(op.Name+".lora_A", rows)
	a.after(i, graph.Linear, "lora_A", []graph.BufID{x, ab[0], graph.NoBuf}, graph.Out{Buf: low}, trans)
	if f := a.o.Factor(); f != 1 {
		a.after(i, graph.Scale, "lora_scale", []graph.BufID{low}, graph.Out{Buf: low, Mode: graph.ReadWrite}, graph.ScaleAttr{Factor: f})
	}
	full := a.value(op.Name+".lora_B", a.p.Buf(y).Shape)
	a.after(i, graph.Linear, "lora_B", []graph.BufID{low, ab[1], graph.NoBuf}, graph.Out{Buf: full}, trans)
	a.after(i, graph.Add, "lora_add", []graph.BufID{y, full}, graph.Out{Buf: y, Mode: graph.ReadWrite}, nil)
	return nil
}

// wants says whether a weight gets an adapter.
func (a *adapter) wants(w *graph.Param) (yes bool) {
	if len(a.o.Targets) == 0 {
		return a.p.Units[w.Unit].Block.Repeats()
	}
	for i, t := range a.o.Targets {
		if ok, _ := graph.MatchName(t, w.Name); ok {
			a.matched[i], yes = true, true
		}
	}
	return yes
}

// parameters adds A and B for parameter k, whose weight is (N,K) if trans, otherwise (K,N).
func (a *adapter) parameters(k int, trans bool) [2]graph.BufID {
	w := a.p.Params[k]
	in, out := w.Shape[0], w.Shape[1]
	if trans {
		in, out = out, in
	}
	a.p.Units[w.Unit].Frozen = false
	add := func(suffix string, init graph.InitKind, std float64, shape ...int64) graph.BufID {
		name := Layer(w.Name) + suffix
		id := a.p.AddBuffer(graph.Buffer{Name: name, DType: graph.F32, Shape: shape, Class: graph.Parameters, Life: graph.LifeRun, Unit: w.Unit})
		a.p.Params = append(a.p.Params, graph.Param{Name: name, Shape: append([]int64(nil), shape...), Init: init, Std: std, Unit: w.Unit,
			Decay: true, Value: id, Grad: graph.NoBuf})
		return id
	}
	r := int64(a.o.Rank)
	return [2]graph.BufID{add(SuffixA, graph.InitUniform, 1/math.Sqrt(float64(in)), r, in), add(SuffixB, graph.InitZeros, 0, out, r)}
}

// dropout adds dropout of the input x of operation i and returns the result.
func (a *adapter) dropout(i int, x graph.BufID) (graph.BufID, error) {
	op, samples := &a.w.Base[i].Op, int64(1)
	switch {
	case a.p.Tokens != graph.NoBuf:
		samples = a.p.Buf(a.p.Tokens).Shape[0]
	case a.p.Targets != graph.NoBuf:
		samples = a.p.Buf(a.p.Targets).Shape[0]
	}
	elems := a.p.Buf(x).Elems()
	if elems%samples != 0 {
		return graph.NoBuf, fmt.Errorf("lora: dropout before %s: its %d inputs are not a multiple of %d samples; give no dropout", op.Name, elems, samples)
	}
	if a.p.Key == graph.NoBuf {
		a.p.Key = a.p.AddBuffer(graph.Buffer{Name: "key", DType: graph.I64, Shape: []int64{graph.NumKey}, Class: graph.Inputs, Life: graph.LifeStep, Unit: -1})
	}
	a.site++
	y := a.value(op.Name+".lora_dropout", a.p.Buf(x).Shape)
	a.after(i, graph.Dropout, "lora_dropout", []graph.BufID{x, a.p.Key}, graph.Out{Buf: y}, graph.DropoutAttr{P: a.o.Dropout, Site: a.site, Elems: elems / samples})
	return y, nil
}

// value adds an activation.
func (a *adapter) value(name string, shape []int64) graph.BufID {
	return a.p.AddBuffer(graph.Buffer{Name: name, DType: graph.F32, Shape: append([]int64(nil), shape...), Class: graph.Activations, Life: graph.LifePhase, Unit: -1})
}

// after inserts an operation after operation i, named after it.
func (a *adapter) after(i int, kind graph.Kind, suffix string, in []graph.BufID, out graph.Out, attr any) {
	of := &a.w.Base[i].Op
	op := graph.NewOp(kind, of.Name+"."+suffix, in, []graph.Out{out}, attr)
	op.Stream, op.Pass, op.Unit = of.Stream, of.Pass, of.Unit
	if out.Mode == graph.Write {
		a.p.Buf(out.Buf).Unit = of.Unit
	}
	a.w.After(i, op)
}

// noMatch returns the error for a target that names no weight of a linear product.
func (a *adapter) noMatch(target string) error {
	for i := range a.p.Params {
		if ok, _ := graph.MatchName(target, a.p.Params[i].Name); ok {
			return fmt.Errorf("lora: target %q names %s, which no linear product uses; adapters are for linear products: %s",
				target, a.p.Params[i].Name, strings.Join(a.nearest(target), ", "))
		}
	}
	return fmt.Errorf("lora: no weight of a linear product matches target %q; the nearest are %s", target, strings.Join(a.nearest(target), ", "))
}

// nearest returns targets that match weights, nearest first. If a target lacks the place of the
// weights in the model, these are *.NAME.* with a part of the weights' names.
func (a *adapter) nearest(target string) []string {
	const most = 3
	if !strings.HasPrefix(target, "*") {
		return nearest.Patterns(target, a.names, most)
	}
	asked := strings.Trim(target, "*.")
	var entries [][]string
	seen := map[string]bool{}
	for _, name := range a.names {
		parts := strings.Split(Layer(name), ".")
		at := slices.IndexFunc(parts, func(part string) bool { _, err := strconv.Atoi(part); return err == nil })
		for _, part := range parts[at+1:] { // after the layer's number
			if pattern := "*." + part + ".*"; at >= 0 && !seen[pattern] {
				seen[pattern] = true
				entry := []string{pattern}
				if strings.Contains(part, asked) {
					entry = append(entry, target)
				}
				entries = append(entries, entry)
			}
		}
	}
	if entries == nil {
		return nearest.Patterns(target, a.names, most)
	}
	return nearest.Names(target, entries, most)
}
