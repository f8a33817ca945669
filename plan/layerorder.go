package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/mesh"
)

// layerOrder replaces the one micro-batch of each section of kind "train" by all k micro-batches of
// a step, in layer order: each block does its k forward passes in turn before the next block
// starts, and its k backward passes in turn:
//
//	micro order:  embed 0  h.0 0  h.1 0 … h.1 0  h.0 0 │ embed 1  h.0 1  h.1 1 …
//	layer order:  embed 0  embed 1 … │ h.0 0  h.0 1 … │ h.1 0  h.1 1 … │ … h.1 0  h.1 1 …
//
// (Published for offloading as a vertical schedule.) All uses of a block by the micro-batches then
// follow each other directly, so that its parameters are fetched and gathered, and its gradients
// reduced, once a step. Every micro-batch has its own inputs, activations and keys; its gradients
// are added to those of earlier micro-batches. A block's recomputation stays with its backward, so
// that only one micro-batch's activations are recomputed at a time.
//
// The operations of a micro-batch keep their order. So do the additions to a parameter's gradient,
// if only one block uses the parameter (see sharedByBlocks).
//
// afresh is for sums leaf by leaf (graph.Gradient): each micro-batch then overwrites the gradient
// instead of adding to it, and fsdp.Accumulate adds the leaf directly afterwards. A unit whose
// gradient comes from several blocks is an error, because this is impossible for it.
func layerOrder(p *graph.Program, k int, afresh bool) (*graph.Program, error) {
	return manyMicros(p, k, afresh, nil)
}

// manyMicros orders the operations of a step's k micro-batches: in layer order if turns is nil,
// else in the turns of a pipeline's stages.
func manyMicros(p *graph.Program, k int, afresh bool, turns []mesh.Turn) (*graph.Program, error) {
	q := p.Clone()
	r := &layering{p: q, afresh: afresh, own: make([]bool, len(q.Buffers)), twins: make([][]graph.BufID, k)}
	for id := range q.Buffers {
		_, r.own[id] = q.MicroOf(graph.BufID(id))
	}
	if ph := q.SectionOf(graph.SectionTrain, graph.FormWhole).Micro(); ph != nil {
		if most := maxLayeredOps / max(1, len(ph.Ops)); k > most && turns != nil {
			return nil, fmt.Errorf("Config.Pipeline with Config.Accum %d: a step would have %d operations, and at most %d can be planned; use Config.Accum %d or less", k, k*len(ph.Ops), maxLayeredOps, most)
		} else if k > most {
			return nil, fmt.Errorf("Config.AccumOrder layer with Config.Accum %d: a step would have %d operations, and at most %d can be planned; use Config.Accum %d or less, or Config.AccumOrder micro", k, k*len(ph.Ops), maxLayeredOps, most)
		}
	}
	r.makeTwins(k)
	for i := range q.Sections {
		sec := &q.Sections[i]
		if sec.Kind != graph.SectionTrain {
			continue
		}
		ph := sec.Micro()
		if ph == nil {
			return nil, fmt.Errorf("section %q has %d phases, want the one of a micro-batch", sec.Name, len(sec.Phases))
		}
		if turns != nil {
			ph.Ops = r.staged(ph.Ops, turns)
			continue
		}
		if name := r.unitOfSeveral(ph.Ops); afresh && name != "" {
			return nil, fmt.Errorf("Config.AccumOrder layer with Config.Reproducible: %s is used by several blocks, as with a tied head, so layer order cannot add its gradient micro-batch by micro-batch; leave one of them out", name)
		}
		ph.Ops = r.layers(ph.Ops, k)
	}
	return q, nil
}

// unitOfSeveral returns the name of the first unit to whose gradients several blocks write;
// "" if there is none.
func (r *layering) unitOfSeveral(ops []graph.Op) string {
	seen := map[int]bool{}
	for first := 0; first < len(ops); {
		end := endOfBlock(r.p, ops, first)
		here := map[int]bool{}
		for i := first; i < end; i++ {
			for _, o := range ops[i].Out {
				if o.Buf == graph.NoBuf {
					continue
				}
				root, _ := r.p.Resolve(o.Buf, nil)
				b := r.p.Buf(root)
				if b.Class != graph.Gradients || b.Unit < 0 || here[b.Unit] {
					continue
				}
				if seen[b.Unit] {
					return r.p.Units[b.Unit].Name
				}
				here[b.Unit] = true
			}
		}
		for u := range here {
			seen[u] = true
		}
		first = end
	}
	return ""
}

