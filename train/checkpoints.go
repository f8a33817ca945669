package train

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/hfconfig"
)

// lookAtCheckpoints refuses, before anything is made, what the folder of
// checkpoints can't be used for: a start beside the checkpoints of another run,
// and a second process.
func lookAtCheckpoints(c *request) error {
	if c.Checkpoint == "" {
		return nil
	}
	d, err := checkpoint.OpenDir(c.opener(), c.Checkpoint)
	if err == nil {
		err = d.Held()
	}
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, errors.Join(err, d.Close()))
	}
	return errors.Join(refuseUsed(&c.Config, d), d.Close())
}

// opener opens the folder of checkpoints.
func (h *hooks) opener() filesys.Opener {
	if h.folders != nil {
		return h.folders
	}
	return filesys.System
}

// refuseUsed refuses a start beside checkpoints that it would not go on from.
func refuseUsed(c *config.Config, d checkpoint.Dir) error {
	if c.Resume {
		return nil
	}
	entries, err := d.Scan()
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	if n := len(entries); n > 0 && c.CheckpointMark == "" {
		return config.Refuse("Config.Checkpoint %s holds checkpoints already (%d, the newest is %s); give Config.Resume to go on from it, or a fresh folder", c.Checkpoint, n, entries[n-1].Name)
	}
	for _, e := range entries {
		if e.Err != nil || e.Manifest.Mark != c.CheckpointMark {
			return config.Refuse("Config.Checkpoint %s: %s does not bear the mark %q of runs that may be replaced; give Config.Resume to go on from the newest, or a fresh folder", c.Checkpoint, e.Name, c.CheckpointMark)
		}
	}
	return nil
}

// openStore locks the folder of checkpoints, and looks again: another run may have
// come and gone since lookAtCheckpoints.
func (t *Trainer) openStore() error {
	c := t.cfg
	if c.Checkpoint == "" {
		return nil
	}
	s, err := checkpoint.Open(c.Checkpoint, checkpoint.Options{Keep: c.Keep, Mark: c.CheckpointMark, Folders: c.folders})
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	t.store = s
	if err := refuseUsed(&c.Config, s.Dir()); err != nil {
		return err
	}
	for _, note := range s.Notes() {
		t.cfg.Warnf("Config.Checkpoint: %s", note)
	}
	if t.data, err = t.train.fingerprint(); err != nil {
		return fmt.Errorf("Config.Data: %w", err)
	}
	if err := s.Damaged(); err != nil {
		t.cfg.Warnf("what Config.Checkpoint %s remembers beside its checkpoints is damaged and read in part: %v", c.Checkpoint, err)
	}
	return nil
}

// Save writes a checkpoint of the current step and returns its folder. Values that
// are not finite are a *Diverged, and nothing is saved; nor is anything where ctx is
// canceled before the checkpoint is whole.
func (t *Trainer) Save(ctx context.Context) (string, error) {
	if err := cmp.Or(ctx.Err(), t.fatal); err != nil {
		return "", err
	}
	if t.store == nil {
		return "", config.RefuseField("Checkpoint", "save: no Config.Checkpoint folder is configured")
	}
	if err := t.settle(true); err != nil {
		return "", err
	}
	if t.savesAside() {
		if err := t.saveAside(ctx); err != nil {
			return "", err
		}
		if err := t.settle(true); err != nil {
			return "", err
		}
		t.idle()
		return t.store.Last().Folder, nil
	}
	m, files, err := t.describeSave()
	if err != nil {
		return "", err
	}
	saved, err := t.write(ctx, m, files)
	var odd *checkpoint.NonFinite
	if errors.As(err, &odd) {
		return "", t.unsound(odd)
	}
	if err != nil {
		return "", err
	}
	t.adopt(saved, t.updatesDone(), t.updatesSoFar())
	return saved.Folder, nil
}

// write saves the states as they are, each rank its own.
func (t *Trainer) write(ctx context.Context, m checkpoint.Manifest, files []checkpoint.Blob) (checkpoint.Entry, error) {
	p, err := t.store.Begin(m)
	if err != nil {
		return checkpoint.Entry{}, err
	}
	parts, err := t.ranks.Save(ctx, p)
	if err != nil {
		return checkpoint.Entry{}, p.Abort(err)
	}
	return p.Finish(parts, files)
}

// saved tells whether the newest checkpoint holds the state as it is.
func (t *Trainer) saved() bool { return t.store.Last() != nil && t.store.Last().Step == t.step }

// updatesSoFar counts the updates of the run, with one that waits for the next step.
func (t *Trainer) updatesSoFar() int { return t.step - t.skipped.all }

// worthSaving tells whether an update followed the newest checkpoint. While steps are
// skipped none does: more checkpoints would hold the same states, and hide the last
// one from which training is known to go on.
func (t *Trainer) worthSaving() bool {
	return t.store.Last() == nil && t.saving == nil || t.updatesSoFar() > t.kept
}

// confirm tells the store that training went on from its newest checkpoint: an
// update was applied after it. That is tried once for each: the next is another try.
func (t *Trainer) confirm() {
	if t.store == nil {
		return
	}
	last := t.store.Last()
	if last == nil || last == t.confirmed || t.updatesDone() <= t.base {
		return
	}
	t.confirmed = last
	t.tend(t.store.Confirm)
}

