package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/run"
)

// Run trains until Steps are done, evaluates and saves as configured, and calls tell after each
// step. If training ends early with finite states, it first writes a checkpoint, if one is
// configured. Run then returns the error of a canceled context or of tell, or that of the
// checkpoint if it could not be saved. If tell returns ErrStop, the run ends in good order, without
// an error.
//
// If the last evaluation was canceled, Run does it first: see StepResult.EvalOnly.
//
// A failed evaluation or save does not end the training; Config.Warn reports it. A failed save is
// tried again after each step, and twice at the end before it is an error.
func (t *Trainer) Run(ctx context.Context, tell func(StepResult) error) error {
	return t.RunTold(ctx, tell, nil)
}

// RunTold is Run that also reports the progress of evaluations. It calls evaluating before the
// first batch and after each one, with the step's result, the number of EvalSteps done and the mean
// loss so far.
func (t *Trainer) RunTold(ctx context.Context, tell func(StepResult) error, evaluating func(r StepResult, done, of int, loss float64)) error {
	if done, err := t.runDueEval(ctx, tell, evaluating); done || err != nil {
		return err
	}
	for t.at.Step < t.cfg.Steps {
		res, err := t.Step(ctx)
		if err != nil {
			return t.leave(err)
		}
		if err := t.goOn(t.settle(false)); err != nil {
			return err
		}
		last := t.at.Step == t.cfg.Steps
		var left error // the evaluation was canceled
		if t.eval != nil && (last || t.cfg.EvalEvery > 0 && t.at.Step%t.cfg.EvalEvery == 0) {
			if left = t.evaluateAfter(ctx, &res, evaluating); t.fatal != nil {
				return t.fatal
			}
		}
		if tell != nil {
			if err := tell(res); err != nil {
				return t.stopped(t.leave(err))
			}
		}
		if left != nil {
			return t.leave(left)
		}
		saves := t.saver != nil && t.saver.Worth() && (last || t.saver.Unsaved || t.cfg.SaveEvery > 0 && t.at.Step%t.cfg.SaveEvery == 0)
		var late error // the error of an earlier asynchronous save: it delays this save, and the receipt's line records it
		if saves {
			late = t.settle(true)
		}
		if err := t.recordDue(saves, last); err != nil {
			return err
		}
		if saves {
			if err := t.saveOrGoOn(last, late); err != nil {
				return err
			}
		}
	}
	if t.saver == nil {
		return t.checkFinite()
	}
	if err := t.settle(true); err != nil && t.fatal == nil { // after a fatal error there is nothing to save
		return t.saveOrGoOn(true, err)
	}
	t.saver.Idle()
	return t.fatal
}

// runDueEval does the evaluation that an interrupted run left out. done says that tell ended the
// run, in good order if err is nil.
func (t *Trainer) runDueEval(ctx context.Context, tell func(StepResult) error, evaluating func(r StepResult, done, of int, loss float64)) (done bool, err error) {
	if !t.EvalDue() || t.eval == nil {
		return false, nil
	}
	res := StepResult{Step: t.at.Step, EvalOnly: true}
	if err := t.evaluateAfter(ctx, &res, evaluating); err != nil {
		return true, t.leave(err)
	}
	if res.Eval == nil {
		return false, nil
	}
	if tell != nil {
		err = tell(res)
	}
	if t.saver != nil {
		t.saver.Evaluated()
	}
	if err != nil {
		return true, t.stopped(t.leave(err))
	}
	return false, nil
}

// evaluateAfter evaluates after the step of res. An error means that the evaluation was canceled,
// and is still due, or that the run can't go on. Other failures are warnings.
func (t *Trainer) evaluateAfter(ctx context.Context, res *StepResult, evaluating func(r StepResult, done, of int, loss float64)) error {
	told := func(done, of int, loss float64) {
		if evaluating != nil {
			evaluating(*res, done, of, loss)
		}
	}
	t.at.EvalDue = true
	told(0, t.eval.steps, 0)
	ev, err := t.EvaluateTold(ctx, told)
	switch {
	case err == nil:
		res.Eval = &ev
	case t.fatal != nil:
		return t.fatal
	case ctx.Err() != nil:
		return ctx.Err()
	default:
		t.cfg.Warnf("step %d: the evaluation failed: %v", t.at.Step, err)
	}
	t.at.EvalDue = false
	return nil
}

