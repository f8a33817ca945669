package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// initialize gives every state its first values. The program's "init" section writes zeros;
// then parameters come from Init, or all states from a checkpoint.
func (t *Trainer) initialize(ctx context.Context) error {
	if err := t.zero(); err != nil {
		return err
	}
	if err := t.startScale(nil); err != nil {
		return fmt.Errorf("initialise: %w", err)
	}
	if err := t.firstValues(ctx); err != nil {
		return err
	}
	return t.refresh()
}

// zero sets every state to zero.
func (t *Trainer) zero() error {
	if t.plan.Program.SectionOf(graph.SectionInit, graph.FormWhole) == nil {
		return nil
	}
	if err := t.ranks.Each("the initialisation", func(r *run.Rank) error { return r.Exec.RunSection(graph.SectionInit.String(), nil) }); err != nil {
		return fmt.Errorf("initialise: %w", err)
	}
	return nil
}

// firstValues writes the initial values of the parameters, or of every state when the run
// resumes.
func (t *Trainer) firstValues(ctx context.Context) error {
	if t.cfg.Resume {
		resumed, err := t.resume(ctx)
		if err != nil || resumed {
			return err
		}
	}
	if t.cfg.LoRA.Active() && !t.cfg.Inference {
		t.base = &lora.BaseHash{}
	}
	if strings.EqualFold(t.cfg.Init, "random") {
		err := t.randomize(ctx)
		t.noteBase("")
		return err
	}
	if err := t.load(ctx, t.cfg.Init); err != nil {
		return err
	}
	if t.cfg.LoRA.Active() && !t.cfg.Inference {
		if err := t.sameBase(ctx); err != nil {
			return err
		}
	}
	t.noteBase(t.cfg.Init)
	return nil
}

// refresh recomputes the 16-bit parameters from the fp32 master weights that the host has
// written.
func (t *Trainer) refresh() error {
	if t.plan.Program.SectionOf(graph.SectionRefresh, graph.FormWhole) == nil {
		return nil
	}
	return t.ranks.Each("the rounding of parameters to 16 bits", func(r *run.Rank) error {
		return r.Exec.RunSection(graph.SectionRefresh.String(), nil)
	})
}

// randomize draws every parameter from its distribution.
func (t *Trainer) randomize(ctx context.Context) error {
	return t.draw(ctx, func(int) bool { return true })
}

// draw draws the parameters that want selects from their distributions. A value depends only on
// the seed, the parameter's name and the element, so it is the same at every world size and
// stage.
func (t *Trainer) draw(ctx context.Context, want func(param int) bool) error {
	chunk := run.NewChunk(t.plan.Program)
	draw := &drawing{}
	for i := range t.plan.Program.Tensors() {
		if !want(i) {
			continue
		}
		prm := &t.plan.Program.Params[i]
		stream := num.Stream(prm.Name)
		for at := int64(0); at < prm.Elems(); {
			if err := ctx.Err(); err != nil {
				return err
			}
			v := chunk[:min(int64(len(chunk)), prm.Elems()-at)]
			*draw = drawing{v: v, prm: prm, seed: uint64(t.cfg.Seed), stream: stream, first: uint64(at)}
			t.pool.Run((len(v)+drawBlock-1)/drawBlock, draw)
			if err := t.first(i, at, v); err != nil {
				return fmt.Errorf("initialise parameter %q: %w", prm.Name, err)
			}
			at += int64(len(v))
		}
	}
	return nil
}

const drawBlock = 1 << 13 // elements per pool task index

// drawing is the pool task that draws a chunk of a parameter.
type drawing struct {
	v                   []float32
	prm                 *graph.Param
	seed, stream, first uint64
}

// RunIndex draws the i-th block.
func (d *drawing) RunIndex(i int) {
	lo := i * drawBlock
	v := d.v[lo:min(lo+drawBlock, len(d.v))]
	switch d.prm.Init {
	case graph.InitNormal:
		num.FillNormal(v, d.prm.Std, d.seed, d.stream, d.first+uint64(lo))
	case graph.InitUniform:
		for k := range v {
			u := num.Uniform(d.seed, d.stream, d.first+uint64(lo+k))
			v[k] = float32((2*u - 1) * d.prm.Std)
		}
	case graph.InitOnes:
		for k := range v {
			v[k] = 1
		}
	default:
		clear(v)
	}
}