// updatesDone is how many updates the states have seen, or one less.
func (t *Trainer) updatesDone() int {
	n := t.step - t.skipped.all
	if t.pending { // the last step's update waits for the next step
		n--
	}
	return n
}

// resume loads the newest whole checkpoint, if there is any. Its states are compared
// with their checksums as they are loaded: one that turns out damaged gives way to the
// one before.
func (t *Trainer) resume(ctx context.Context) (bool, error) {
	damaged := map[string]error{}
	notes := len(t.notes)
	for {
		choice, err := t.choose(ctx, damaged)
		if err != nil {
			return false, fmt.Errorf("resume: %w", err)
		}
		t.notes = t.notes[:notes]
		err = t.resumeFrom(ctx, choice)
		if !errors.Is(err, checkpoint.ErrDamaged) || damaged[choice.Name] != nil {
			return choice.Found(), err
		}
		damaged[choice.Name] = err
		if err := t.zero(); err != nil {
			return false, err
		}
	}
}

// choose finds the checkpoint that the run goes on from, by its name not one of those
// that turned out damaged.
func (t *Trainer) choose(ctx context.Context, damaged map[string]error) (checkpoint.Choice, error) {
	return t.store.Dir().ChooseBy(func(e *checkpoint.Checkpoint) error {
		if err := damaged[e.Name]; err != nil {
			return err
		}
		if err := e.Whole(ctx); err != nil {
			return err
		}
		return t.expect(e.Entry)
	})
}

// resumeFrom makes the run go on from a checkpoint. The error wraps ErrDamaged where
// what is loaded is not what was saved.
func (t *Trainer) resumeFrom(ctx context.Context, choice checkpoint.Choice) error {
	tell := func() {
		for _, p := range choice.Passed {
			t.cfg.Warnf("%s", p)
		}
	}
	if !choice.Found() {
		tell()
		return t.refuseLoop(choice)
	}
	saved, err := t.store.Dir().Open(choice.Name)
	if err != nil {
		tell()
		return fmt.Errorf("resume: %w", err)
	}
	defer saved.Close() // it was read alone
	was, err := t.sameRun(saved)
	if err == nil {
		err = t.seek(choice, was)
	}
	if err == nil {
		err = t.refuseLoop(choice)
	}
	if err == nil {
		err = t.restore(ctx, saved)
	}
	if errors.Is(err, checkpoint.ErrDamaged) {
		return err // told when another one is taken in its place
	}
	tell()
	if choice.Diverged {
		t.cfg.Warnf("%s is taken for want of a better one: a run that went on from it became non-finite before its first update, as from every other whole checkpoint here; if this run ends so too, start afresh in another folder", choice.Name)
	}
	if err != nil {
		return err
	}
	if err := t.store.Continue(choice); err != nil {
		return err
	}
	t.step = choice.Manifest.Step
	t.savedRanks, _ = strconv.Atoi(was.Settings["ranks"]) // 0: an older version recorded none
	t.skipped.all = was.Skipped
	t.base, t.kept = t.updatesDone(), t.updatesSoFar()
	return t.startScale(was.LossScale)
}

// sameRun refuses a checkpoint whose states mean something else than this run's.
func (t *Trainer) sameRun(saved *checkpoint.Checkpoint) (was runRecord, err error) {
	folder := saved.Folder
	if err := json.Unmarshal(saved.Manifest.Run, &was); err != nil {
		return was, fmt.Errorf("resume: %w: %s: %w", checkpoint.ErrDamaged, folder, err)
	}
	if want := t.cfg.UpdateRule().Name; was.Optimizer != want {
		return was, config.RefuseField("Optimizer", "resume: %s was written with Config.Optimizer %s, this run has %s, whose states are others; give Config.Optimizer %s, or begin anew from its weights: Config.Init %s with another Config.Checkpoint",
			folder, was.Optimizer, want, was.Optimizer, folder)
	}
	if was.Model != t.ownName() {
		return was, fmt.Errorf("resume: the checkpoint %s holds model %s, not %s", folder, orPublished(was.Model), orPublished(t.ownName()))
	}
	if t.cfg.Own.Model != nil {
		return was, nil // its parameters are held against the model's one by one
	}
	text, err := saved.Read(hfconfig.FileName)
	if err != nil {
		return was, fmt.Errorf("resume: %w", err)
	}
	c, err := hfconfig.Parse(text)
	if err != nil {
		return was, fmt.Errorf("resume: %s: %w", filepath.Join(folder, hfconfig.FileName), err)
	}
	if !c.SameModel(t.cfg.Shape) {
		return was, config.RefuseField("Model", "resume: the checkpoint %s holds another model than Config.Model %s", folder, t.cfg.Model)
	}
	return was, nil
}

// ownName is the name of the program's own model; "" of one of config.json.
func (t *Trainer) ownName() string {
	if t.cfg.Own.Model == nil {
		return ""
	}
	return t.cfg.Own.Model.Name
}

func orPublished(name string) string {
	if name == "" {
		return "of a config.json"
	}
	return fmt.Sprintf("%.80q", name)
}
