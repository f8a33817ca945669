package exec

import (
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

// bind fills in o's kernel, stream and events, and returns the addresses of its operands.
func (e *Executor) bind(o *operation) (kernels.Binding, error) {
	op := o.op
	o.ran = new(atomic.Bool)
	if e.cfg.Trace != nil {
		o.flops, _ = graph.Cost(e.cfg.Program, op)
	}
	section := o.phase.section.graph
	o.idle = e.cfg.Program.Idle(section, o.phase.graph, op, e.rank)
	if op.Unit >= 0 && op.Unit < len(e.cfg.Program.Units) {
		o.unit = e.cfg.Program.Units[op.Unit].Name
	}
	b := kernels.Binding{Program: e.cfg.Program, Op: op, Coord: e.cfg.Coord, Present: section.Present(o.phase.graph, op)}
	place := func(id graph.BufID, to *device.Ptr) error {
		p, err := e.ptr(id)
		*to = p
		o.bytes += p.Len
		o.whole = max(o.whole, p.Len)
		return err
	}
	b.In, b.Out = make([]device.Ptr, len(op.In)), make([]device.Ptr, len(op.Out))
	for i, id := range op.In {
		if err := place(id, &b.In[i]); err != nil {
			return b, fmt.Errorf("input %d: %w", i, err)
		}
	}
	for i, out := range op.Out {
		if err := place(out.Buf, &b.Out[i]); err != nil {
			return b, fmt.Errorf("output %d: %w", i, err)
		}
	}
	if err := place(op.Work, &b.Work); err != nil {
		return b, fmt.Errorf("workspace: %w", err)
	}
	if err := place(op.Skip, &b.Skip); err != nil {
		return b, fmt.Errorf("predicate: %w", err)
	}
	var err error
	if o.stream, err = e.stream(op.Stream); err != nil {
		return b, err
	}
	for _, w := range op.Wait {
		ev, err := e.event(w)
		if err != nil {
			return b, fmt.Errorf("wait: %w", err)
		}
		o.wait = append(o.wait, ev)
	}
	if op.Record != 0 {
		if o.record, err = e.event(op.Record); err != nil {
			return b, fmt.Errorf("record: %w", err)
		}
	}
	if op.Kind == graph.Join || o.idle {
		return b, nil
	}
	switch op.Kind {
	case graph.Send, graph.Recv:
		o.kernel, err = e.bindPeer(o, b)
	case graph.Copy, graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll:
		o.kernel, err = e.bindTransfer(o, b)
	default:
		o.kernel, err = e.cfg.Library.Bind(b)
	}
	if err != nil {
		return b, err
	}
	if o.kernel == nil {
		return b, fmt.Errorf("%s: the library gave no kernel", op.Kind)
	}
	if reflect.TypeOf(o.kernel).Comparable() {
		e.byKernel[o.kernel] = o
	}
	return b, nil
}

// join replaces pairs of operations (graph.Pairs) by one kernel each, at the second's place, if the
// library can run them as one. The results stay the same. The first's inputs do not change before
// the second. No other operation reads its output in between, since operations on other streams
// wait for an event and the first records none.
func (e *Executor) join(ph *phase, bound []kernels.Binding) error {
	lib, ok := e.cfg.Library.(kernels.Joiner)
	if !ok {
		return nil
	}
	var wrong error
	graph.Pairs(ph.graph.Ops, graph.Compute, func(i, j int) bool {
		if wrong != nil || ph.ops[i].idle || ph.ops[j].idle {
			return false
		}
		k, err := lib.Join(bound[i], bound[j])
		if err != nil {
			wrong = fmt.Errorf("exec: rank %d, %s and %s: %w", e.rank, ph.ops[i].path(), ph.ops[j].path(), err)
		}
		if k == nil || err != nil {
			return false
		}
		first, second := &ph.ops[i], &ph.ops[j]
		first.alone, first.kernel, first.first = first.kernel, nil, true
		second.alone, second.kernel = second.kernel, k
		if reflect.TypeOf(k).Comparable() {
			e.byKernel[k] = second
		}
		return true
	})
	return wrong
}

// bindPeer binds one end of a message between two ranks of a mesh axis.
func (e *Executor) bindPeer(o *operation, b kernels.Binding) (device.Kernel, error) {
	a, ok := o.op.Attr.(graph.PeerAttr)
	if !ok {
		return nil, fmt.Errorf("%s: attribute %T, want graph.PeerAttr", o.op.Kind, o.op.Attr)
	}
	g := e.cfg.Groups[a.Axis]
	if g == nil {
		return nil, fmt.Errorf("%s: no group for mesh axis %d", o.op.Kind, a.Axis)
	}
	if o.op.Kind == graph.Send && len(b.In) == 1 {
		return g.Send(o.label(), b.In[0], e.cfg.Program.Buf(o.op.In[0]).DType, a.To)
	}
	if len(b.Out) != 1 {
		return nil, fmt.Errorf("%s has %d inputs and %d outputs, want one operand", o.op.Kind, len(b.In), len(b.Out))
	}
	return g.Recv(o.label(), b.Out[0], e.cfg.Program.Buf(o.op.Out[0].Buf).DType, a.From)
}

// bindTransfer binds a copy or a collective.
func (e *Executor) bindTransfer(o *operation, b kernels.Binding) (device.Kernel, error) {
	op := o.op
	ins := 1
	if op.Kind == graph.AllReduce {
		ins = 0
	}
	switch {
	case len(b.In) != ins || len(b.Out) < 1 || len(b.Out) > 1 && op.Kind != graph.ReduceScatter:
		return nil, fmt.Errorf("%s has %d inputs and %d outputs, want %d and 1", op.Kind, len(b.In), len(b.Out), ins)
	case b.Out[0].Arena == nil || ins == 1 && b.In[0].Arena == nil:
		return nil, fmt.Errorf("%s: an operand is absent", op.Kind)
	case b.Skip.Arena != nil:
		return nil, fmt.Errorf("%s with a predicate: copies and collectives always run", op.Kind)
	}
	label, dtype, mode := o.label(), e.cfg.Program.Buf(op.Out[0].Buf).DType, op.Out[0].Mode
	if op.Kind == graph.Copy {
		if mode != graph.Write {
			return nil, fmt.Errorf("copy with output mode %s, want %s", mode, graph.Write)
		}
		return e.cfg.Context.Copy(label, b.Out[0], b.In[0])
	}
	attr, ok := op.Attr.(graph.GroupAttr)
	if !ok {
		return nil, fmt.Errorf("%s: attribute %T, want graph.GroupAttr", op.Kind, op.Attr)
	}
	if ins == 1 {
		in := e.cfg.Program.Buf(op.In[0]).DType
		if leaves := op.Kind == graph.ReduceScatter && attr.Order == graph.SumSequential && dtype == graph.F32; in != dtype && !leaves {
			return nil, fmt.Errorf("%s from %s to %s, want one dtype", op.Kind, in, dtype)
		}
		dtype = in
	}
	g := e.cfg.Groups[attr.Axis]
	if g == nil {
		return nil, fmt.Errorf("%s: no group for mesh axis %d", op.Kind, attr.Axis)
	}
	switch {
	case op.Kind == graph.AllGather && mode == graph.Write:
		return g.AllGather(label, b.In[0], b.Out[0], dtype)
	case op.Kind == graph.ReduceScatter && len(b.Out) > 1:
		list, _, err := b.Spans(graph.ShardAttr{Unit: op.Unit, Axis: attr.Axis, Len: e.cfg.Program.Buf(op.Out[0].Buf).Elems()})
		if err != nil {
			return nil, err
		}
		squares := comm.Squares{Acc: b.Out[1]}
		for _, s := range list {
			squares.Spans = append(squares.Spans, [2]int{s.Lo, s.Hi})
		}
		return g.ReduceLeaves(label, b.In[0], b.Out[0], dtype, mode == graph.Accum, squares, b.Present...)
	case op.Kind == graph.ReduceScatter && mode != graph.ReadWrite:
		return g.ReduceScatter(label, b.In[0], b.Out[0], dtype, attr.Order, mode == graph.Accum, b.Present...)
	case op.Kind == graph.AllReduce && mode == graph.ReadWrite:
		return g.AllReduce(label, b.Out[0], dtype, attr.Order)
	case op.Kind == graph.AllToAll && mode == graph.Write:
		return g.AllToAll(label, b.In[0], b.Out[0], dtype)
	}
	return nil, fmt.Errorf("%s with output mode %s", op.Kind, mode)
}
