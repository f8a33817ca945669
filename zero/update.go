package zero

import (
	"cmp"

	"github.com/spillway-ml/spillway/graph"
)

// Target is the input of one unit's update: its gradient and states as laid out by the sharding
// rewrite. Grad, Value and States are flat buffers of Shard.Len elements.
type Target struct {
	Unit   int
	Name   string
	Shard  graph.ShardAttr
	Grad   graph.BufID
	Value  graph.BufID
	States []graph.BufID // in StateNames' order, flat ones first
	Scales []graph.BufID // by flat state: its scales if it has 8 bits; empty if the states are wider
	Low    graph.BufID   // the 16-bit copy of Value that the model computes with, or NoBuf
	After  []graph.Op    // operations after the rule: they gather the parameters, if every rank holds all of them
}

// counted returns the part of the gradient whose squares this rank adds to a norm that is then
// summed over the ranks of an axis. If every rank has the complete gradient, the first rank counts
// all of it. The other ranks count an empty range after the unit's end.
//
// If a unit is equal on all ranks of a tensor axis, only the first rank's squares count.
func (t *Target) counted(p *graph.Program, axis int) graph.ShardAttr {
	a := t.Shard
	if a.Axis < 0 {
		a.Axis = axis
	}
	if tensor := p.AxisOf(graph.TensorAxis); tensor >= 0 && p.Params[p.Units[t.Unit].Segments[0].Param].Split == nil {
		a.Once = 1 + tensor
	}
	return a
}

// Section returns the update of all targets as a section of kind SectionUpdate. Its phases are the
// parts of the update; a later pass decides where and when each runs:
//
//	start          norm ← 0
//	sum/u          norm += exact Σ g² of the unit
//	norm           norm summed over the ranks if gradients are sharded, or parameters cut, and over
//	               the stages of a pipeline; coef ← min(1, clip/norm);
//	               with p.Scaler: the flag that skips the step, and the next loss scale
//	rule/u         [per-parameter norms, summed over the ranks]  rule  [After]
//
// It adds its small buffers to p, sets p.GradNorm, and adds the step's Scalars. With p.Scaler the
// rules are skipped, on all ranks, in a step whose gradients are not finite.
func (o Optimizer) Section(p *graph.Program, targets []Target, clip float64) graph.Section {
	acc := small(p, "grad_norm_acc", graph.I64, ExactLimbs)
	e := &Emitter{o: &o, p: p, Coef: small(p, "clip_coef", graph.F32, 1), skip: graph.NoBuf}
	p.GradNorm = small(p, "grad_norm", graph.F64, 1)
	sec := graph.NewSection(graph.SectionUpdate, graph.FormWhole)
	part := func(kind graph.PhaseKind, name string) {
		sec.Phases = append(sec.Phases, graph.Phase{Name: name, Kind: kind, Repeat: 1, Ops: e.ops})
		e.ops = nil
	}
	e.Op(graph.Fill, "grad_norm/zero", -1, nil, []graph.Out{{Buf: acc}}, graph.FillAttr{})
	part(graph.UpdateStart, "start")
	axis := -1
	for i := range targets {
		axis = max(axis, targets[i].Shard.Axis)
	}
	for i := range targets {
		t := &targets[i]
		if p.Params[p.Units[t.Unit].Segments[0].Param].TiedTo > 0 {
			continue // counts on the stage that has the original parameter
		}
		e.Op(graph.SqSum, t.Name+"/grad_sq", t.Unit, []graph.BufID{t.Grad}, []graph.Out{{Buf: acc, Mode: graph.Accum}}, t.counted(p, axis))
		part(graph.UpdateSum, "sum/"+t.Name)
	}
	e.allReduce("grad_norm/all_reduce", acc, axis, -1)
	e.allReduce("grad_norm/all_reduce_tensor", acc, p.AxisOf(graph.TensorAxis), -1)
	e.allReduce("grad_norm/all_reduce_stages", acc, p.AxisOf(graph.PipelineAxis), -1)
	e.Op(graph.ClipCoef, "clip_coef", -1, []graph.BufID{acc, p.Hyper}, []graph.Out{{Buf: e.Coef}, {Buf: p.GradNorm}}, graph.ClipAttr{Max: clip})
	if sc := p.Scaler; sc != nil {
		e.skip = sc.Overflow
		e.Op(graph.OverflowCheck, "overflow_check", -1, []graph.BufID{acc}, []graph.Out{{Buf: e.skip}}, nil)
		if sc.State != graph.NoBuf {
			e.Op(graph.LossScaleUpdate, "loss_scale", -1, []graph.BufID{e.skip}, []graph.Out{{Buf: sc.State, Mode: graph.ReadWrite}}, cmp.Or(o.LossScale, graph.DefaultLossScale))
		}
	}
	part(graph.UpdateNorm, "norm")
	p.Scalars = append(p.Scalars, graph.Scalars{Hyper: p.Hyper, Coef: e.Coef, Skip: e.skip})
	for i := range targets {
		t := targets[i]
		o.Of(p, t.Unit).Emit(e, &t)
		e.ops = append(e.ops, t.After...)
		part(graph.UpdateRule, "rule/"+t.Name)
	}
	return sec
}

func small(p *graph.Program, name string, d graph.DType, n int64) graph.BufID {
	return p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{n}, Class: graph.Workspace, Life: graph.LifeStep, Unit: -1})
}

