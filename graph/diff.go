package graph

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Differentiate appends the backward to a forward program: reverse mode over
// the operations of section "forward". It returns a new program in which every
// trainable parameter has a gradient buffer (Param.Grad, the parameter's shape,
// class Gradients, LifeStep).
//
//	forward:   a → f → b → g → c → head_loss → loss
//	after:     a → f → b → g → c → head_loss_grad → loss, dc │ g/dx: dc → db │ f/dx: db → da
//
// The gradient of Loss starts at 1. The derivatives of the loss operations multiply by Hyper's
// InvCount and LossScale.
//
//   - HeadLoss becomes HeadLossGrad at its place in the forward. It computes the loss and the
//     gradients in one sweep, so no logits are kept or recomputed.
//   - CrossEntropyGrad overwrites the logits unless a later operation reads them.
//   - The first gradient of a parameter in a micro-step is written; later ones (for a tied
//     head) accumulate. Every trainable parameter must reach the loss.
//   - Where a derivative is the identity, gradients share one buffer. A buffer is accumulated
//     into, or overwritten by an elementwise derivative, only while no other pending gradient
//     shares it. Otherwise the contribution goes to a new buffer and an Add joins the two. So the
//     residual stream's gradient is one buffer that each block adds to.
//   - Only gradients that a trainable parameter needs are computed: there is no backward below
//     the lowest trainable operation.
//
// Backward operations are named after the forward one ("h.0.mlp.c_fc/dw"), with
// Source its name, its Unit, and Pass Backward.
func Differentiate(p *Program) (*Program, error) {
	d := &differ{p: p.Clone(), grads: map[BufID]int{}, current: map[BufID]int{}, names: map[string]bool{}, views: map[[2]BufID]BufID{}}
	if err := d.run(); err != nil {
		return nil, err
	}
	return d.p, nil
}

func (d *differ) run() error {
	s := d.p.SectionOf(SectionForward, FormWhole)
	if s.Micro() == nil {
		return errors.New(`graph: differentiate: the program has no section "forward" with one phase; Builder makes one`)
	}
	if d.p.Loss == NoBuf {
		return errors.New("graph: differentiate: the program has no loss; add CrossEntropy, HeadLoss or SumLoss")
	}
	ph := &s.Phases[0]
	for i := range ph.Ops {
		if ph.Ops[i].Pass != Forward {
			return fmt.Errorf("graph: differentiate: operation %s is of the %v pass; want a forward program", ph.Ops[i].Name, ph.Ops[i].Pass)
		}
		d.names["op "+ph.Ops[i].Name] = true
	}
	for i := range d.p.Buffers {
		d.names[d.p.Buffers[i].Name] = true
	}
	d.fwd, d.nFwd, d.seedBuf = ph.Ops, BufID(len(d.p.Buffers)), NoBuf
	if err := d.number(); err != nil {
		return err
	}
	d.paramGrads()
	for i := range d.fwd {
		if d.fwd[i].Kind == HeadLoss {
			d.at(i)
			d.headLoss()
		}
	}
	for i := len(d.fwd) - 1; i >= 0 && d.err == nil; i-- {
		d.at(i)
		d.reverse()
	}
	if d.err != nil {
		return d.err
	}
	if err := d.unreached(); err != nil {
		return err
	}
	ph.Ops = append(d.fwd, d.bwd...)
	return nil
}

