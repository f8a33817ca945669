package fsdp

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// observeLoss zeroes the loss at the start of a step, sums it over the ranks at the end, and
// copies it to the host.
func (s *sharder) observeLoss(ph *graph.Phase, first, last bool) {
	if s.losses.leaf != graph.NoBuf {
		s.observeLeaf(ph, first, last)
		return
	}
	p, w := s.p, graph.NewEditor(ph)
	defer w.Commit()
	if p.Loss == graph.NoBuf || !writes(w, p.Loss) {
		return
	}
	if first {
		w.Before(0, zeroLoss("loss/zero", p.Loss))
	}
	if !last {
		return
	}
	for i, group := range s.dataRanks() {
		name := "loss/all_reduce"
		if i > 0 {
			name += "_replicas"
		}
		w.Append(allReduce(name, graph.Forward, p.Loss, group))
	}
	s.overStages(w, p.Loss)
	s.toHost(w, "loss/out", p.Loss, graph.PortLoss, graph.Forward)
}

// zeroLoss, allReduce and toHost return or add operations without a unit.
func zeroLoss(name string, id graph.BufID) graph.Op {
	return newOp(graph.Fill, name, graph.Compute, graph.Forward, -1, nil, []graph.Out{{Buf: id}}, graph.FillAttr{})
}

func allReduce(name string, pass graph.Pass, id graph.BufID, group graph.GroupAttr) graph.Op {
	return newOp(graph.AllReduce, name, graph.Comm, pass, -1, nil, []graph.Out{{Buf: id, Mode: graph.ReadWrite}}, group)
}

// toHost adds a copy to a port, if the program has it.
func (s *sharder) toHost(w *graph.Editor, name string, from graph.BufID, port graph.Port, pass graph.Pass) {
	if host := s.p.Port(port); host != graph.NoBuf {
		w.Append(graph.NewCopy(name, from, host, graph.CopyOut, pass, -1))
	}
}

// dataRanks returns the groups over which losses of different data are summed, in sequence. Ranks
// of the tensor axis have the same loss. If layers are cut, the order of the sum is the same with
// and without that axis. In a pipeline only the last stage adds to the loss (overStages).
func (s *sharder) dataRanks() (groups []graph.GroupAttr) {
	cut := slices.ContainsFunc(s.p.Params, func(q graph.Param) bool { return q.Split != nil })
	switch {
	case s.p.DataRanks() == 1:
		return nil
	case !cut && s.p.AxisOf(graph.PipelineAxis) < 0:
		return []graph.GroupAttr{{Axis: -1}}
	case s.ranks > 1:
		groups = append(groups, s.group())
	}
	if s.replicas > 1 {
		groups = append(groups, graph.GroupAttr{Axis: s.replicate})
	}
	return groups
}

// overStages sends the loss to all stages of a pipeline: stages before the last one have 0.
func (s *sharder) overStages(w *graph.Editor, loss graph.BufID) {
	if axis := s.p.AxisOf(graph.PipelineAxis); axis >= 0 {
		w.Append(allReduce("loss/all_reduce_stages", graph.Forward, loss, graph.GroupAttr{Axis: axis}))
	}
}

// leafLosses has the buffers of a loss that is summed leaf by leaf: micro-batch by micro-batch, and
// within one by rank.
type leafLosses struct {
	leaf  graph.BufID // F64 (n), n as in the model's loss: this rank's loss of a micro-batch; NoBuf if losses are not summed leaf by leaf
	ranks graph.BufID // F64 (n·W): all ranks' losses; NoBuf for one rank
	sum   graph.BufID // F64 (n): sum over the micro-batches so far, on every rank
}

