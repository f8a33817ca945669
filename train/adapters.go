package train

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

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

// give is the remedy for a run with other adapters than those that it loads.
func give(was lora.Options) string {
	return "give Config.LoRA " + planner.Shell([]string{was.String()})
}

// sameScale is sameAdapters without the tensors: it compares rank and scale.
func sameScale(now, was lora.Options, merge string) error {
	switch {
	case !now.Active():
		return config.RefuseField("LoRA", "it holds adapters, and the run has no Config.LoRA; %s%s", give(was), merge)
	case now.Rank != was.Rank || now.Alpha != was.Alpha:
		return config.RefuseField("LoRA", "its adapters have r %d and alpha %g, and Config.LoRA has r %d and alpha %g, with which they compute something else; %s%s",
			was.Rank, was.Alpha, now.Rank, now.Alpha, give(was), merge)
	}
	return nil
}

// sameAdapters refuses to load adapters into a run that would compute something else with
// them: with another rank or scale, or beside other products. was are the options of the run
// that trained them, r holds their tensors, and merge is a further remedy.
func (t *Trainer) sameAdapters(was lora.Options, r checkpoint.Tensors, merge string) error {
	if err := sameScale(t.cfg.LoRA, was, merge); err != nil {
		return err
	}
	give := give(was) + merge
	holds := map[string]bool{}
	for _, f := range r.Tensors() {
		if layer, ok := strings.CutSuffix(lora.ParamName(f.Name), lora.SuffixA); ok {
			holds[layer] = true
		}
	}
	for i := range t.plan.Program.Params {
		layer, ok := strings.CutSuffix(t.plan.Program.Params[i].Name, lora.SuffixA)
		if ok && !holds[layer] {
			return config.RefuseField("LoRA", "it has no adapter of %s, which Config.LoRA names; %s", layer, give)
		}
		delete(holds, layer)
	}
	for _, layer := range slices.Sorted(maps.Keys(holds)) {
		return config.RefuseField("LoRA", "its adapter of %s is not among those of Config.LoRA, which leaves out %d of its adapters; %s", layer, len(holds), give)
	}
	return nil
}

// sameBase refuses a Config.Model with weights of another model than that which the loaded
// adapters were trained beside: nothing would be loaded of them.
func (t *Trainer) sameBase(ctx context.Context) (err error) {
	of, init := t.cfg.Model, t.cfg.Init
	if t.at.Base.SHA256 == "" || t.cfg.Own.Model != nil || !isFolder(of) || filepath.Clean(of) == filepath.Clean(init) {
		return nil
	}
	m, err := planner.OpenModel(ctx, of, safetensors.FileName)
	if err != nil {
		return fmt.Errorf("Config.Model %s: %w", of, err)
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	var base saving.Base
	var r checkpoint.Tensors
	if saved := m.Saved(); saved != nil {
		if _, base, err = saving.AdaptersOf(saved); err == nil && base.SHA256 == "" {
			r, err = saved.State(checkpoint.ModelState)
		}
	} else if path := safetensors.WeightsOf(of); path != "" {
		r, err = safetensors.Open(path)
	}
	if err == nil && r != nil {
		base.SHA256, err = t.hashBase(ctx, r)
		err = errors.Join(err, r.Close())
	}
	switch {
	case err != nil:
		return fmt.Errorf("Config.Model %s: %w", of, err)
	case base.SHA256 == "" || base.SHA256 == t.at.Base.SHA256: // the first is a shape alone
		return nil
	}
	return config.RefuseField("Model", "Config.Model %s has other weights than the model of the adapters in Config.Init %s (hash %.16s…, not %.16s…); give Config.Model %s, whose own are loaded",
		of, init, base.SHA256, t.at.Base.SHA256, init)
}

// hashBase is the lora.BaseHash of the model in r.
func (t *Trainer) hashBase(ctx context.Context, r checkpoint.Tensors) (string, error) {
	h, chunk := &lora.BaseHash{}, run.NewChunk(t.plan.Program)
	for i := range t.plan.Program.Params {
		prm := &t.plan.Program.Params[i]
		if lora.IsAdapter(prm.Name) {
			continue
		}
		found, ok := tensorOf(r, prm.Name)
		if !ok {
			return "", fmt.Errorf("tensor %q is missing", prm.Name)
		}
		for at, n := int64(0), found.Elements(); at < n; {
			v := chunk[:min(int64(len(chunk)), n-at)]
			if err := errors.Join(ctx.Err(), r.ReadFloat32(found.Name, at, v)); err != nil {
				return "", err
			}
			h.Add(prm.Name, v)
			at += int64(len(v))
		}
	}
	return h.Sum(), nil
}

// loadAdapter loads an adapter's folder: the base model that it names, and the adapter.
func (t *Trainer) loadAdapter(ctx context.Context, field string, a *planner.Adapter) (err error) {
	r, err := safetensors.Open(filepath.Join(a.Folder, lora.WeightsFile))
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := t.sameAdapters(a.Options, r, ""); err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
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
	if err := t.loadAdapterTensors(ctx, r); err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
	}
	return nil
}

// loadAdapterTensors loads the run's adapters from a file that has only these.
func (t *Trainer) loadAdapterTensors(ctx context.Context, r *safetensors.Reader) error {
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
