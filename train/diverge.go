package train

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
)

// stopsNonFinite tells whether each step waits before its update until the host has checked
// that it is finite. A program with a Scaler skips such updates itself, so it need not wait.
func (t *Trainer) stopsNonFinite() bool { return t.plan.Program.Scaler == nil && t.updates() }

// gate reports whether a rank's update may run: whether the step is finite so far. Loss and norm
// are sums over all ranks, so every rank decides alike.
func (t *Trainer) gate(r *run.Rank, norm bool) (bool, error) {
	loss, err := r.Exec.HostF64(t.ports[graph.PortLoss])
	if err != nil || !norm {
		return err == nil && isFinite(loss[0]), err
	}
	v, err := r.Exec.Scalar(t.plan.Program.GradNorm)
	return isFinite(loss[0]) && isFinite(v), err
}

// gradNorm returns the step's gradient norm, or 0 if it did not compute one: the host copy of
// the norm is written with the update.
func (t *Trainer) gradNorm(at *stepAt) (norm float64, err error) {
	if !at.stopped {
		return t.hostF64(t.ports[graph.PortGradNorm])
	}
	if at.noNorm = len(t.overlappingRules(at.section)) > 0; at.noNorm {
		return 0, nil
	}
	err = t.ranks.Each("the gradient norm", func(r *run.Rank) (err error) {
		v, err := r.Exec.Scalar(t.plan.Program.GradNorm)
		if r.Slot == 0 {
			norm = v
		}
		return err
	})
	return norm, err
}

// nonFinite decides whether a non-finite step is skipped or ends the run.
func (t *Trainer) nonFinite(at *stepAt, loss, norm float64) (skipped bool, err error) {
	e := &Diverged{Step: at.index + 1, Loss: loss, GradNorm: norm, Rank: -1, Skips: t.cfg.SkipsNonFinite()}
	if t.scales() && !isFinite(norm) {
		t.inRow++
		t.at.Skipped++
		if t.overflowed(e, at.hyper[graph.HyperLossScale]) {
			return true, nil
		}
		e.Skipped = t.inRow
		if err := t.name(e, at); err != nil {
			return false, fmt.Errorf("%w; looking for the tensor failed: %w", e, err)
		}
		return false, e
	}
	if t.cfg.SkipsNonFinite() && !isFinite(norm) {
		t.inRow++
		t.at.Skipped++
		if t.inRow < config.MaxSkips {
			return true, nil
		}
		e.Skipped = t.inRow
	}
	if e.Skipped == 0 { // the previous step's pending update has been applied
		t.confirm()
	}
	if err := t.name(e, at); err != nil {
		return false, fmt.Errorf("%w; looking for the tensor failed: %w", t.diverged(e), err)
	}
	return false, t.diverged(e)
}

// name finds the first non-finite tensor of a step by running the step again without its update. If
// updates overlapped with the backward, the parameters have changed since then. In that case the
// gradient is found from the optimizer's states that it changed.
func (t *Trainer) name(e *Diverged, at *stepAt) error {
	if rules := t.overlappingRules(at.section); len(rules) > 0 && !at.stopped {
		e.Overwritten = true
		return t.nameFromStates(e, rules)
	}
	list := make([]*exec.NonFinite, len(t.micro))
	err := t.ranks.Each(fmt.Sprintf("the search in step %d", at.index+1), func(r *run.Rank) (err error) {
		micro := 0
		list[r.Slot], err = r.Exec.FindNonFinite(at.section, t.inputsOf(r, at, &micro))
		return err
	})
	if err != nil {
		return err
	}
	var first *exec.NonFinite
	for _, f := range list {
		if f != nil && (first == nil || f.At < first.At) {
			first = f
		}
	}
	if first == nil {
		return nil
	}
	e.Rank, e.Tensor, e.Value, e.Operation = first.Rank, fmt.Sprintf("%q", first.Buffer), first.Value, first.Phase+"/"+first.Op.Name
	switch {
	case first.Input != "" || first.Op.Kind == graph.AllGather:
		if found, err := t.nameParameter(e, first.Op.Unit); found || err != nil {
			return err
		}
		e.What = "forward value"
		if first.Input != "" { // only on this rank: its copy of a parameter
			e.What, e.Tensor = "copy of a parameter", fmt.Sprintf("%q", first.Input)
		}
	case first.Loss:
		e.What = "loss"
	case first.Op.Pass == graph.Backward:
		e.What = "gradient"
	default:
		e.What = "forward value"
	}
	return nil
}

