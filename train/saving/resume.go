package saving

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
)

// Resume loads the newest complete checkpoint, and returns its record; nil if there is none. States
// are compared with their checksums while they are loaded. If again is true, the error is
// ErrDamaged: the caller sets all states to zero and calls Resume again, which loads the checkpoint
// before.
func (s *Saver) Resume(ctx context.Context) (was *Record, again bool, err error) {
	choice, err := s.choose(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("resume: %w", err)
	}
	s.notes = nil
	was, err = s.resumeFrom(ctx, choice)
	again = errors.Is(err, checkpoint.ErrDamaged) && s.damaged[choice.Name] == nil
	if again {
		s.damaged[choice.Name] = err
	}
	return was, again, err
}

// Notes returns notes for the user about the checkpoint that the run resumed from.
func (s *Saver) Notes() []string { return s.notes }

// choose finds the checkpoint to resume from, without those that turned out damaged, by name.
func (s *Saver) choose(ctx context.Context) (checkpoint.Choice, error) {
	return s.store.Dir().ChooseBy(func(e *checkpoint.Checkpoint) error {
		if err := s.damaged[e.Name]; err != nil {
			return err
		}
		if err := e.Whole(ctx); err != nil {
			return err
		}
		return s.expect(e.Entry)
	})
}

// resumeFrom resumes the run from a checkpoint. The error wraps ErrDamaged if the loaded data
// differ from the saved data.
func (s *Saver) resumeFrom(ctx context.Context, choice checkpoint.Choice) (*Record, error) {
	tell := func() {
		for _, p := range choice.Passed {
			s.cfg.Warnf("%s", p)
		}
	}
	if !choice.Found() {
		tell()
		return nil, s.refuseLoop(choice)
	}
	saved, err := s.store.Dir().Open(choice.Name)
	if err != nil {
		tell()
		return nil, fmt.Errorf("resume: %w", err)
	}
	defer saved.Close() // it was only read
	was, err := s.sameRun(saved)
	if err == nil {
		err = s.Seek(choice, was)
	}
	if err == nil {
		err = s.refuseLoop(choice)
	}
	if err == nil {
		err = s.restore(ctx, saved)
	}
	if errors.Is(err, checkpoint.ErrDamaged) {
		return nil, err // reported when another checkpoint replaces it
	}
	tell()
	if choice.Diverged {
		s.cfg.Warnf("%s is taken for want of a better one: a run that went on from it became non-finite before its first update, as from every other whole checkpoint here; if this run ends so too, start afresh in another folder", choice.Name)
	}
	if err != nil {
		return nil, err
	}
	if err := s.store.Continue(choice); err != nil {
		return nil, err
	}
	s.reach(choice.Manifest.Step, &was)
	s.at.EvalDue = was.EvalDue && !s.store.IsEvaluated(choice.Manifest)
	s.base, s.kept = s.at.Applied(), s.at.Updates()
	return &was, nil
}

// Replay resumes a run that saves nothing from an open checkpoint, as Resume would. It is for
// checking a receipt, which records the samples of the steps.
func Replay(ctx context.Context, r Run, ranks *run.Ranks, states *run.States, from *checkpoint.Checkpoint) (Record, error) {
	s := &Saver{cfg: r.Config, plan: r.Plan, data: r.Data, at: r.Progress, ranks: ranks, states: states, replays: true}
	was, err := s.sameRun(from)
	s.arithmetic = was.Arithmetic // the receipt records the steps' arithmetic
	if err == nil {
		s.print, err = r.Data.Fingerprint()
	}
	if err == nil {
		err = s.Seek(checkpoint.Choice{Entry: from.Entry}, was)
	}
	if err == nil {
		err = s.restore(ctx, from)
	}
	s.reach(from.Manifest.Step, &was)
	return was, err
}

// reach sets the run's progress to that of the checkpoint.
func (s *Saver) reach(step int, was *Record) {
	s.at.Step, s.at.Skipped, s.at.Pending = step, was.Skipped, false
	s.at.Noise = was.Noise
	if was.Base != nil {
		s.at.Base = *was.Base
	}
}