// number numbers all values and finds those that need gradients.
func (d *differ) number() error {
	params := map[BufID]int{}
	for i := range d.p.Params {
		params[d.p.Params[i].Value] = i
	}
	d.ins, d.outs = make([][]int, len(d.fwd)), make([][]int, len(d.fwd))
	for i := range d.fwd {
		d.at(i)
		info, ok := d.op.Info()
		if !ok {
			d.failf("unknown kind")
			return d.err
		}
		if err := info.Check(d.p, d.op); err != nil {
			return err
		}
		insig, outsig := info.Operands(d.op.Attr)
		needs := false
		for j, id := range d.op.In {
			v := -1
			if id != NoBuf {
				root, _ := d.p.Resolve(id, nil)
				var ok bool
				if v, ok = d.current[root]; !ok {
					nv := value{root: root, param: -1, grad: NoBuf}
					if k, ok := params[root]; ok {
						nv.param, nv.needs = k, !d.p.Params[k].Frozen
					}
					v = d.newValue(nv)
				}
				if d.vals[v].needs && slices.Contains(insig[j].Types, F32) {
					needs = true
					d.whole(id, insig[j].Name)
				}
			}
			d.ins[i] = append(d.ins[i], v)
		}
		for k, o := range d.op.Out {
			v := -1
			if o.Buf != NoBuf {
				root, _ := d.p.Resolve(o.Buf, nil)
				if needs {
					d.whole(o.Buf, outsig[k].Name)
					if o.Mode == Accum && root != d.p.Loss {
						d.failf("output %s accumulates; only the loss may, in a forward program", outsig[k].Name)
					}
				}
				if _, ok := params[root]; ok {
					d.failf("writes parameter %s", d.p.Buffers[root].Name)
				}
				v = d.newValue(value{root: root, param: -1, needs: needs, stat: outsig[k].Stat, grad: NoBuf})
			}
			d.outs[i] = append(d.outs[i], v)
		}
		if d.err != nil {
			return d.err
		}
	}
	return nil
}

// whole rejects a view of a part of a buffer: its gradient would be a part of a gradient
// buffer whose other parts are written by other operations.
func (d *differ) whole(id BufID, operand string) {
	root, lo, hi := Span(d.p, id)
	if r := &d.p.Buffers[root]; lo != 0 || hi != r.Bytes() {
		d.failf("operand %s (%s) is a view of a part of %s, through which no gradient flows; want a view of all of it",
			operand, d.p.Buffers[id].Name, r.Name)
	}
}

func (d *differ) paramGrads() {
	for i := range d.p.Params {
		pr := &d.p.Params[i]
		if pr.Frozen {
			continue
		}
		pr.Grad = d.buffer(pr.Name+".grad", Buffer{DType: F32, Shape: pr.Shape, Class: Gradients, Life: LifeStep, Unit: pr.Unit})
	}
}

func (d *differ) unreached() error {
	begun := make([]bool, len(d.p.Params))
	for i := range d.vals {
		if v := &d.vals[i]; v.param >= 0 && v.begun {
			begun[v.param] = true
		}
	}
	var lost []string
	for i := range d.p.Params {
		if !d.p.Params[i].Frozen && !begun[i] {
			lost = append(lost, d.p.Params[i].Name)
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return fmt.Errorf("graph: differentiate: the loss does not depend on %s; freeze what is not trained, or take it out", strings.Join(lost, ", "))
}

// reverse adds the backward of the current operation, if the loss depends on its result.
func (d *differ) reverse() {
	dead := true
	for _, v := range d.outs[d.i] {
		if v < 0 {
			continue
		}
		if d.vals[v].grad != NoBuf && d.vals[v].stat {
			d.failf("a gradient reaches its statistic %s", d.p.Buffers[d.vals[v].root].Name)
		}
		dead = dead && !(d.vals[v].needs && (d.vals[v].grad != NoBuf || d.vals[v].root == d.p.Loss))
	}
	if dead || d.err != nil || d.op.Kind == HeadLossGrad {
		return
	}
	info, _ := d.op.Info()
	derive := info.derivative()
	if derive == nil {
		d.failf("the kind has no derivative")
		return
	}
	derive(d)
	for _, v := range d.outs[d.i] {
		if v >= 0 {
			d.drop(v)
		}
	}
}

// headLoss replaces HeadLoss by HeadLossGrad at the same place.
func (d *differ) headLoss() {
	dx, dw := d.openWrite(0), d.open(1)
	if dx.none() && dw.none() {
		return
	}
	d.inPlace = true
	op := d.op
	op.Kind, op.Source, op.Pass = HeadLossGrad, op.Name, Backward
	op.In = append(op.In, d.hyper())
	op.Out = append(op.Out, dx.out, dw.out)
	if err := Check(d.p, op); err != nil && d.err == nil {
		d.err = err
	}
	d.close("dx", dx)
	d.close("dw", dw)
}
