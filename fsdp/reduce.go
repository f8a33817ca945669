package fsdp

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Reduce sums gradients over the ranks, for each unit along the path in its graph.Gradient. The sum
// runs on the comm stream as soon as the last operation on the gradient has finished:
//
//	compute:  … h.1.fc/dw │ h.0.fc/dw …          every micro-step, or the last one
//	comm:                  reduce h.1  ─ reduce h.0
//
// If a gradient's memory is free after the reduction, at most prefetch+1 complete gradients exist
// in addition to those that are still being written.
func Reduce(p *graph.Program, prefetch int) (*graph.Program, error) {
	q := p.Clone()
	eachMicroStep(q, func(ph *graph.Phase) {
		r := &reducer{p: q, w: graph.NewInserter(ph), first: ph.First, last: ph.Last, micros: ph.MicroBatches()}
		all := gradSpans(q, r.w)
		for stage := range q.Stages() {
			var spans []gradSpan
			var done []*graph.Node
			for _, g := range all {
				if q.Units[g.unit].Stage != stage {
					continue
				}
				spans = append(spans, g)
				if n := r.unit(g); n != nil {
					done = append(done, n)
				}
			}
			for i := range done {
				if next := i + 1 + prefetch; next < len(spans) {
					r.w.Throttle(done[i], r.w.Base[spans[next].first])
				}
			}
		}
		if ph.Last {
			tie(q, r.w)
		}
		r.w.Commit()
	})
	return q, nil
}

// tie adds the gradients of a parameter that two stages of a pipeline have, after each stage has
// its own sum. Both stages add the same two values:
//
//	first stage   grad/embed ─ send ─ recv → other ─ add to grad/embed
//	last stage    grad/embed/stage.3 ─ recv → other ─ send ─ add
func tie(p *graph.Program, w *graph.Editor) {
	for i := range p.Params {
		copied := &p.Params[i]
		if copied.TiedTo == 0 || p.Units[copied.Unit].Grad == nil || p.Units[copied.Unit].Segments[0].Param != i {
			continue
		}
		ends := [2]int{p.Params[copied.TiedTo-1].Unit, copied.Unit}
		for k, u := range ends {
			name, sum := p.Units[u].Name, p.Units[u].Grad.Update
			stage, other := p.Units[u].Stage, p.Units[ends[1-k]].Stage
			b := p.Buf(sum)
			theirs := p.AddBuffer(graph.Buffer{Name: "tied/" + name, DType: b.DType, Shape: slices.Clone(b.Shape), Class: graph.Communication, Life: graph.LifePhase, Unit: u})
			peer := func(from, to int) graph.PeerAttr {
				return graph.PeerAttr{Axis: p.AxisOf(graph.PipelineAxis), From: from, To: to}
			}
			send := newOp(graph.Send, name+"/tied/send", graph.Comm, graph.Backward, u, []graph.BufID{sum}, nil, peer(stage, other))
			recv := newOp(graph.Recv, name+"/tied/recv", graph.Comm, graph.Backward, u, nil, []graph.Out{{Buf: theirs}}, peer(other, stage))
			if k == 1 { // one sends while the other receives
				send, recv = recv, send
			}
			w.Append(send)
			w.Append(recv)
			w.Append(newOp(graph.Scale, name+"/tied/add", graph.Comm, graph.Backward, u, []graph.BufID{theirs}, []graph.Out{{Buf: sum, Mode: graph.Accum}}, graph.ScaleAttr{Factor: 1}))
		}
	}
}

// reducer reduces the gradients of one micro-step.
type reducer struct {
	p           *graph.Program
	w           *graph.Editor
	first, last bool
	micros      int // micro-batches of the phase
}

// gradSpan is the range of operations that write a unit's gradient in a phase, as base indices. For
// sums leaf by leaf there is one span for each micro-batch of the phase.
type gradSpan struct{ unit, micro, first, last int }