// load reads the parameters from safetensors in Hugging Face's layout, with or without the
// "transformer." prefix. A checkpoint's weights are checked while they are loaded. Only if they
// turn out damaged are all checkpoints verified, to find the newest whole one.
func (t *Trainer) load(ctx context.Context, path string) error {
	field := "Config.Init"
	if t.cfg.Inference {
		field = "Config.Model" // the only folder of generate and eval
	}
	if saved := t.cfg.opened.Saved(); saved != nil {
		if err := t.loadSaved(ctx, saved); err != nil {
			return fmt.Errorf("%s %s: %w", field, saved.Folder, err)
		}
		return nil
	}
	err := t.loadFrom(ctx, field, path, checkpoint.AsLoaded)
	if errors.Is(err, checkpoint.ErrDamaged) {
		err = t.loadFrom(ctx, field, path, safetensors.FileName)
	}
	return err
}

// loadFrom loads from the checkpoint or model at path given, after verifying its config and the
// named weights.
func (t *Trainer) loadFrom(ctx context.Context, field, given, weights string) error {
	if t.base != nil { // discards the hash of an earlier attempt
		t.base = &lora.BaseHash{}
	}
	saved, passed, err := checkpoint.Take(ctx, t.cfg.opener(), given, model.ConfigFile, weights)
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, given, err)
	}
	if saved == nil {
		return t.loadModel(ctx, field, given)
	}
	err = t.loadSaved(ctx, saved)
	if err = errors.Join(err, saved.Close()); err != nil {
		return fmt.Errorf("%s %s: %w", field, saved.Folder, err)
	}
	for _, p := range passed {
		t.cfg.Warnf("%s: %s", field, p)
	}
	return nil
}

// loadModel loads a model's file or folder, or an adapter's folder with its base.
func (t *Trainer) loadModel(ctx context.Context, field, path string) error {
	if a, err := planner.OpenAdapter(path); err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	} else if a != nil {
		return t.loadAdapter(ctx, field, a)
	}
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	}
	if st.IsDir() {
		if c, err := planner.ReadConfig(filepath.Join(path, "config.json")); err == nil {
			if err := t.describes(path, c); err != nil {
				return err
			}
		}
	}
	r, err := safetensors.Open(path)
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	}
	defer r.Close()
	if holdsAdapters(r) {
		return fmt.Errorf("%s %s: it holds adapters, and these weights do not say how they are scaled; give the whole checkpoint's folder, or merge them into the model first", field, path)
	}
	names, err := t.match(r)
	if err == nil {
		err = t.loadTensors(ctx, r, names)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	}
	t.noteFP32(nil, r, names)
	return nil
}

// loadSaved loads the parameters of a checkpoint.
func (t *Trainer) loadSaved(ctx context.Context, saved *checkpoint.Checkpoint) error {
	if text, err := saved.Read(model.ConfigFile); err == nil {
		c, err := model.Parse(text)
		if err == nil {
			err = t.describes(saved.Folder, c)
		}
		if err != nil {
			return err
		}
	}
	r, err := saved.State(checkpoint.ModelState)
	if err != nil {
		return err
	}
	defer r.Close()
	if holdsAdapters(r) {
		was, base, err := saving.AdaptersOf(saved)
		if err == nil {
			err = t.sameAdapters(was, r, merging(saved.Folder))
		}
		if err != nil {
			return err
		}
		t.at.Base = base // the checkpoint's own copy of its values may be rounded
	}
	names, err := t.match(r)
	if err == nil {
		err = t.loadCheckpoint(ctx, saved, names)
	}
	if err == nil {
		t.noteFP32(saved, r, names)
	}
	return err
}

// describes refuses weights whose config.json is of another model than the run's.
func (t *Trainer) describes(path string, c model.Config) error {
	if t.cfg.Own.Model == nil && !c.SameModel(t.cfg.Shape) {
		return fmt.Errorf("Config.Init %s: its config.json describes another model than Config.Model %s", path, t.cfg.Model)
	}
	return nil
}

// noteFP32 adds a note about 16-bit weights with which generate and eval compute in fp32.
func (t *Trainer) noteFP32(saved *checkpoint.Checkpoint, r checkpoint.Tensors, names []string) {
	if !t.cfg.Inference || !strings.EqualFold(t.cfg.PrecisionName(), "fp32") {
		return
	}
	if line := saving.ComputedInFP32(saved, r, names); line != "" {
		t.notes = append(t.notes, line)
	}
}

