package zero

import (
	"cmp"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Muon updates matrices of a model's blocks with the nearly orthogonal matrix of their momentum.
// AdamW, with the same rate, updates embeddings, head, norms and biases.
//
// Each matrix has an owner, the only rank that has the complete matrix and computes this:
//
//	grad, momentum (shard) → direction (shard) ─ all_gather → direction (unit)
//	owner of each matrix: newtonschulz(direction) → update; 0 on the others
//	update (unit) ─ reduce_scatter → update (shard) → p −= lr·(update + Decay·p)
//
// The sum of one matrix and zeros is the matrix, so the number of ranks and the stage do not change
// bits. If every rank has the complete unit (stage 0, and units too small for shards), each
// computes all of it. The factor 0.2·√max(R,C) gives updates the root mean square of AdamW's (Liu
// et al., Muon is Scalable for LLM Training, 2025, section 2.2).
var _ = register(&Rule{
	Name: "muon", States: []string{"momentum"}, Reads: []Constant{Beta1, Beta2, Eps},
	Source: "Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024",
	Takes: func(p *graph.Program, param int) bool {
		prm := &p.Params[param]
		return len(prm.Shape) == 2 && p.Units[prm.Unit].Block.Repeats()
	},
	Rest:    adamwRule,
	CPUOnly: true,
	Emit:    emitMuon,
}, muonMomentum, muonApply)

func emitMuon(e *Emitter, t *Target) {
	buffer := func(name string, n int64) graph.BufID {
		return e.p.AddBuffer(graph.Buffer{Name: t.Name + "/" + name, DType: graph.F32, Shape: []int64{n}, Class: graph.Workspace, Life: graph.LifeStep, Unit: t.Unit})
	}
	unit, axis, ranks := &e.p.Units[t.Unit], t.Shard.Axis, 1
	direction := buffer("direction", t.Shard.Len)
	e.own(muonMomentum, t.Name+"/muon_momentum", t.Unit, e.Scalars(t), append(InPlace(t.States[0]), graph.Out{Buf: direction}), e.Attr(t))
	whole := direction
	if axis >= 0 {
		ranks, whole = e.p.Mesh[axis].Size, buffer("directions", unit.FlatLen)
		e.Op(graph.AllGather, t.Name+"/muon_gather", t.Unit, []graph.BufID{direction}, []graph.Out{{Buf: whole}}, graph.GroupAttr{Axis: axis}).Stream = graph.Comm
	}
	update := buffer("update", unit.FlatLen)
	used := int64(0)
	for _, s := range unit.Segments {
		used += s.Len
	}
	e.p.Buf(update).Pad = (unit.FlatLen - used) * graph.F32.Size() // no matrix writes the padding
	owners := balanced(e.p, unit, ranks)
	for i, s := range unit.Segments {
		prm := &e.p.Params[s.Param]
		matrix := func(what string, of graph.BufID) graph.BufID {
			return e.p.AddBuffer(graph.Buffer{Name: prm.Name + "/" + what, DType: graph.F32, Shape: slices.Clone(prm.Shape), Class: graph.Workspace, Life: graph.LifeStep,
				Unit: t.Unit, View: &graph.View{Base: of, Offset: s.Flat * graph.F32.Size()}})
		}
		op := e.Op(graph.NewtonSchulz, prm.Name+"/newtonschulz", t.Unit, []graph.BufID{matrix("direction", whole)}, []graph.Out{{Buf: matrix("update", update)}},
			graph.NewtonSchulzAttr{Axis: axis, Owner: owners[i], Ranks: ranks, Factor: 0.2 * math.Sqrt(float64(max(prm.Shape[0], prm.Shape[1])))})
		op.Skip = e.skip
	}
	if axis >= 0 {
		e.Op(graph.ReduceScatter, t.Name+"/muon_scatter", t.Unit, []graph.BufID{update}, []graph.Out{{Buf: direction}}, graph.GroupAttr{Axis: axis}).Stream = graph.Comm
		update = direction
	}
	e.Apply(t, muonApply, "muon_apply", []graph.BufID{update, e.p.Hyper}, InPlace(t.Value), e.Attr(t))
}

// balanced assigns a rank to each matrix of a unit: the largest matrix first, each to the rank with
// the least work so far. Units run in sequence, so each unit is balanced separately.
func balanced(p *graph.Program, unit *graph.Unit, ranks int) []int {
	order, flops := make([]int, len(unit.Segments)), make([]int64, len(unit.Segments))
	for i, s := range unit.Segments {
		order[i], flops[i] = i, graph.NewtonSchulzFlops(p.Params[s.Param].Shape[0], p.Params[s.Param].Shape[1])
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(flops[b], flops[a]) })
	owners, load := make([]int, len(order)), make([]int64, ranks)
	for _, i := range order {
		least := 0
		for r := range load {
			if load[r] < load[least] {
				least = r
			}
		}
		owners[i] = least
		load[least] += flops[i]
	}
	return owners
}

var muonMomentum = update(graph.Definition{
	Kind: "muon_momentum",
	Doc:  "With h = coef·g: m = 0.95·m + h, d = 0.95·m + h, Nesterov's form; g, m, d (Len).",
	In:   graph.UpdateIn(), Out: []graph.Operand{graph.StateOut("m"), {Name: "d", Shape: "(Len)", Types: []graph.DType{graph.F32}, Modes: []graph.Mode{graph.Write}, Per: 1}},
}, 5)

var muonApply = update(graph.Definition{
	Kind: "muon_apply",
	Doc:  "p −= lr·(u + Decay·p); u, p (Len).",
	In:   []graph.Operand{{Name: "u", Shape: "(Len)", Types: []graph.DType{graph.F32}, Per: 1}, graph.UpdateIn()[2]},
	Out:  []graph.Operand{graph.StateOut("p"), graph.LowOut()},
}, 4)