// maxLayeredOps bounds the operations of a step, which in layer order are all in the program.
const maxLayeredOps = 1 << 21

// layering makes the operations and buffers of the micro-batches after the first.
type layering struct {
	p      *graph.Program
	afresh bool            // every micro-batch overwrites the gradient: see layerOrder
	own    []bool          // by buffer: each micro-batch needs a separate buffer
	twins  [][]graph.BufID // by micro-batch and buffer: the micro-batch's buffer; for the first, the buffer itself
}

// makeTwins gives each micro-batch after the first its own copies of the buffers marked in
// own that the training sections touch, and of the ports that exist for each micro-batch.
func (r *layering) makeTwins(k int) {
	used := make([]bool, len(r.own))
	mark := func(id graph.BufID) {
		for id != graph.NoBuf && !used[id] {
			used[id] = true
			b := r.p.Buf(id)
			if b.View == nil {
				return
			}
			id = b.View.Base
		}
	}
	for i := range r.p.Sections {
		if sec := &r.p.Sections[i]; sec.Kind == graph.SectionTrain {
			for j := range sec.Phases {
				for k := range sec.Phases[j].Ops {
					graph.Effects(&sec.Phases[j].Ops[k], func(e graph.Effect) { mark(e.Buf) })
				}
			}
		}
	}
	first := make([]graph.BufID, len(r.own))
	for id := range first {
		first[id] = graph.BufID(id)
		if r.p.Buffers[id].Port.EachMicro() {
			mark(first[id])
		}
	}
	r.twins[0] = first
	for m := 1; m < k; m++ {
		list := append([]graph.BufID(nil), first...)
		for id := range first {
			if used[id] && r.own[id] {
				b := *r.p.Buf(graph.BufID(id))
				b.Name, b.Micro = graph.MicroName(b.Name, m), m
				b.Shape = append([]int64(nil), b.Shape...)
				list[id] = r.p.AddBuffer(b)
			}
		}
		for id, twin := range list {
			if twin == graph.BufID(id) {
				continue
			}
			b := r.p.Buf(twin)
			if v := b.View; v != nil {
				w := *v
				w.Base = list[v.Base]
				b.View = &w
			}
		}
		r.twins[m] = list
	}
}

// layers returns the operations of k micro-batches, given those of one.
func (r *layering) layers(ops []graph.Op, k int) []graph.Op {
	out := make([]graph.Op, 0, k*len(ops))
	for first := 0; first < len(ops); {
		end := endOfBlock(r.p, ops, first)
		for m := range k {
			for _, op := range graph.CloneOps(ops[first:end]) {
				if m == 0 || !r.once(&op) {
					out = append(out, r.of(op, m))
				}
			}
		}
		first = end
	}
	return out
}

// staged returns the operations of all micro-batches, in the turns of a pipeline's stages. If a
// forward follows a backward on a stage, the stage receives the forward's input before it sends the
// backward's result. The previous stage runs the matching send and receive in this order; otherwise
// the two would wait for each other.
func (r *layering) staged(ops []graph.Op, turns []mesh.Turn) (out []graph.Op) {
	visits := map[mesh.Turn][]graph.Op{} // of micro-batch 0
	now := mesh.Turn{Stage: -1}
	var common []graph.Op
	for i := range ops {
		if ops[i].Unit < 0 {
			common = append(common, ops[i])
			continue
		}
		at := mesh.Turn{Stage: r.p.Units[ops[i].Unit].Stage, Forward: ops[i].Pass == graph.Forward}
		visits[at] = append(append(visits[at], common...), ops[i])
		now, common = at, nil
	}
	visits[now] = append(visits[now], common...)
	of := func(t mesh.Turn) []graph.Op { t.Micro = 0; return visits[t] }
	received := map[mesh.Turn]bool{}
	emit := func(list []graph.Op, m int) {
		for _, op := range graph.CloneOps(list) {
			if m == 0 || !r.once(&op) {
				out = append(out, r.of(op, m))
			}
		}
	}
	for i, t := range turns {
		list := of(t)
		recvs := leading(list, graph.Recv)
		if received[t] {
			list = list[recvs:]
		}
		sends := len(list)
		for sends > 0 && list[sends-1].Kind == graph.Send {
			sends--
		}
		emit(list[:sends], t.Micro)
		if next := slices.IndexFunc(turns[i+1:], func(n mesh.Turn) bool { return n.Stage == t.Stage }); next >= 0 && !t.Forward {
			if n := turns[i+1+next]; n.Forward {
				emit(of(n)[:leading(of(n), graph.Recv)], n.Micro)
				received[n] = true
			}
		}
		emit(list[sends:], t.Micro)
	}
	return out
}

