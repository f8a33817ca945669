package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/train/saving"
)

// openSaver locks the folder of checkpoints and checks that it has room.
func (t *Trainer) openSaver(ctx context.Context) (err error) {
	if t.cfg.Checkpoint == "" {
		return nil
	}
	t.saver, err = saving.Open(saving.Run{Config: t.cfg.Resolved, Plan: t.plan, Data: t.train, Progress: &t.at, Folders: t.cfg.folders,
		Arithmetic: saving.Arithmetic(&t.cfg.Config, t.platform.GPU())})
	if err != nil {
		return err
	}
	return t.saver.CheckRoom(ctx)
}

// Save writes a checkpoint of the current step and returns its folder. If values are not finite,
// the error is a *Diverged and nothing is saved. Nothing is saved either if ctx is canceled before
// the checkpoint is complete.
func (t *Trainer) Save(ctx context.Context) (string, error) {
	if err := cmp.Or(ctx.Err(), t.fatal); err != nil {
		return "", err
	}
	if t.saver == nil {
		return "", config.RefuseField("Checkpoint", "save: no Config.Checkpoint folder is configured")
	}
	if err := cmp.Or(t.settle(true), t.flush()); err != nil {
		return "", err
	}
	if err := t.recordOrWarn(true); err != nil {
		return "", err
	}
	folder, err := t.saver.Save(ctx)
	return folder, t.sound(err)
}

// CheckpointBytes returns the disk space of one checkpoint, in bytes; 0 without
// Config.Checkpoint.
func (t *Trainer) CheckpointBytes() (int64, error) {
	if t.saver == nil {
		return 0, nil
	}
	return t.saver.Bytes()
}

// settle adopts the checkpoint that was being written, once it is durable: see
// saving.Saver.Settle.
func (t *Trainer) settle(wait bool) error {
	if t.saver == nil {
		return nil
	}
	return t.sound(t.saver.Settle(wait))
}

// sound turns a save's error about a non-finite state into the run's Diverged error, unless a
// later step has already reported that.
func (t *Trainer) sound(err error) error {
	var odd *checkpoint.NonFinite
	switch {
	case !errors.As(err, &odd):
		return err
	case t.fatal != nil:
		return nil
	}
	return t.unsound(odd)
}

// settled is settle for a run that ends anyway: a failure is only a warning. Afterwards the
// store is idle.
func (t *Trainer) settled() {
	if t.saver == nil {
		return
	}
	if err := t.settle(true); err != nil && t.fatal == nil {
		t.cfg.Warnf("%v", err)
	}
	t.saver.Idle()
}

// resume loads the newest complete checkpoint, if there is one. If the checkpoint turns out damaged
// while it is loaded, the one before it is loaded instead.
func (t *Trainer) resume(ctx context.Context) (bool, error) {
	was, again, err := t.saver.Resume(ctx)
	for again {
		if err := t.zero(); err != nil {
			return false, err
		}
		was, again, err = t.saver.Resume(ctx)
	}
	t.notes = append(t.notes, t.saver.Notes()...)
	if err != nil || was == nil {
		return false, err
	}
	t.savedRanks, _ = strconv.Atoi(was.Settings["ranks"]) // 0: an older version recorded none
	t.countSteps()
	switch {
	case t.EvalDue() && t.eval != nil:
		t.notes = append(t.notes, fmt.Sprintf("the evaluation after step %d, which was interrupted, comes first", t.at.Step))
	case t.EvalDue():
		t.notes = append(t.notes, fmt.Sprintf("the evaluation after step %d, which was interrupted, is left out: it needs Config.EvalData", t.at.Step))
	}
	return true, t.startScale(was.LossScale)
}