// splitLoss makes the program's Loss the sum of the leaves, and gives the model a separate buffer
// for the loss of one leaf.
func (s *sharder) splitLoss() {
	p := s.p
	s.losses = leafLosses{graph.NoBuf, graph.NoBuf, graph.NoBuf}
	if p.Loss == graph.NoBuf || !s.o.leaves(p.DataRanks()) {
		return
	}
	// The ranks' losses are in one buffer with the sum and have its lifetime: the operations that
	// finish the loss may run before their place in the program (the gate of package exec).
	b, w := *p.Buf(p.Loss), int64(p.DataRanks())
	if w == 1 {
		w = 0 // one rank needs no buffer for the ranks' losses
	}
	n := b.Elems()
	b.Name, b.Shape, b.Life = b.Name+"/all", []int64{n * (1 + w)}, graph.LifeStep
	all := p.AddBuffer(b)
	part := func(what string, from, n int64) graph.BufID {
		v := b
		v.Name, v.Shape, v.View = "loss/"+what, []int64{n}, &graph.View{Base: all, Offset: from * b.DType.Size()}
		return p.AddBuffer(v)
	}
	s.losses.leaf, s.losses.sum = p.Loss, part("sum", 0, n)
	if w > 0 {
		s.losses.ranks = part("leaves", n, n*w)
	}
	p.Loss = s.losses.sum
}

// observeLeaf adds the ranks' losses of each micro-batch to the sum in rank order: a sequential
// sum of doubles over the leaves. It zeroes the sum before the first micro-batch, and copies it to
// the host after the last.
func (s *sharder) observeLeaf(ph *graph.Phase, first, last bool) {
	l, w := s.losses, graph.NewEditor(ph)
	defer w.Commit()
	if !writes(w, l.leaf) {
		return
	}
	w.Before(0, zeroLoss("loss/zero", l.leaf))
	if first {
		w.Before(0, zeroLoss("loss/sum/zero", l.sum))
	}
	for micro := range ph.MicroBatches() {
		begin, end := lossOf(w, l.leaf, micro)
		of := func(op graph.Op) graph.Op {
			op.Name, op.Micro = graph.MicroName(op.Name, micro), micro
			return op
		}
		if micro > 0 {
			w.Before(begin, of(zeroLoss("loss/zero", l.leaf)))
		}
		from := l.leaf
		add := func(op graph.Op) { w.After(end, of(op)) }
		if ph.MicroBatches() == 1 {
			add = func(op graph.Op) { w.Append(op) } // after the backward, which need not wait for it
		}
		if l.ranks != graph.NoBuf {
			from = l.ranks
			add(newOp(graph.AllGather, "loss/all_gather", graph.Comm, graph.Forward, -1, []graph.BufID{l.leaf}, []graph.Out{{Buf: l.ranks}}, s.dataRanks()[0]))
		}
		add(newOp(graph.SumParts, "loss/add_leaves", graph.Comm, graph.Forward, -1, []graph.BufID{from}, []graph.Out{{Buf: l.sum, Mode: graph.Accum}}, graph.SumPartsAttr{Order: graph.SumSequential}))
	}
	if last {
		s.overStages(w, l.sum)
		s.toHost(w, "loss/out", l.sum, graph.PortLoss, graph.Forward)
	}
}

// observeSquares zeroes the sum of the leaves' squares before the first leaf. After the last leaf
// it sums it over the ranks, since each rank has squared different parts of the leaves. Then it
// copies it to the host.
func (s *sharder) observeSquares(ph *graph.Phase, first, last bool) {
	if s.squares == graph.NoBuf || !slices.ContainsFunc(s.p.Units, func(u graph.Unit) bool { return u.Grad != nil }) {
		return
	}
	w := graph.NewEditor(ph)
	defer w.Commit()
	if first {
		w.Before(0, newOp(graph.Fill, "squares/zero", graph.Comm, graph.Backward, -1, nil, []graph.Out{{Buf: s.squares}}, graph.FillAttr{}))
	}
	if !last {
		return
	}
	if s.ranks > 1 {
		w.Append(allReduce("squares/all_reduce", graph.Backward, s.squares, s.group()))
	}
	s.toHost(w, "squares/out", s.squares, graph.PortSquares, graph.Backward)
}