// nameParameter finds the first non-finite parameter: of one unit, or of all if unit is −1. The
// previous step's update made it non-finite.
func (t *Trainer) nameParameter(e *Diverged, unit int) (bool, error) {
	chunk := run.NewChunk(t.plan.Program)
	for i := range t.plan.Program.Tensors() {
		if unit >= 0 && t.plan.Program.Params[i].Unit != unit {
			continue
		}
		found, err := t.nameState(e, i, "value", chunk)
		if err != nil || !found {
			if err != nil {
				return false, err
			}
			continue
		}
		e.What, e.Operation = "parameter", t.ruleOf(t.plan.Program.Params[i].Unit)
		return true, nil
	}
	return false, nil
}

// nameState describes a parameter's state in e if it is not finite. It reads through chunk.
func (t *Trainer) nameState(e *Diverged, param int, state string, chunk []float32) (bool, error) {
	found := false
	err := t.states.Stream(param, state, chunk, func(start int64, v []float32) error {
		var odd checkpoint.NonFinite
		if odd.Look(start, v); odd.Count == 0 || found {
			return nil
		}
		found = true
		e.Tensor, e.Value = fmt.Sprintf("%q", t.plan.Program.Params[param].Name), float64(v[odd.First-start])
		return t.states.Extents(param, state, odd.First, 1, func(x run.Extent) error { e.Rank = x.Holders[0]; return nil })
	})
	return found, err
}

// ruleOf names the operation that updates a unit.
func (t *Trainer) ruleOf(unit int) string {
	for i := range t.plan.Program.Sections {
		sec := &t.plan.Program.Sections[i]
		for k := range sec.Phases {
			for _, op := range sec.Phases[k].Ops {
				if op.Unit == unit && isRule(&op) {
					return sec.Phases[k].Name + "/" + op.Name
				}
			}
		}
	}
	return "init"
}

// isRule tells whether an operation is an optimizer's update, judged by its inputs.
func isRule(op *graph.Op) bool {
	_, ok := op.Attr.(graph.UpdateAttr)
	return ok && op.Kind != graph.ParamNorms
}

// overlappingRules lists the update operations that a section runs before its
// gradient norm is known, in program order.
func (t *Trainer) overlappingRules(section string) (list []*graph.Op) {
	sec := t.plan.Program.Section(section)
	for i := range sec.Phases {
		ph := &sec.Phases[i]
		for k := range ph.Ops {
			if op := &ph.Ops[k]; ph.Kind != graph.UpdatePhase && isRule(op) && op.Skip == graph.NoBuf {
				list = append(list, op)
			}
		}
	}
	return list
}

// nameFromStates finds the first non-finite gradient, in the order of the updates, from the
// states that updates overlapped with the backward have written.
func (t *Trainer) nameFromStates(e *Diverged, rules []*graph.Op) error {
	done, chunk := map[int]bool{}, run.NewChunk(t.plan.Program)
	for _, op := range rules {
		if done[op.Unit] {
			continue
		}
		done[op.Unit] = true
		for i := range t.plan.Program.Tensors() {
			if t.plan.Program.Params[i].Unit != op.Unit {
				continue
			}
			for _, st := range t.states.Names(i) {
				if st.PerParam {
					continue
				}
				if found, err := t.nameState(e, i, st.Name, chunk); found || err != nil {
					e.What, e.Operation = "gradient of parameter", op.Name
					return err
				}
			}
		}
	}
	_, err := t.nameParameter(e, -1)
	return err
}

// diverged makes e the run's fatal error and records it in the store.
func (t *Trainer) diverged(e *Diverged) error {
	t.fatal = e
	if t.saver != nil {
		t.saver.MarkDivergence(e.Step)
	}
	return e
}

// unsound turns a save's error about a non-finite state into the run's Diverged error.
func (t *Trainer) unsound(found *checkpoint.NonFinite) error {
	for i := range t.plan.Program.Tensors() {
		if t.plan.Program.Params[i].Name != found.Tensor {
			continue
		}
		state := strings.TrimSuffix(found.State, checkpoint.ScaleSuffix)
		if state == checkpoint.ModelState {
			state = "value"
		}
		return t.unsoundState(i, state)
	}
	return t.diverged(&Diverged{Step: t.at.Step, Rank: -1, Update: true})
}

// unsoundState returns the Diverged error for a parameter's state that the last update made
// non-finite.
func (t *Trainer) unsoundState(param int, state string) error {
	e := &Diverged{Step: t.at.Step, Rank: -1, Update: true}
	if _, err := t.nameState(e, param, state, run.NewChunk(t.plan.Program)); err != nil {
		return errors.Join(t.diverged(e), err)
	}
	if e.What = "parameter"; state != "value" {
		e.What = "optimizer state " + state + " of"
	}
	e.Operation = t.ruleOf(t.plan.Program.Params[param].Unit)
	return t.diverged(e)
}
