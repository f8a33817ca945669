package fsdp

import "github.com/spillway-ml/spillway/graph"

// observeLoss zeroes the loss at the start of a step, sums it over the ranks at
// its end and copies it to the host.
func (s *sharder) observeLoss(ph *graph.Phase, first, last bool) {
	p, w := s.p, graph.NewEditor(ph)
	defer w.Commit()
	if p.Loss == graph.NoBuf || !writes(w, p.Loss) {
		return
	}
	if first {
		w.Before(0, newOp(graph.Fill, "loss/zero", graph.Compute, graph.Forward, -1, nil, []graph.Out{{Buf: p.Loss}}, graph.FillAttr{}))
	}
	if !last {
		return
	}
	if p.WorldSize() > 1 {
		w.Append(newOp(graph.AllReduce, "loss/all_reduce", graph.Comm, graph.Forward, -1, nil, []graph.Out{{Buf: p.Loss, Mode: graph.ReadWrite}}, graph.GroupAttr{Axis: -1}))
	}
	if host := p.Port(graph.PortLoss); host != graph.NoBuf {
		w.Append(graph.NewCopy("loss/out", p.Loss, host, graph.CopyOut, graph.Forward, -1))
	}
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

// initScale gives the loss scale its first value.
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

// observeScale tells the host of the loss scale and of a skipped step.
func (s *sharder) observeScale(w *graph.Editor) {
	c := s.p.Scaler
	if c == nil {
		return
	}
	out := func(name string, from graph.BufID, port graph.Port) {
		if to := s.p.Port(port); to != graph.NoBuf {
			w.Append(graph.NewCopy(name, from, to, graph.CopyOut, graph.Update, -1))
		}
	}
	out("loss_scale/out", c.State, graph.PortScale)
	out("overflow/out", c.Overflow, graph.PortOverflow)
}