// EvalDue says whether the evaluation after the last step was canceled. Run then does it first.
func (t *Trainer) EvalDue() bool { return t.at.EvalDue }

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
	if failed := t.lastSave(); failed != nil {
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

// saveOrGoOn writes a checkpoint, also if the run is about to end: its work would be lost
// otherwise. late is the error of the previous save. A failure is an error only if values are not
// finite, or at the last step after a second try.
func (t *Trainer) saveOrGoOn(last bool, late error) error {
	switch {
	case t.fatal != nil:
		return t.fatal
	case !last && t.saver.Aside():
		if err := t.goOn(late); err != nil {
			return err
		}
		if err := t.flush(); err != nil {
			return t.goOn(err)
		}
		return t.goOn(t.saver.SaveAside(context.Background()))
	}
	if last {
		if err := t.lastSave(); err != nil {
			return err
		}
		return t.goOn(nil)
	}
	_, err := t.Save(context.Background())
	return t.goOn(err)
}

// lastSave writes a checkpoint before the run ends. It tries twice.
func (t *Trainer) lastSave() error {
	_, err := t.Save(context.Background())
	if err != nil && t.fatal == nil {
		_, err = t.Save(context.Background())
	}
	if err == nil || t.fatal != nil || endsTheJob(err) {
		return err
	}
	return t.saver.Lost(err)
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

// checkFinite checks the parameters after the last step if no checkpoint is written. A save would
// check them too.
func (t *Trainer) checkFinite() error {
	if err := t.flush(); err != nil {
		return err
	}
	chunk := run.NewChunk(t.plan.Program)
	for i := range t.plan.Program.Tensors() {
		if t.plan.Program.Params[i].Frozen {
			continue
		}
		found, err := t.nameState(&Diverged{}, i, "value", chunk)
		if err != nil {
			return err
		}
		if found {
			return t.unsoundState(i, "value")
		}
	}
	return nil
}

// Step runs one optimizer step on all ranks. If ctx is canceled, a step of several micro-batches is
// abandoned between two of them, as if it had not begun. In layer order all micro-batches end
// together, so the step is completed.
func (t *Trainer) Step(ctx context.Context) (StepResult, error) {
	if t.fatal != nil {
		return StepResult{}, t.fatal
	}
	if err := ctx.Err(); err != nil {
		return StepResult{}, err
	}
	if t.train == nil {
		return StepResult{}, errors.New("step: the run was configured for inference alone")
	}
	began := time.Now()
	s := t.at.Step
	lr := t.cfg.LearningRate(s)
	if !isFinite(lr) || lr < 0 {
		return StepResult{}, t.fail(s, fmt.Errorf("Config.Own.Schedule: the learning rate is %g, want a finite number of at least 0", lr))
	}
	counted, err := t.train.countTargets(s)
	if err != nil {
		return StepResult{}, t.fail(s, err)
	}
	targets := counted.All
	if targets == 0 {
		return StepResult{}, t.fail(s, errors.New("no target in the global batch counts: all are -1"))
	}
	hyper := t.hyper(s, lr, targets)
	sent, moved, used := t.ranks.CommSent(), t.diskTraffic(), t.ranks.Usage()
	at := stepAt{index: s, hyper: hyper, leaving: leaving{asked: ctx.Err}}
	if err := t.form(&at); err != nil {
		return StepResult{}, t.fail(s, err)
	}
	clear(t.read)
	t.receipt.Begin(t.train.sampler, s)
	if err = t.runStep(&at); err != nil {
		t.fatal = err // the error names the rank and the step
		return StepResult{}, err
	}
	if at.left {
		return StepResult{}, at.leaving.why
	}
	t.at.Pending = false // the section began with the previous step's update
	loss, right, err := t.hostLoss()
	if err != nil {
		return StepResult{}, t.fail(s, err)
	}
	norm := 0.0
	if t.updates() {
		if norm, err = t.gradNorm(&at); err != nil {
			return StepResult{}, t.fail(s, err)
		}
	}
	if err := t.readScale(); err != nil {
		return StepResult{}, t.fail(s, err)
	}
	skipped := false
	if !isFinite(loss) || !isFinite(norm) {
		if skipped, err = t.nonFinite(&at, loss/float64(targets), norm); err != nil {
			return StepResult{}, err
		}
	}
	if !skipped {
		t.inRow = 0
	}
	t.at.Step++
	t.at.EvalDue = false
	t.at.Pending = t.plan.Program.SectionOf(graph.SectionFlush, graph.FormWhole) != nil
	of := t.cfg.At(s)
	res := StepResult{Step: t.at.Step, Rows: of.StepRows(), Loss: float32(loss / float64(targets)), Accuracy: right / float64(targets), LR: lr, Targets: targets, GradNorm: norm, LossScale: hyper[graph.HyperLossScale], Skipped: skipped, SkippedAll: t.at.Skipped, CommBytes: t.ranks.CommSent() - sent}
	traffic := t.diskTraffic()
	res.DiskRead, res.DiskWritten = traffic.Read-moved.Read, traffic.Written-moved.Written
	res.Cached = at.cached
	res.tellComm(t.cfg.Measure, t.ranks.Usage().Sub(used))
	res.DataWait = slices.Max(t.read).Seconds()
	if res.Noise, err = t.noise(res.Rows, counted, norm, hyper[graph.HyperLossScale]); err != nil {
		return StepResult{}, t.fail(s, err)
	}
	if !skipped {
		t.confirm()
	}
	res.Seconds = time.Since(began).Seconds()
	res.FlopsShare = math.NaN()
	if peak := t.cfg.PeakFlops; peak > 0 {
		res.FlopsShare = t.modelFlops(&at) / res.Seconds / peak
	}
	res.TokensPerS = float64(res.Rows*t.cfg.Seq) / res.Seconds
	res.Peak, res.Planned = t.ranks.Memory()
	res.Classes = t.ranks.Classes()
	t.receipt.Ended(receipt.Step{Targets: targets, LR: res.LR, Loss: receipt.Bits32(res.Loss), GradNorm: receipt.Bits64(res.GradNorm), Skipped: res.Skipped})
	return res, nil
}
