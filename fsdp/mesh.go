package fsdp

import "github.com/spillway-ml/spillway/graph"

// insert adds an operation on gradients after the last write of g's.
func (s *sharder) insert(w *graph.Editor, g gradSpan, kind graph.Kind, name string, in graph.BufID, out graph.Out, attr any) *graph.Node {
	var ins []graph.BufID
	if in != graph.NoBuf {
		ins = []graph.BufID{in}
	}
	return w.After(g.last, newOp(kind, s.p.Units[g.unit].Name+"/"+name, graph.Comm, graph.Backward, g.unit, ins, []graph.Out{out}, attr))
}

// reduceWhole sums a whole gradient over the shard axis, leaving the rank's part
// of it (stages above 0) or all of it, and where final over the replicas. The
// order of the sum is the same at every stage: ranks of a shard group first, then
// the groups.
//
// With both axes and stage 0 the part alone crosses between replicas, which are
// on different nodes, and is gathered again:
//
//	grad 1/4   reduce_scatter ─ all_reduce over replicas ─ all_gather   grad
func (s *sharder) reduceWhole(w *graph.Editor, g gradSpan, whole, part graph.BufID, final bool) {
	switch {
	case s.ranks == 1:
		s.allReduceReplicas(w, g, whole, final)
	case s.o.Stage.ShardsStates():
		s.insert(w, g, graph.ReduceScatter, "reduce_scatter", whole, graph.Out{Buf: part}, s.group())
		s.allReduceReplicas(w, g, part, final)
	case final && s.replicas > 1:
		own := s.own(whole, g.unit)
		s.insert(w, g, graph.ReduceScatter, "reduce_scatter", whole, graph.Out{Buf: own}, s.group())
		s.allReduceReplicas(w, g, own, true)
		s.insert(w, g, graph.AllGather, "grad_all_gather", own, graph.Out{Buf: whole}, s.group())
	default:
		s.insert(w, g, graph.AllReduce, "all_reduce", graph.NoBuf, graph.Out{Buf: whole, Mode: graph.ReadWrite}, s.group())
	}
}

// reduceReplicas sums what a unit's gradients have become over the replicas,
// after the last micro-step.
func (s *sharder) reduceReplicas(w *graph.Editor, g gradSpan, last bool) {
	s.allReduceReplicas(w, g, s.units[g.unit].gradShard, last)
}

func (s *sharder) allReduceReplicas(w *graph.Editor, g gradSpan, buf graph.BufID, final bool) {
	if final && s.replicas > 1 {
		s.insert(w, g, graph.AllReduce, "all_reduce_replicas", graph.NoBuf, graph.Out{Buf: buf, Mode: graph.ReadWrite}, graph.GroupAttr{Axis: s.replicate})
	}
}
