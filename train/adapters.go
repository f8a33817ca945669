package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/dustin/go-humanize"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// first writes initial values of a parameter. Those of a base parameter also go into the base's
// hash.
func (t *Trainer) first(param int, at int64, v []float32) error {
	if name := t.plan.Program.Params[param].Name; t.base != nil && !lora.IsAdapter(name) {
		t.base.Add(name, v)
	}
	return t.states.Write(param, "value", at, v)
}

// noteAdapters adds a note that says which adapters are trained.
func (t *Trainer) noteAdapters() {
	if !t.cfg.LoRA.Active() {
		return
	}
	matrices, trained, all := 0, int64(0), int64(0)
	for i := range t.plan.Program.Tensors() {
		prm := &t.plan.Program.Params[i]
		all += prm.Elems()
		if !prm.Frozen {
			trained += prm.Elems()
			matrices++
		}
	}
	t.notes = append(t.notes, fmt.Sprintf("lora: r %d, alpha %g, %d matrices, %s trained parameters of %s",
		t.cfg.LoRA.Rank, t.cfg.LoRA.Alpha, matrices/2, humanize.Comma(trained), humanize.Comma(all)))
}

// noteBase records which model the run's adapters belong to, for its checkpoints.
func (t *Trainer) noteBase(path string) {
	if t.base == nil || t.at.Base.SHA256 != "" {
		return
	}
	t.at.Base = saving.Base{SHA256: t.base.Sum()}
	if path != "" {
		t.at.Base.Path = path
		if abs, err := filepath.Abs(path); err == nil {
			t.at.Base.Path = abs
		}
	}
}

// baseOf takes over the base recorded in a checkpoint with adapters. Its own copy of the base's
// values may be rounded.
func (t *Trainer) baseOf(saved *checkpoint.Checkpoint) {
	var was saving.Record
	if json.Unmarshal(saved.Manifest.Run, &was) == nil && was.Base != nil {
		t.at.Base = *was.Base
	}
}

// loadAdapter loads an adapter's folder: the base model that it names, and the adapter.
func (t *Trainer) loadAdapter(ctx context.Context, field string, a *planner.Adapter) error {
	has := t.cfg.LoRA
	if has.Rank != a.Rank || has.Alpha != a.Alpha {
		return config.RefuseField("LoRA", "%s %s is an adapter with r %d and alpha %g, and Config.LoRA is %q; give the same", field, a.Folder, a.Rank, a.Alpha, has.String())
	}
	t.base = &lora.BaseHash{}
	if err := t.loadFrom(ctx, field, a.Base, safetensors.FileName); err != nil {
		return err
	}
	t.noteBase(a.Base)
	if got := t.at.Base.SHA256; a.Hash != "" && a.Hash != got {
		return fmt.Errorf("%s %s: the adapter belongs to another model than %s: its base has the hash %.16s…, this model has %.16s…; name its own model in %s",
			field, a.Folder, a.Base, a.Hash, got, filepath.Join(a.Folder, lora.ConfigFile))
	}
	if a.Hash == "" {
		t.notes = append(t.notes, fmt.Sprintf("%s names no hash of its base: that %s is its model is not checked", filepath.Join(a.Folder, lora.ConfigFile), a.Base))
	}
	if err := t.loadAdapterTensors(ctx, filepath.Join(a.Folder, lora.WeightsFile)); err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
	}
	return nil
}

// loadAdapterTensors loads the run's adapters from a file that has only these.
func (t *Trainer) loadAdapterTensors(ctx context.Context, path string) (err error) {
	r, err := safetensors.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	index := map[string]int{}
	for i := range t.plan.Program.Tensors() {
		if name := t.plan.Program.Params[i].Name; lora.IsAdapter(name) {
			index[name] = i
		}
	}
	chunk := run.NewChunk(t.plan.Program)
	for _, f := range r.Tensors() {
		name := lora.ParamName(f.Name)
		i, ok := index[name]
		if !ok {
			return fmt.Errorf("tensor %q is of no product of the model that Config.LoRA names", f.Name)
		}
		delete(index, name)
		if want := t.plan.Program.Params[i].Shape; !slices.Equal(f.Shape, want) {
			return fmt.Errorf("tensor %q has shape %v; the model needs %v", f.Name, f.Shape, want)
		}
		odd := checkpoint.NonFinite{Tensor: f.Name, Of: f.Elements()}
		if err := errors.Join(ctx.Err(), t.loadTensor(r, f.Name, i, chunk, odd.Look)); err != nil {
			return err
		}
		if odd.Count > 0 {
			return nothingStarts(&odd)
		}
	}
	for name := range index {
		return fmt.Errorf("tensor %q is missing", lora.TensorName(name, ""))
	}
	return nil
}