// drawMissing draws the initial adapters, which a base model's own file does not hold.
func (t *Trainer) drawMissing(ctx context.Context, names []string) error {
	return t.draw(ctx, func(param int) bool { return names[param] == "" })
}

// loadTensors reads the parameters; names are their names in r.
func (t *Trainer) loadTensors(ctx context.Context, r checkpoint.Tensors, names []string) error {
	chunk := run.NewChunk(t.plan.Program)
	for i := range t.plan.Program.Tensors() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if names[i] == "" {
			continue
		}
		odd := checkpoint.NonFinite{Tensor: names[i], Of: t.plan.Program.Params[i].Elems()}
		if err := t.loadTensor(r, names[i], i, chunk, odd.Look); err != nil {
			return err
		}
		if odd.Count > 0 {
			return nothingStarts(&odd)
		}
	}
	return t.drawMissing(ctx, names)
}

func nothingStarts(odd *checkpoint.NonFinite) error {
	return fmt.Errorf("tensor %q: %d of %d values are not finite, first element %d; nothing can start from them", odd.Tensor, odd.Count, odd.Of, odd.First)
}

// loadCheckpoint is loadTensors for a checkpoint: it reads ahead and compares checksums.
func (t *Trainer) loadCheckpoint(ctx context.Context, saved *checkpoint.Checkpoint, names []string) error {
	index := map[string]int{}
	odd := make([]checkpoint.NonFinite, len(names))
	var wants []checkpoint.Want
	for i, name := range names {
		if name == "" {
			continue
		}
		n := t.plan.Program.Params[i].Elems()
		index[name] = i
		wants = append(wants, checkpoint.Want{State: checkpoint.ModelState, Tensor: name, N: n})
		odd[i] = checkpoint.NonFinite{Tensor: name, Of: n}
	}
	err := saved.Load(ctx, wants, checkpoint.Loading{Sink: func(_, tensor string, start int64, v []float32) error {
		i := index[tensor]
		odd[i].Look(start, v)
		return t.first(i, start, v)
	}})
	if err != nil {
		return err
	}
	for i := range odd {
		if odd[i].Count > 0 {
			return nothingStarts(&odd[i])
		}
	}
	return t.drawMissing(ctx, names)
}

// merging is the way to train all of a checkpoint with adapters; the command says how.
func merging(folder string) string {
	return ", or merge the adapters first of " + planner.Shell([]string{folder})
}

// holdsAdapters says whether there are adapters among the tensors.
func holdsAdapters(r checkpoint.Tensors) bool {
	return slices.ContainsFunc(r.Tensors(), func(f safetensors.Tensor) bool { return lora.IsAdapter(f.Name) })
}

// tensorOf finds a parameter by its name, or by what other files call it.
func tensorOf(r checkpoint.Tensors, param string) (found safetensors.Tensor, ok bool) {
	for _, name := range []string{param, "transformer." + param, strings.TrimPrefix(param, "model.")} {
		if found, ok = r.Tensor(name); ok {
			break
		}
	}
	return found, ok
}

// match finds each parameter's name in the file and compares shapes. If the file has no
// adapters, the names of the run's stay empty.
func (t *Trainer) match(r checkpoint.Tensors) ([]string, error) {
	names := make([]string, len(t.plan.Program.Tensors()))
	given := holdsAdapters(r)
	for i := range names {
		prm := &t.plan.Program.Params[i]
		found, ok := tensorOf(r, prm.Name)
		if !ok && !given && lora.IsAdapter(prm.Name) {
			continue
		}
		if !ok {
			return nil, fmt.Errorf("tensor %q is missing", prm.Name)
		}
		names[i] = found.Name
		if !slices.Equal(found.Shape, prm.Shape) {
			return nil, fmt.Errorf("tensor %q has shape %v; the model needs %v", names[i], found.Shape, prm.Shape)
		}
	}
	return names, nil
}

// loadTensor reads a whole parameter; each look is called with its values.
func (t *Trainer) loadTensor(r checkpoint.Tensors, name string, param int, chunk []float32, look ...func(start int64, v []float32)) error {
	n := t.plan.Program.Params[param].Elems()
	for at := int64(0); at < n; {
		v := chunk[:min(int64(len(chunk)), n-at)]
		if err := r.ReadFloat32(name, at, v); err != nil {
			return err
		}
		for _, f := range look {
			f(at, v)
		}
		if err := t.first(param, at, v); err != nil {
			return err
		}
		at += int64(len(v))
	}
	return nil
}
