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

// Run trains until Steps are done, evaluates and saves as configured, and calls tell after each
// step. If training ends early with finite states, it first writes a checkpoint, if one is
// configured. Run then returns the error of a canceled context or of tell, or that of the
// checkpoint if it could not be saved. ErrStop from tell is an end in good order, without an
// error.
//
// A failed evaluation or save does not end the training; Config.Warn reports it. A failed save
// is tried again after each step, and twice at the end before it is an error.
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
	if err := t.settle(true); err != nil && t.fatal == nil { // after a fatal error nothing is worth saving
		return t.saveOrGoOn(true)
	}
	t.saver.Idle()
	return t.fatal
}

// leave ends the run because of err. Between steps the states are consistent, so they are saved
// if they are not already.
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

// stopped turns ErrStop into a nil error.
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

// saveOrGoOn writes a checkpoint, also when the run is about to end, since the work would be
// lost otherwise. A failure is an error only if values are not finite, or at the last step
// after a second try.
func (t *Trainer) saveOrGoOn(last bool) error {
	err := t.settle(true) // a save that is still being written delays this one
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

// endsTheJob tells whether a save failed because a rank was lost: then no more steps are
// possible.
func endsTheJob(err error) bool {
	return slices.ContainsFunc([]error{comm.ErrLost, comm.ErrTimeout, comm.ErrMismatch, comm.ErrAborted}, func(kind error) bool { return errors.Is(err, kind) })
}

// goOn turns a failed save into a warning: training does not depend on it, and the save is
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

// unsoundState is the Diverged error for a parameter's state that the last update made
// non-finite.
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

// diverged makes e the run's fatal error and records it in the store.
func (t *Trainer) diverged(e *Diverged) error {
	t.fatal = e
	if t.saver != nil {
		t.saver.MarkDivergence(e.Step)
	}
	return e
}

// checkFinite checks the parameters after the last step if no checkpoint is written, which
// would have found non-finite values.
func (t *Trainer) checkFinite() error {
	if err := t.flush(); err != nil {
		return err
	}
	for i := range t.plan.Program.Tensors() {
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
