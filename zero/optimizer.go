package zero

import (
	"cmp"
	"fmt"
	"sort"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// ExactLimbs is the length of an exact accumulator in int64 (package
// kernels/cpu/exact, whose test holds it to this number).
const ExactLimbs = 72

// Optimizer is an update rule with its constants. What changes by step (rate,
// bias corrections, clip coefficient) reaches it through the Hyper buffer.
type Optimizer struct {
	Name         string // adamw, sgd, lamb, lars, larc, novograd
	Beta1, Beta2 float64
	Eps          float64
	Decay        float64 // on parameters whose Decay is set
	Trust        float64 // LARS and LARC: trust coefficient η
	Nesterov     bool    // SGD
	// AdaptAll adapts LAMB's, LARS's and LARC's rate to the norms of every
	// parameter, as the papers are written. Otherwise parameters without Decay
	// (biases, norms) keep the unadapted rate, as the recipes of these optimizers
	// do: a bias that starts at zero has no norm to adapt to.
	AdaptAll bool
	// LossScale is how the scale of a program that has one moves; its zero value
	// stands for graph.DefaultLossScale.
	LossScale graph.LossScaleAttr
	// Int8 keeps AdamW's moments in 8 bits (graph.State).
	Int8 bool
}

type rule struct {
	states []string // flat states beside the parameters
	perPar []string // states with one element a parameter
	norms  bool     // needs per-parameter norms of parameters and update (or gradient)
	source string
}

var rules = map[string]rule{
	"adamw":    {states: []string{"exp_avg", "exp_avg_sq"}, source: "Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019"},
	"sgd":      {states: []string{"momentum"}, source: "Sutskever et al., On the importance of initialization and momentum, ICML 2013"},
	"lamb":     {states: []string{"exp_avg", "exp_avg_sq"}, norms: true, source: "You et al., Large Batch Optimization for Deep Learning, ICLR 2020, algorithm 2"},
	"lars":     {states: []string{"momentum"}, norms: true, source: "You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017"},
	"larc":     {states: []string{"momentum"}, norms: true, source: "LARS with the local rate clipped at the global one (NVIDIA Apex)"},
	"novograd": {states: []string{"exp_avg"}, perPar: []string{"exp_avg_sq"}, norms: true, source: "Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments, 2019"},
}

// OptimizerNames lists the update rules in name order.
func OptimizerNames() []string {
	var names []string
	for n := range rules {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}

// Validate refuses unknown rules and constants out of range.
func (o Optimizer) Validate() error {
	if _, ok := rules[o.Name]; !ok {
		return fmt.Errorf("optimizer: %q is not known; use one of %s", o.Name, strings.Join(OptimizerNames(), ", "))
	}
	in01 := func(v float64) bool { return v >= 0 && v < 1 }
	switch {
	case !in01(o.Beta1):
		return fmt.Errorf("optimizer: beta1 %g is not in [0, 1)", o.Beta1)
	case !in01(o.Beta2):
		return fmt.Errorf("optimizer: beta2 %g is not in [0, 1)", o.Beta2)
	case !(o.Eps >= 0):
		return fmt.Errorf("optimizer: eps %g is negative or not a number", o.Eps)
	case !(o.Decay >= 0):
		return fmt.Errorf("optimizer: weight decay %g is negative or not a number", o.Decay)
	case o.Int8 && o.Name != "adamw":
		return fmt.Errorf("optimizer: 8-bit states are adamw's, not %s's", o.Name)
	case !(o.Trust >= 0):
		return fmt.Errorf("optimizer: trust coefficient %g is negative or not a number", o.Trust)
	}
	return nil
}

// StateNames returns the flat states of the rule, each as large as the
// parameters, and those with one element a parameter.
func (o Optimizer) StateNames() (flat, perParam []string) {
	r := rules[o.Name]
	return r.states, r.perPar
}

// Target is one unit's update: its gradients and resident values as laid out by
// the sharding rewrite. Grad, Value and States are flat buffers of Shard.Len
// elements.
type Target struct {
	Unit     int
	Name     string
	Shard    graph.ShardAttr
	Grad     graph.BufID
	Value    graph.BufID
	States   []graph.BufID // in StateNames' order, flat ones first
	Low      graph.BufID   // with HasLow: the 16-bit copy of Value that the model computes with
	HasLow   bool
	AfterOps func() []graph.Op
}

// EmitUpdate returns the operations of the update phase for all targets:
//
//	norm ← exact Σ g²  (summed over the ranks of axis where gradients are sharded)
//	coef ← min(1, clip/norm)
//	for each unit:  [per-parameter norms, summed over the ranks]  rule
//
// AfterOps of a target follow its rule. It allocates its small buffers in p and
// sets p.GradNorm.
//
// With p.Scaler the rules are skipped, on every rank together, in a step whose
// gradients are not finite, and the loss scale, where there is one, moves.
func (o Optimizer) EmitUpdate(p *graph.Program, targets []Target, clip float64) []graph.Op {
	r := rules[o.Name]
	var ops []graph.Op
	op := func(kind graph.Kind, name string, unit int, in []graph.BufID, out []graph.Out, attr any) *graph.Op {
		ops = append(ops, graph.Op{Kind: kind, Name: name, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf,
			Attr: attr, Stream: graph.Compute, Pass: graph.Update, Unit: unit})
		return &ops[len(ops)-1]
	}
	small := func(name string, d graph.DType, n int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: []int64{n}, Class: graph.Workspace, Life: graph.LifeStep, Unit: -1})
	}
	reduce := func(name string, buf graph.BufID, axis, unit int) {
		if axis >= 0 {
			op(graph.AllReduce, name, unit, nil, []graph.Out{{Buf: buf, Mode: graph.ReadWrite}}, graph.GroupAttr{Axis: axis}).Stream = graph.Comm
		}
	}
	acc := small("grad_norm_acc", graph.I64, ExactLimbs)
	coef := small("clip_coef", graph.F32, 1)
	p.GradNorm = small("grad_norm", graph.F64, 1)
	op(graph.Fill, "grad_norm/zero", -1, nil, []graph.Out{{Buf: acc}}, graph.FillAttr{})
	axis := -1
	for _, t := range targets {
		op(graph.SqSum, t.Name+"/grad_sq", t.Unit, []graph.BufID{t.Grad}, []graph.Out{{Buf: acc, Mode: graph.Accum}}, t.Shard)
		axis = t.Shard.Axis
	}
	reduce("grad_norm/all_reduce", acc, axis, -1)
	op(graph.ClipCoef, "clip_coef", -1, []graph.BufID{acc, p.Hyper}, []graph.Out{{Buf: coef}, {Buf: p.GradNorm}}, graph.ClipAttr{Max: clip})

	skip := graph.NoBuf
	if sc := p.Scaler; sc != nil {
		skip = sc.Overflow
		op(graph.OverflowCheck, "overflow_check", -1, []graph.BufID{acc}, []graph.Out{{Buf: skip}}, nil)
		if sc.State != graph.NoBuf {
			op(graph.LossScaleUpdate, "loss_scale", -1, []graph.BufID{skip}, []graph.Out{{Buf: sc.State, Mode: graph.ReadWrite}}, cmp.Or(o.LossScale, graph.DefaultLossScale))
		}
	}

	attr := func(t Target) graph.UpdateAttr {
		return graph.UpdateAttr{Shard: t.Shard, Beta1: o.Beta1, Beta2: o.Beta2, Eps: o.Eps, Decay: o.Decay,
			Trust: o.Trust, Nesterov: o.Nesterov, Clip: o.Name == "larc", AdaptAll: o.AdaptAll || o.Name == "novograd"}
	}
	rw := func(ids ...graph.BufID) (out []graph.Out) {
		for _, id := range ids {
			out = append(out, graph.Out{Buf: id, Mode: graph.ReadWrite})
		}
		return out
	}
	for _, t := range targets {
		a := attr(t)
		norms := graph.NoBuf
		rule := func(kind graph.Kind, name string, in []graph.BufID, out []graph.Out) {
			if t.HasLow && kind != graph.LAMBDirection {
				out = append(out, graph.Out{Buf: t.Low})
			}
			op(kind, t.Name+"/"+name, t.Unit, in, out, a).Skip = skip
		}
		if g := p.Buf(t.Grad); o.Name == "lamb" && g.DType != graph.F32 {
			// The direction takes the gradient's place: it needs f32.
			wide := p.AddBuffer(graph.Buffer{Name: t.Name + "/direction", DType: graph.F32, Shape: []int64{t.Shard.Len},
				Class: graph.Workspace, Life: graph.LifeStep, Unit: t.Unit})
			op(graph.Cast, t.Name+"/direction", t.Unit, []graph.BufID{t.Grad}, []graph.Out{{Buf: wide}}, nil)
			t.Grad = wide
		}
		if r.norms {
			norms = small(t.Name+"/norms", graph.I64, 2*int64(distinctParams(&p.Units[t.Unit]))*ExactLimbs)
			op(graph.Fill, t.Name+"/norms/zero", t.Unit, nil, []graph.Out{{Buf: norms}}, graph.FillAttr{})
			accum := graph.Out{Buf: norms, Mode: graph.Accum}
			if o.Name == "lamb" {
				rule(graph.LAMBDirection, "lamb_dir", []graph.BufID{t.Value, coef, p.Hyper},
					append(rw(t.Grad, t.States[0], t.States[1]), accum))
			} else {
				op(graph.ParamNorms, t.Name+"/norms", t.Unit, []graph.BufID{t.Value, t.Grad}, []graph.Out{accum}, a)
			}
			reduce(t.Name+"/norms/all_reduce", norms, t.Shard.Axis, t.Unit)
		}
		scalars := []graph.BufID{t.Grad, coef, p.Hyper}
		byParam := []graph.BufID{t.Grad, norms, coef, p.Hyper}
		switch o.Name {
		case "adamw":
			rule(graph.AdamW, "adamw", scalars, rw(t.Value, t.States[0], t.States[1]))
		case "sgd":
			rule(graph.SGD, "sgd", scalars, rw(t.Value, t.States[0]))
		case "lamb":
			rule(graph.LAMBApply, "lamb", byParam, rw(t.Value))
		case "lars", "larc":
			rule(graph.LARSApply, o.Name, byParam, rw(t.Value, t.States[0]))
		case "novograd":
			rule(graph.NovoGrad, "novograd", byParam, rw(t.Value, t.States[0], t.States[1]))
		}
		if t.AfterOps != nil {
			ops = append(ops, t.AfterOps()...)
		}
	}
	return ops
}

func distinctParams(u *graph.Unit) int {
	seen := map[int]bool{}
	for _, s := range u.Segments {
		seen[s.Param] = true
	}
	return len(seen)
}