// sameRun refuses a checkpoint whose states have another meaning in this run.
func (s *Saver) sameRun(saved *checkpoint.Checkpoint) (was Record, err error) {
	folder := saved.Folder
	if err := json.Unmarshal(saved.Manifest.Run, &was); err != nil {
		return was, fmt.Errorf("resume: %w: %s: %w", checkpoint.ErrDamaged, folder, err)
	}
	if want := s.cfg.UpdateRule().Name; was.Optimizer != want {
		return was, config.RefuseField("Optimizer", "resume: %s was written with Config.Optimizer %s, this run has %s, whose states are others; give Config.Optimizer %s, or begin anew from its weights: Config.Init %s with another Config.Checkpoint",
			folder, was.Optimizer, want, was.Optimizer, folder)
	}
	if now := s.cfg.LoRA.String(); was.Settings["lora"] != now {
		give := "leave Config.LoRA out"
		if of := was.Settings["lora"]; of != "" {
			give = "give Config.LoRA " + planner.Shell([]string{of})
		}
		return was, config.RefuseField("LoRA", "resume: %s was written with Config.LoRA %s, this run has %s, whose adapters are others; %s, or begin anew in another Config.Checkpoint",
			folder, orNone(was.Settings["lora"]), orNone(now), give)
	}
	if was.Model != s.ownName() {
		return was, fmt.Errorf("resume: the checkpoint %s holds model %s, not %s", folder, orPublished(was.Model), orPublished(s.ownName()))
	}
	if s.cfg.Own.Model != nil {
		return was, nil // each parameter is compared with the model's
	}
	text, err := saved.Read(model.ConfigFile)
	if err != nil {
		return was, fmt.Errorf("resume: %w", err)
	}
	c, err := model.Parse(text)
	if err != nil {
		return was, fmt.Errorf("resume: %s: %w", filepath.Join(folder, model.ConfigFile), err)
	}
	if !c.SameModel(s.cfg.Shape) {
		return was, config.RefuseField("Model", "resume: the checkpoint %s holds another model than Config.Model %s", folder, s.cfg.Model)
	}
	return was, nil
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// ownName returns the name of the model that the program provides; "" for a model with a
// config.json.
func (s *Saver) ownName() string {
	if s.cfg.Own.Model == nil {
		return ""
	}
	return s.cfg.Own.Model.Name
}

func orPublished(name string) string {
	if name == "" {
		return "of a config.json"
	}
	return fmt.Sprintf("%.80q", name)
}

// expect checks that the checkpoint holds exactly the states of its optimizer. Otherwise a missing
// state would silently start from zeros. Checkpoints of other optimizers are not checked.
func (s *Saver) expect(c checkpoint.Entry) error {
	var was Record
	if err := json.Unmarshal(c.Manifest.Run, &was); err != nil {
		return fmt.Errorf("%w: %s: its run can't be read: %w", checkpoint.ErrDamaged, c.Folder, err)
	}
	if was.Optimizer != s.cfg.UpdateRule().Name {
		return nil
	}
	flat, perParam := s.cfg.UpdateRule().StateNames()
	known := append([]string{checkpoint.ModelState}, append(flat, perParam...)...)
	for _, name := range c.Manifest.States() {
		if !slices.Contains(known, name) {
			return fmt.Errorf("%w: %s holds %s, which its own optimizer %s does not have", checkpoint.ErrDamaged, c.Folder, name, was.Optimizer)
		}
	}
	for _, name := range known {
		needed := name == checkpoint.ModelState || !s.cfg.UpdateRule().Splits() && (was.Data == nil || was.Trained > 0)
		if needed && !c.Manifest.Has(name) {
			return fmt.Errorf("%w: %s holds no %s", checkpoint.ErrDamaged, c.Folder, name)
		}
	}
	return nil
}

// restore loads every state of every parameter. Parameters that were frozen when the checkpoint was
// saved have no optimizer states there; these stay zero.
func (s *Saver) restore(ctx context.Context, c *checkpoint.Checkpoint) error {
	held, err := c.Contents()
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	p := s.plan.Program
	for i := range p.Tensors() {
		name := p.Params[i].Name
		tensor := held[name]
		var present, absent string // names of a present and of an absent state
		for _, st := range s.states.Names(i) {
			switch state := run.Saved(st.Name); {
			case slices.Contains(tensor.States, state):
				if state != checkpoint.ModelState {
					present = state
				}
			case state == checkpoint.ModelState:
				return fmt.Errorf("resume: %w: %s has no tensor %q", checkpoint.ErrDamaged, c.Folder, name)
			default:
				absent = state
			}
		}
		if present != "" && absent != "" {
			return fmt.Errorf("resume: %w: %s holds %s of %q and no %s", checkpoint.ErrDamaged, c.Folder, present, name, absent)
		}
		if !slices.Equal(tensor.Shape, p.Params[i].Shape) {
			return fmt.Errorf("resume: %s: tensor %q has shape %v; the model needs %v", c.Folder, name, tensor.Shape, p.Params[i].Shape)
		}
	}
	if err := s.ranks.Load(ctx, c); errors.Is(err, checkpoint.ErrDamaged) {
		return err // the error names the file
	} else if err != nil {
		return fmt.Errorf("resume from %s: %w", c.Folder, err)
	}
	return nil
}
