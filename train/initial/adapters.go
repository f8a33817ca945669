package initial

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// first writes initial values of a parameter. Values of a base parameter are also added to the
// base's hash.
func (w *writer) first(param int, at int64, v []float32) error {
	if name := w.Plan.Program.Params[param].Name; w.base != nil && !lora.IsAdapter(name) {
		w.base.Add(name, v)
	}
	return w.States.Write(param, "value", at, v)
}

// noteBase records which model the run's adapters belong to, for its checkpoints.
func (w *writer) noteBase(path string) {
	if w.base == nil || w.Base.SHA256 != "" {
		return
	}
	*w.Base = saving.Base{SHA256: w.base.Sum()}
	if path != "" {
		w.Base.Path = path
		if abs, err := filepath.Abs(path); err == nil {
			w.Base.Path = abs
		}
	}
}

// give returns the remedy for a run whose adapters differ from those that it loads.
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

// sameAdapters refuses to load adapters into a run that would compute something else with them:
// with another rank or scale, or on other products. was are the options of the run that trained
// them, r holds their tensors, and merge is a further remedy.
func (w *writer) sameAdapters(was lora.Options, r checkpoint.Tensors, merge string) error {
	if err := sameScale(w.Config.LoRA, was, merge); err != nil {
		return err
	}
	give := give(was) + merge
	holds := map[string]bool{}
	for _, f := range r.Tensors() {
		if layer, ok := strings.CutSuffix(lora.ParamName(f.Name), lora.SuffixA); ok {
			holds[layer] = true
		}
	}
	for i := range w.Plan.Program.Params {
		layer, ok := strings.CutSuffix(w.Plan.Program.Params[i].Name, lora.SuffixA)
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

// sameBase refuses a Config.Model whose weights differ from the model that the loaded adapters were
// trained on. No weights of Config.Model would be loaded.
func (w *writer) sameBase(ctx context.Context) (err error) {
	of, init := w.Config.Model, w.Config.Init
	if w.Base.SHA256 == "" || w.Config.Own.Model != nil || !isFolder(of) || filepath.Clean(of) == filepath.Clean(init) {
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
		base.SHA256, err = w.hashBase(ctx, r)
		err = errors.Join(err, r.Close())
	}
	switch {
	case err != nil:
		return fmt.Errorf("Config.Model %s: %w", of, err)
	case base.SHA256 == "" || base.SHA256 == w.Base.SHA256: // "": the folder has a shape but no weights
		return nil
	}
	return config.RefuseField("Model", "Config.Model %s has other weights than the model of the adapters in Config.Init %s (hash %.16s…, not %.16s…); give Config.Model %s, whose own are loaded",
		of, init, base.SHA256, w.Base.SHA256, init)
}

// hashBase returns the lora.BaseHash of the model in r.
func (w *writer) hashBase(ctx context.Context, r checkpoint.Tensors) (string, error) {
	h, chunk := &lora.BaseHash{}, run.NewChunk(w.Plan.Program)
	for i := range w.Plan.Program.Params {
		prm := &w.Plan.Program.Params[i]
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

// loadAdapter loads an adapter's folder and the base model that it names.
func (w *writer) loadAdapter(ctx context.Context, field string, a *planner.Adapter) (err error) {
	r, err := safetensors.Open(filepath.Join(a.Folder, lora.WeightsFile))
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := w.sameAdapters(a.Options, r, ""); err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
	}
	w.base = &lora.BaseHash{}
	if err := w.loadFrom(ctx, field, a.Base, safetensors.FileName); err != nil {
		return err
	}
	w.noteBase(a.Base)
	if got := w.Base.SHA256; a.Hash != "" && a.Hash != got {
		return fmt.Errorf("%s %s: the adapter belongs to another model than %s: its base has the hash %.16s…, this model has %.16s…; name its own model in %s",
			field, a.Folder, a.Base, a.Hash, got, filepath.Join(a.Folder, lora.ConfigFile))
	}
	if a.Hash == "" {
		w.notes = append(w.notes, fmt.Sprintf("%s names no hash of its base: that %s is its model is not checked", filepath.Join(a.Folder, lora.ConfigFile), a.Base))
	}
	if err := w.loadAdapterTensors(ctx, r); err != nil {
		return fmt.Errorf("%s %s: %w", field, a.Folder, err)
	}
	return nil
}

// loadAdapterTensors loads the run's adapters from a file that has only these.
func (w *writer) loadAdapterTensors(ctx context.Context, r *safetensors.Reader) error {
	index := map[string]int{}
	for i := range w.Plan.Program.Tensors() {
		if name := w.Plan.Program.Params[i].Name; lora.IsAdapter(name) {
			index[name] = i
		}
	}
	chunk := run.NewChunk(w.Plan.Program)
	for _, f := range r.Tensors() {
		name := lora.ParamName(f.Name)
		i, ok := index[name]
		if !ok {
			return fmt.Errorf("tensor %q is of no product of the model that Config.LoRA names", f.Name)
		}
		delete(index, name)
		if want := w.Plan.Program.Params[i].Shape; !slices.Equal(f.Shape, want) {
			return fmt.Errorf("tensor %q has shape %v; the model needs %v", f.Name, f.Shape, want)
		}
		odd := checkpoint.NonFinite{Tensor: f.Name, Of: f.Elements()}
		if err := errors.Join(ctx.Err(), w.loadTensor(r, f.Name, i, chunk, odd.Look)); err != nil {
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

func isFolder(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// Same refuses adapters in Config.Init whose rank or scale differs from the run's.
func Same(ctx context.Context, c *config.Config) (err error) {
	if c.Init == "" || c.Resume || strings.EqualFold(c.Init, "random") {
		return nil
	}
	m, err := planner.OpenModel(ctx, c.Init, model.ConfigFile)
	if err != nil {
		return fmt.Errorf("Config.Init %s: %w", c.Init, err)
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	was, err := m.Adapters()
	if err == nil && was.Active() {
		merge := ""
		if m.Saved() != nil {
			merge = merging(m.Path)
		}
		err = sameScale(c.LoRA, was, merge)
	}
	if err != nil {
		return fmt.Errorf("Config.Init %s: %w", c.Init, err)
	}
	return nil
}