// leading counts the operations of a kind at the start of a list.
func leading(ops []graph.Op, kind graph.Kind) (n int) {
	for n < len(ops) && ops[n].Kind == kind {
		n++
	}
	return n
}

// endOfBlock returns the end of the run of operations, starting at first, that belong to one
// block's forward, or to its backward and recomputation.
func endOfBlock(p *graph.Program, ops []graph.Op, first int) int {
	end := first + 1
	for end < len(ops) && (ops[end].Pass == graph.Forward) == (ops[first].Pass == graph.Forward) && p.SameBlock(ops[end].Unit, ops[first].Unit) {
		end++
	}
	return end
}

// once reports whether an operation would write the same value to the same buffer in every
// micro-batch, so that one execution is enough.
func (r *layering) once(op *graph.Op) bool {
	same := true
	graph.Effects(op, func(e graph.Effect) {
		same = same && !r.own[e.Buf] && (!e.Write || e.Fresh)
	})
	return same
}

// of returns the operation for micro-batch m.
func (r *layering) of(op graph.Op, m int) graph.Op {
	if m == 0 {
		return op
	}
	op.Name, op.Micro = graph.MicroName(op.Name, m), m
	for a, o := range op.Out {
		if o.Buf == graph.NoBuf || r.afresh || o.Mode != graph.Write {
			continue
		}
		if root, _ := r.p.Resolve(o.Buf, nil); r.p.Buf(root).Class == graph.Gradients {
			op.Out[a].Mode = graph.Accum
		}
	}
	op.Buffers(func(id *graph.BufID) {
		if *id != graph.NoBuf {
			*id = r.twins[m][*id]
		}
	})
	return op
}

// sharedByBlocks lists the trained parameters that more than one block uses in the forward of
// a micro-batch, such as a tied head. Layer order sums their gradients use by use, micro order
// micro-batch by micro-batch, so the bits differ.
func sharedByBlocks(p *graph.Program) (names []string) {
	uses := make([]int, len(p.Params))
	of := map[graph.BufID]int{}
	for i := range p.Params {
		if !p.Params[i].Frozen {
			of[p.Params[i].Value] = i
		}
	}
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ops := p.Sections[i].Phases[j].Ops
			for first := 0; first < len(ops); {
				end := endOfBlock(p, ops, first)
				seen := map[int]bool{}
				for k := first; k < end; k++ {
					for _, id := range ops[k].In {
						if id == graph.NoBuf {
							continue
						}
						root, _ := p.Resolve(id, nil)
						if at, ok := of[root]; ok && !seen[at] {
							seen[at] = true
							uses[at]++
						}
					}
				}
				first = end
			}
		}
	}
	for i, n := range uses {
		if n > 1 {
			names = append(names, p.Params[i].Name)
		}
	}
	return names
}

// layers is the pass "layers": it orders the operations of a step's micro-batches.
func layers(p *graph.Program, s *Spec) (*graph.Program, error) {
	switch {
	case !s.inLayers():
		return p, nil
	case s.Pipeline > 1:
		return manyMicros(p, s.Accum, s.Reproducible, s.Schedule.Turns(s.Pipeline, s.Accum))
	}
	return layerOrder(p, s.Accum, s.Reproducible)
}

// OwnSums describes the gradients of a plan in layer order whose bits differ from those of micro
// order at stages 0 and 1; "" if there are none.
func (p *Plan) OwnSums() string {
	if len(p.UsedTwice) == 0 {
		return ""
	}
	return fmt.Sprintf("%s is used by several blocks: its gradient is summed use by use, with bits of layer order's own, equal at every stage and placement", strings.Join(p.UsedTwice, ", "))
}