// gradSpans finds the operations that write the gradient buffers of trainable units, in order of
// the last write.
func gradSpans(p *graph.Program, w *graph.Editor) []gradSpan {
	byRoot := map[graph.BufID]int{}
	for u := range p.Units {
		if g := p.Units[u].Grad; g != nil {
			byRoot[g.Whole] = u
		}
	}
	at := map[[2]int]*gradSpan{}
	for i, n := range w.Base {
		for _, o := range n.Op.Out {
			if o.Buf == graph.NoBuf {
				continue
			}
			root, _ := p.Resolve(o.Buf, nil)
			u, ok := byRoot[root]
			if !ok {
				continue
			}
			key := [2]int{u, 0}
			if p.Units[u].Grad.Leaves() {
				key[1] = n.Op.Micro
			}
			if at[key] == nil {
				at[key] = &gradSpan{u, key[1], i, i}
			}
			at[key].last = i
		}
	}
	var spans []gradSpan
	for _, g := range at {
		spans = append(spans, *g)
	}
	slices.SortFunc(spans, func(a, b gradSpan) int { return cmp.Or(a.last-b.last, a.unit-b.unit) })
	return spans
}

// unit reduces the gradient of a unit. It returns the operation after which the memory of the
// complete gradient is free, nil if that memory holds the sum.
func (r *reducer) unit(s gradSpan) *graph.Node {
	g := r.p.Units[s.unit].Grad
	if g.Leaves() {
		return r.leaves(s, g)
	}
	if !g.Each {
		if r.last {
			return r.once(s, g)
		}
		return nil
	}
	into, add := g.Lands()
	at := s.last
	mode := graph.Write
	if into == g.Home && !r.first {
		mode = graph.Accum
	}
	done := r.overShards(s, at, g, g.Whole, graph.Out{Buf: into, Mode: mode})
	if add { // the operation of Accumulate comes after the last write
		at = r.writer(g.Home, at)
		done = r.w.Base[at]
	}
	if r.last {
		sum := g.Home
		if g.Sent != graph.NoBuf {
			r.insert(s, at, graph.Cast, "wire", sum, graph.Out{Buf: g.Sent}, nil)
			sum = g.Sent
		}
		r.overReplicas(s, at, g, sum)
	}
	return done
}

// leaves adds the ranks' leaves of a micro-step in sequence to this rank's part of the sum. It
// reads them from the ranks' buffers or, if they are quantised, from the exchange's receive buffer.
// If each rank keeps the complete sum, its parts are gathered after the last micro-step:
//
//	grad ─ reduce_scatter, sequential → accum 1/4 ─ all_gather → sum
func (r *reducer) leaves(s gradSpan, g *graph.Gradient) (done *graph.Node) {
	into := leafSum(g, r.first && s.micro == 0)
	switch {
	case g.Axis < 0: // Accumulate has added the leaf
		return r.w.Base[r.writer(g.Home, s.last)]
	case g.Int8:
		done = r.quantised(s, s.last, g, g.Whole, into, squared(g)...)
	default:
		done = r.insert(s, s.last, graph.ReduceScatter, "reduce_scatter", g.Whole, into, group(g, g.Axis))
		done.Op.Out = append(done.Op.Out, squared(g)...)
	}
	if r.last && g.Update != g.Home && s.micro == r.micros-1 {
		r.insert(s, s.last, graph.AllGather, "grad_all_gather", g.Home, graph.Out{Buf: g.Update}, graph.GroupAttr{Axis: g.Axis})
	}
	return done
}

// once reduces a sum over micro-steps, over the shard axis and the replicas.
//
// With both axes and stage 0, only a part crosses between the replicas, which are on different
// nodes, and the parts are then gathered:
//
//	grad 1/4   reduce_scatter ─ all_reduce over replicas ─ all_gather   grad
//
// A unit too small to be divided is reduced over one axis and then over the other, which adds in
// the same order.
func (r *reducer) once(s gradSpan, g *graph.Gradient) *graph.Node {
	sum := g.Whole
	if g.Sent != graph.NoBuf {
		r.insert(s, s.last, graph.Cast, "wire", sum, graph.Out{Buf: g.Sent}, nil)
		sum = g.Sent
	}
	parts := g.Axis >= 0 && r.p.Units[s.unit].FlatLen%int64(blockElems*r.p.Mesh[g.Axis].Size) == 0
	if parts && !g.Parted && g.Replicas >= 0 {
		own := ownPart(r.p, sum, s.unit, g.Axis)
		if g.Int8 {
			r.quantised(s, s.last, g, sum, graph.Out{Buf: own})
		} else {
			r.insert(s, s.last, graph.ReduceScatter, "reduce_scatter", sum, graph.Out{Buf: own}, group(g, g.Axis))
		}
		r.overReplicas(s, s.last, g, own)
		r.insert(s, s.last, graph.AllGather, "grad_all_gather", own, graph.Out{Buf: sum}, graph.GroupAttr{Axis: g.Axis})
		return nil
	}
	done := r.overShards(s, s.last, g, sum, graph.Out{Buf: g.Update})
	r.overReplicas(s, s.last, g, g.Update)
	if root, _ := r.p.Resolve(g.Update, nil); root == sum {
		return nil
	}
	return done
}

