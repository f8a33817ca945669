package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
)

// Run trains until Steps are done, evaluating and saving as configured, and tells
// each step. Where training ends early and the state is sound, a checkpoint of it is
// written first, if one is configured: a canceled context and an error from tell
// come back then, unless that checkpoint could not be had. ErrStop from tell is an end
// in good order: then there is no error.
//
// What surrounds the training does not end it: an evaluation that fails is told by
// Config.Warn; a checkpoint that can't be saved as well, and is tried again after
// each step, and twice at the end before that is an error.
func (t *Trainer) Run(ctx context.Context, tell func(StepResult) error) error {
	for t.at.Step < t.cfg.Steps {
		res, err := t.Step(ctx)
		if err != nil {
			return t.leave(err)
		}
		if err := t.goOn(t.settle(false)); err != nil {
			return err
		}
		last := t.at.Step == t.cfg.Steps
		if t.eval != nil && (last || t.cfg.EvalEvery > 0 && t.at.Step%t.cfg.EvalEvery == 0) {
			ev, err := t.Evaluate(ctx)
			switch {
			case err == nil:
				res.Eval = &ev
			case t.fatal != nil:
				return t.fatal
			case ctx.Err() == nil:
				t.cfg.Warnf("step %d: the evaluation failed: %v", t.at.Step, err)
			}
		}
		if tell != nil {
			if err := tell(res); err != nil {
				return t.stopped(t.leave(err))
			}
		}
		saves := t.saver != nil && t.saver.Worth() && (last || t.saver.Unsaved || t.cfg.SaveEvery > 0 && t.at.Step%t.cfg.SaveEvery == 0)
		if err := t.recordDue(saves, last); err != nil {
			return err
		}
		if saves {
			if err := t.saveOrGoOn(last); err != nil {
				return err
			}
		}
	}
	if t.saver == nil {
		return t.checkFinite()
	}
	if err := t.settle(true); err != nil && t.fatal == nil { // nothing was worth saving after it
		return t.saveOrGoOn(true)
	}
	t.saver.Idle()
	return t.fatal
}

// leave ends the run because of err. Between steps the state is sound: it is saved,
// if it is not already.
func (t *Trainer) leave(err error) error {
	t.settled()
	if t.fatal != nil || t.at.Step == 0 {
		return err
	}
	if t.saver == nil || t.saver.Saved() {
		return cmp.Or(t.recordOrWarn(false), err)
	}
	_, failed := t.Save(context.Background())
	if failed != nil {
		_, failed = t.Save(context.Background())
	}
	if failed != nil {
		return fmt.Errorf("after step %d (%v) the checkpoint can't be saved: %w", t.at.Step, err, failed)
	}
	return err
}

// stopped makes ErrStop the end of the run in good order.
func (t *Trainer) stopped(err error) error {
	switch {
	case !errors.Is(err, ErrStop):
		return err
	case t.fatal != nil:
		return t.fatal
	case t.saver == nil:
		return t.checkFinite()
	}
	return nil
}

// saveOrGoOn writes a checkpoint, whole, also where the run is to end: what was done
// would be lost. That it fails is an error only where the values
// are not finite, or at the last step, and then at the second try.
func (t *Trainer) saveOrGoOn(last bool) error {
	err := t.settle(true) // a save that falls behind delays this one
	switch {
	case t.fatal != nil:
		return t.fatal
	case !last && t.saver.Aside():
		if err := t.goOn(err); err != nil {
			return err
		}
		if err := t.flush(); err != nil {
			return t.goOn(err)
		}
		return t.goOn(t.saver.SaveAside(context.Background()))
	}
	_, err = t.Save(context.Background())
	if err != nil && last && t.fatal == nil {
		_, err = t.Save(context.Background())
	}
	if last && err != nil {
		return err
	}
	return t.goOn(err)
}

// endsTheJob tells whether a save failed because a rank was lost: there are no more steps.
func endsTheJob(err error) bool {
	return slices.ContainsFunc([]error{comm.ErrLost, comm.ErrTimeout, comm.ErrMismatch, comm.ErrAborted}, func(kind error) bool { return errors.Is(err, kind) })
}

// goOn makes a warning of a save that failed, of which training is independent: it is
// tried again.
func (t *Trainer) goOn(err error) error {
	switch {
	case t.fatal != nil:
		return t.fatal
	case err == nil:
	case endsTheJob(err):
		return fmt.Errorf("step %d: the checkpoint: %w", t.at.Step, err)
	case !t.saver.Unsaved:
		t.saver.Unsaved = true
		t.cfg.Warnf("%v; training goes on, and it is tried again after each step", err)
	}
	return nil
}

// unsound makes a save's finding that a state is not finite the run's divergence.
func (t *Trainer) unsound(found *checkpoint.NonFinite) error {
	for i := range t.plan.Program.Params {
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

// unsoundState is the divergence by the last update of a parameter's state, which
// is not finite.
func (t *Trainer) unsoundState(param int, state string) error {
	e := &Diverged{Step: t.at.Step, Rank: -1, Update: true}
	if _, err := t.nameState(e, param, state); err != nil {
		return errors.Join(t.diverged(e), err)
	}
	if e.What = "parameter"; state != "value" {
		e.What = "optimizer state " + state + " of"
	}
	e.Operation = t.ruleOf(t.plan.Program.Params[param].Unit)
	return t.diverged(e)
}

// diverged makes e the end of the run and has the store remember it.
func (t *Trainer) diverged(e *Diverged) error {
	t.fatal = e
	if t.saver != nil {
		t.saver.MarkDivergence(e.Step)
	}
	return e
}

// checkFinite looks at the parameters after the last step, where no checkpoint is
// written that would show what its update made of them.
func (t *Trainer) checkFinite() error {
	if err := t.flush(); err != nil {
		return err
	}
	for i := range t.plan.Program.Params {
		if t.plan.Program.Params[i].Frozen {
			continue
		}
		found, err := t.nameState(&Diverged{}, i, "value")
		if err != nil {
			return err
		}
		if found {
			return t.unsoundState(i, "value")
		}
	}
	return nil
}