// Emitter adds the operations of a rule to the update.
type Emitter struct {
	Coef graph.BufID // f32 (1): factor by which a rule multiplies gradients

	o    *Optimizer
	p    *graph.Program
	skip graph.BufID
	ops  []graph.Op
}

// Op appends an operation of the update.
func (e *Emitter) Op(kind graph.Kind, name string, unit int, in []graph.BufID, out []graph.Out, attr any) *graph.Op {
	op := graph.NewOp(kind, name, in, out, attr)
	op.Pass, op.Unit = graph.Update, unit
	e.ops = append(e.ops, op)
	return &e.ops[len(e.ops)-1]
}

// allReduce sums a small buffer over the ranks of an axis. With axis −1 it does nothing, because
// each rank has the complete sum.
func (e *Emitter) allReduce(name string, buf graph.BufID, axis, unit int) {
	if axis >= 0 {
		e.Op(graph.AllReduce, name, unit, nil, []graph.Out{{Buf: buf, Mode: graph.ReadWrite}}, graph.GroupAttr{Axis: axis}).Stream = graph.Comm
	}
}

// Attr returns the attributes of a unit's rule.
func (e *Emitter) Attr(t *Target) graph.UpdateAttr {
	o := e.o
	return graph.UpdateAttr{Shard: t.Shard, Beta1: o.Beta1, Beta2: o.Beta2, Eps: o.Eps, Decay: o.Decay,
		Trust: o.Trust, Nesterov: o.Nesterov, AdaptAll: o.AdaptAll, Stochastic: o.BF16}
}

// Apply appends an operation that the step's skip flag can skip. It adds outputs for the 16-bit
// copy of the parameters, if there is one, and for the scales of states in 8 bits.
func (e *Emitter) Apply(t *Target, own *graph.Operation, name string, in []graph.BufID, out []graph.Out, attr graph.UpdateAttr) {
	if t.Low != graph.NoBuf || len(t.Scales) > 0 {
		out = append(out, graph.Out{Buf: t.Low})
	}
	e.own(own, t.Name+"/"+name, t.Unit, in, append(out, InPlace(t.Scales...)...), attr)
}

// ApplyOwn does the same as Apply for an operation that the rule defines (graph.Definition with
// Attr UpdateAttr). Its inputs are Scalars and any others of the definition. Its outputs are the
// parameters and states, in place. A rule that supports mixed precision also has graph.LowOut as
// the last output.
func (e *Emitter) ApplyOwn(t *Target, own *graph.Operation, in []graph.BufID, out []graph.Out) {
	e.Apply(t, own, string(own.Kind()), in, out, e.Attr(t))
}

// own appends an operation made by graph.Define that the step's skip flag can skip.
func (e *Emitter) own(own *graph.Operation, name string, unit int, in []graph.BufID, out []graph.Out, attr graph.UpdateAttr) {
	op := e.Op(own.Kind(), name, unit, in, out, attr)
	op.Own, op.Skip = own, e.skip
}

// update defines an operation of a rule whose kernels are in the kernel libraries. flops is its
// floating-point operations for each element.
func update(d graph.Definition, flops int64) *graph.Operation {
	d.Attr, d.Library = graph.UpdateAttr{}, true
	d.Flops = func(_ any, in, _ [][]int64) int64 { return flops * in[0][0] }
	return graph.MustDefine(d)
}

// Scalars returns the inputs of a rule that needs no norms: g, coef, hyper.
func (e *Emitter) Scalars(t *Target) []graph.BufID {
	return []graph.BufID{t.Grad, e.Coef, e.p.Hyper}
}

// Norms adds a buffer for a unit's per-parameter norms, two exact accumulators for each parameter.
// It zeroes the buffer, calls fill with the output that accumulates into it, and sums it over the
// ranks.
func (e *Emitter) Norms(t *Target, fill func(into graph.Out)) graph.BufID {
	buf := small(e.p, t.Name+"/norms", graph.I64, 2*int64(distinctParams(&e.p.Units[t.Unit]))*ExactLimbs)
	e.Op(graph.Fill, t.Name+"/norms/zero", t.Unit, nil, []graph.Out{{Buf: buf}}, graph.FillAttr{})
	fill(graph.Out{Buf: buf, Mode: graph.Accum})
	e.allReduce(t.Name+"/norms/all_reduce", buf, t.Shard.Axis, t.Unit)
	return buf
}

// ParamNorms does the same as Norms for the parameters and the gradients.
func (e *Emitter) ParamNorms(t *Target, a graph.UpdateAttr) graph.BufID {
	return e.Norms(t, func(into graph.Out) {
		e.Op(graph.ParamNorms, t.Name+"/norms", t.Unit, []graph.BufID{t.Value, t.Grad}, []graph.Out{into}, a)
	})
}

// InPlace returns outputs with mode ReadWrite.
func InPlace(ids ...graph.BufID) (out []graph.Out) {
	for _, id := range ids {
		out = append(out, graph.Out{Buf: id, Mode: graph.ReadWrite})
	}
	return out
}

func distinctParams(u *graph.Unit) int {
	seen := map[int]bool{}
	for _, s := range u.Segments {
		seen[s.Param] = true
	}
	return len(seen)
}