// lossOf returns the first and last operation that adds to the loss of a micro-batch.
func lossOf(w *graph.Editor, leaf graph.BufID, micro int) (first, last int) {
	first = -1
	for i, n := range w.Base {
		if n.Op.Micro != micro {
			continue
		}
		for _, o := range n.Op.Out {
			if o.Buf == leaf {
				if first < 0 {
					first = i
				}
				last = i
			}
		}
	}
	return first, last
}

// forwardSection lays out a section without a backward. If losses are summed leaf by leaf, an
// evaluation has the same number of micro-batches as a step:
//
//	zero   sum ← 0
//	micro  forward, sum += losses     × micro-steps
//	out    sum → host
func (s *sharder) forwardSection(sec *graph.Section) graph.Section {
	out := *sec
	if s.losses.leaf == graph.NoBuf || s.o.Accum == 1 || sec.Kind != graph.SectionEval || sec.Micro() == nil {
		for j := range out.Phases {
			s.observeLoss(&out.Phases[j], true, true)
		}
		return out
	}
	one := func(name string, ops func(w *graph.Editor)) graph.Phase {
		ph := graph.Phase{Name: name, Repeat: 1}
		w := graph.NewEditor(&ph)
		ops(w)
		w.Commit()
		return ph
	}
	zero := one("zero", func(w *graph.Editor) { w.Append(zeroLoss("loss/sum/zero", s.losses.sum)) })
	out.Phases, out.Shares = []graph.Phase{zero}, s.o.Shares
	for name, round := range runs(s.o.Shares, sec.Phases[0].Name, 0, s.o.Accum) {
		micro := sec.Phases[0]
		micro.Name, micro.Round, micro.Repeat = name, round.first, round.repeat
		s.observeLeaf(&micro, false, false)
		out.Phases = append(out.Phases, micro)
	}
	if s.p.Port(graph.PortLoss) != graph.NoBuf {
		out.Phases = append(out.Phases, one("out", func(w *graph.Editor) {
			s.overStages(w, s.losses.sum)
			s.toHost(w, "loss/out", s.losses.sum, graph.PortLoss, graph.Forward)
		}))
	}
	return out
}

func writes(w *graph.Editor, id graph.BufID) bool {
	for _, n := range w.Base {
		for _, o := range n.Op.Out {
			if o.Buf == id {
				return true
			}
		}
	}
	return false
}

// initScale initialises the state of the loss scale.
func (s *sharder) initScale() []graph.Op {
	if s.p.Scaler == nil || s.p.Scaler.State == graph.NoBuf {
		return nil
	}
	slot := func(name string, i int64, v float64) graph.Op {
		state := s.p.Buf(s.p.Scaler.State)
		id := s.p.AddBuffer(graph.Buffer{Name: state.Name + "/" + name, DType: state.DType, Shape: []int64{1}, Space: state.Space,
			Class: state.Class, Life: state.Life, Unit: -1, View: &graph.View{Base: s.p.Scaler.State, Offset: i * state.DType.Size()}})
		return newOp(graph.Fill, "loss_scale/"+name, graph.Compute, graph.Update, -1, nil, []graph.Out{{Buf: id}}, graph.FillAttr{Value: v})
	}
	return []graph.Op{slot("value", graph.ScaleValue, graph.InitialLossScale), slot("clean", graph.ScaleClean, 0)}
}

// observeScale copies the loss scale and the flag of a skipped step to the host.
func (s *sharder) observeScale(w *graph.Editor) {
	if c := s.p.Scaler; c != nil {
		s.toHost(w, "loss_scale/out", c.State, graph.PortScale, graph.Update)
		s.toHost(w, "overflow/out", c.Overflow, graph.PortOverflow, graph.Update)
	}
}