// overShards sums a complete gradient over the shard axis, into the rank's part, or in place if
// each rank keeps all of it. It returns nil if there is one rank.
func (r *reducer) overShards(s gradSpan, at int, g *graph.Gradient, whole graph.BufID, into graph.Out) *graph.Node {
	switch {
	case g.Axis < 0:
		return nil
	case g.Int8:
		return r.exchange(s, at, g, whole, into)
	case g.Parted:
		return r.insert(s, at, graph.ReduceScatter, "reduce_scatter", whole, into, group(g, g.Axis))
	}
	return r.insert(s, at, graph.AllReduce, "all_reduce", graph.NoBuf, graph.Out{Buf: whole, Mode: graph.ReadWrite}, group(g, g.Axis))
}

// exchange does the same as overShards with quantised values: each rank receives its part of every
// rank's gradient and sums these parts.
func (r *reducer) exchange(s gradSpan, at int, g *graph.Gradient, whole graph.BufID, into graph.Out) (last *graph.Node) {
	if !g.Parted {
		into = graph.Out{Buf: ownPart(r.p, whole, s.unit, g.Axis)}
	}
	last = r.quantised(s, at, g, whole, into)
	if !g.Parted {
		last = r.insert(s, at, graph.AllGather, "grad_all_gather", into.Buf, graph.Out{Buf: whole}, graph.GroupAttr{Axis: g.Axis})
	}
	return last
}

// quantised adds the operations that sum the rank's part of a gradient in quantised form.
func (r *reducer) quantised(s gradSpan, at int, g *graph.Gradient, whole graph.BufID, into graph.Out, squares ...graph.Out) (last *graph.Node) {
	for _, op := range (quantised{r.p, s.unit, graph.Backward, s.micro}).reduce(whole, into, g.Axis, g.Order, squares...) {
		last = r.w.After(at, op)
	}
	return last
}

// overReplicas sums the shard groups' gradients. The order of the total sum is the same at every
// stage: first the ranks of a group, then the groups.
func (r *reducer) overReplicas(s gradSpan, at int, g *graph.Gradient, buf graph.BufID) {
	if g.Replicas >= 0 {
		r.insert(s, at, graph.AllReduce, "all_reduce_replicas", graph.NoBuf, graph.Out{Buf: buf, Mode: graph.ReadWrite}, group(g, g.Replicas))
	}
}

func group(g *graph.Gradient, axis int) graph.GroupAttr {
	return graph.GroupAttr{Axis: axis, Order: g.Order}
}

// writer returns the index of the next operation after at that writes a buffer.
func (r *reducer) writer(buf graph.BufID, at int) int {
	for i := at + 1; i < len(r.w.Base); i++ {
		for _, o := range r.w.Base[i].Op.Out {
			if o.Buf == buf {
				return i
			}
		}
	}
	return at
}

// insert adds an operation on a unit's gradient after the phase's operation at.
func (r *reducer) insert(s gradSpan, at int, kind graph.Kind, name string, in graph.BufID, out graph.Out, attr any) *graph.Node {
	var ins []graph.BufID
	if in != graph.NoBuf {
		ins = []graph.BufID{in}
	}
	op := newOp(kind, graph.MicroName(r.p.Units[s.unit].Name+"/"+name, s.micro), graph.Comm, graph.Backward, s.unit, ins, []graph.Out{out}, attr)
	op.Micro = s.micro
	return r.w.After(at, op)
}

// ownPart returns a view of the rank's own part of a unit's whole flat buffer.
func ownPart(p *graph.Program, flat graph.BufID, unit, axis int) graph.BufID {
	f := p.Buf(flat)
	n := f.Elems() / int64(p.Mesh[axis].Size)
	return p.AddBuffer(graph.Buffer{Name: f.Name + "/own", DType: f.DType, Shape: []int64{n}, Space: f.Space, Class: f.Class, Life: f.Life, Unit: unit,
		View: &graph.View{Base: flat, RankStride: n * f.DType.Size(), Axis: axis}})
}
