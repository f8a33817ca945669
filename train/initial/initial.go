// Package initial writes the initial values of a run's parameters: drawn from their distributions, or
// read from a model, a checkpoint or adapters.
package initial

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
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// Run is the run whose parameters get their initial values.
type Run struct {
	Config  *planner.Resolved
	Plan    *plan.Plan
	States  *run.States
	Pool    *pool.Pool
	Folders filesys.Opener
	Opened  *planner.Model // Config.Init, if it is open already
	Base    *saving.Base   // set: the model that the run's adapters belong to
}

type writer struct {
	Run
	base  *lora.BaseHash // hash of the adapters' base while it is loaded; nil: not needed
	notes []string
}

// Write writes the parameters' initial values, as Config.Init says. It returns notes for the run.
func Write(ctx context.Context, r Run) (notes []string, err error) {
	w := &writer{Run: r}
	trains := r.Config.LoRA.Active() && !r.Config.Inference
	if trains {
		w.base = &lora.BaseHash{}
	}
	if strings.EqualFold(r.Config.Init, "random") {
		err := w.draw(ctx, func(int) bool { return true })
		w.noteBase("")
		return w.notes, err
	}
	err = w.load(ctx, r.Config.Init)
	if err == nil && trains {
		err = w.sameBase(ctx)
	}
	if err == nil {
		w.noteBase(r.Config.Init)
	}
	return w.notes, err
}

// draw draws the parameters that want selects from their distributions. A value depends only on
// the seed, the parameter's name and the element, so it is the same at every world size and
// stage.
func (w *writer) draw(ctx context.Context, want func(param int) bool) error {
	chunk := run.NewChunk(w.Plan.Program)
	draw := &drawing{}
	for i := range w.Plan.Program.Tensors() {
		if !want(i) {
			continue
		}
		prm := &w.Plan.Program.Params[i]
		stream := num.Stream(prm.Name)
		for at := int64(0); at < prm.Elems(); {
			if err := ctx.Err(); err != nil {
				return err
			}
			v := chunk[:min(int64(len(chunk)), prm.Elems()-at)]
			*draw = drawing{v: v, prm: prm, seed: uint64(w.Config.Seed), stream: stream, first: uint64(at)}
			w.Pool.Run((len(v)+drawBlock-1)/drawBlock, draw)
			if err := w.first(i, at, v); err != nil {
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
func (w *writer) load(ctx context.Context, path string) error {
	field := "Config.Init"
	if w.Config.Inference {
		field = "Config.Model" // the only folder of generate and eval
	}
	if saved := w.Opened.Saved(); saved != nil {
		if err := w.loadSaved(ctx, saved); err != nil {
			return fmt.Errorf("%s %s: %w", field, saved.Folder, err)
		}
		return nil
	}
	err := w.loadFrom(ctx, field, path, checkpoint.AsLoaded)
	if errors.Is(err, checkpoint.ErrDamaged) {
		err = w.loadFrom(ctx, field, path, safetensors.FileName)
	}
	return err
}

// loadFrom loads from the checkpoint or model at path given, after verifying its config and the
// named weights.
func (w *writer) loadFrom(ctx context.Context, field, given, weights string) error {
	if w.base != nil { // discards the hash of an earlier attempt
		w.base = &lora.BaseHash{}
	}
	saved, passed, err := checkpoint.Take(ctx, w.Folders, given, model.ConfigFile, weights)
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, given, err)
	}
	if saved == nil {
		return w.loadModel(ctx, field, given)
	}
	err = w.loadSaved(ctx, saved)
	if err = errors.Join(err, saved.Close()); err != nil {
		return fmt.Errorf("%s %s: %w", field, saved.Folder, err)
	}
	for _, p := range passed {
		w.Config.Warnf("%s: %s", field, p)
	}
	return nil
}

// loadModel loads a model's file or folder, or an adapter's folder with its base.
func (w *writer) loadModel(ctx context.Context, field, path string) error {
	if a, err := planner.OpenAdapter(path); err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	} else if a != nil {
		return w.loadAdapter(ctx, field, a)
	}
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	}
	if st.IsDir() {
		if c, err := planner.ReadConfig(filepath.Join(path, "config.json")); err == nil {
			if err := w.describes(path, c); err != nil {
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
	names, err := w.match(r)
	if err == nil {
		err = w.loadTensors(ctx, r, names)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", field, path, err)
	}
	w.noteFP32(nil, r, names)
	if line := skipped(r, names); line != "" {
		w.notes = append(w.notes, fmt.Sprintf("%s %s: %s", field, path, line))
	}
	return nil
}

// buffers are the ends of the names of tensors that hold constants, or a second copy of a tied
// head, in Hugging Face's models. A model gives the same results without them.
var buffers = []string{".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "lm_head.weight"}

// skipped describes how many tensors of r are not read; "" if they are all buffers. names are the
// names that are read.
func skipped(r checkpoint.Tensors, names []string) string {
	count, first := 0, ""
	for _, f := range r.Tensors() {
		isBuffer := slices.ContainsFunc(buffers, func(end string) bool { return strings.HasSuffix(f.Name, end) })
		if isBuffer || slices.Contains(names, f.Name) {
			continue
		}
		if count++; count == 1 {
			first = f.Name
		}
	}
	switch count {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("tensor %.80q is not read: the model has no such parameter", first)
	}
	return fmt.Sprintf("%d tensors are not read, the first is %.80q: the model has no such parameters", count, first)
}

// loadSaved loads the parameters of a checkpoint.
func (w *writer) loadSaved(ctx context.Context, saved *checkpoint.Checkpoint) error {
	if text, err := saved.Read(model.ConfigFile); err == nil {
		c, err := model.Parse(text)
		if err == nil {
			err = w.describes(saved.Folder, c)
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
			err = w.sameAdapters(was, r, merging(saved.Folder))
		}
		if err != nil {
			return err
		}
		*w.Base = base // the checkpoint's own copy of its values may be rounded
	}
	names, err := w.match(r)
	if err == nil {
		err = w.loadCheckpoint(ctx, saved, names)
	}
	if err == nil {
		w.noteFP32(saved, r, names)
	}
	return err
}

// describes refuses weights whose config.json describes another model than the run's.
func (w *writer) describes(path string, c model.Config) error {
	if w.Config.Own.Model == nil && !c.SameModel(w.Config.Shape) {
		return fmt.Errorf("Config.Init %s: its config.json describes another model than Config.Model %s", path, w.Config.Model)
	}
	return nil
}

// noteFP32 adds a note if generate or eval compute in fp32 with 16-bit weights.
func (w *writer) noteFP32(saved *checkpoint.Checkpoint, r checkpoint.Tensors, names []string) {
	if !w.Config.Inference || !strings.EqualFold(w.Config.PrecisionName(), "fp32") {
		return
	}
	if line := saving.ComputedInFP32(saved, r, names); line != "" {
		w.notes = append(w.notes, line)
	}
}

// drawMissing draws the initial adapters, because a base model's own file has none.
func (w *writer) drawMissing(ctx context.Context, names []string) error {
	return w.draw(ctx, func(param int) bool { return names[param] == "" })
}

// loadTensors reads the parameters; names are their names in r.
func (w *writer) loadTensors(ctx context.Context, r checkpoint.Tensors, names []string) error {
	chunk := run.NewChunk(w.Plan.Program)
	for i := range w.Plan.Program.Tensors() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if names[i] == "" {
			continue
		}
		odd := checkpoint.NonFinite{Tensor: names[i], Of: w.Plan.Program.Params[i].Elems()}
		if err := w.loadTensor(r, names[i], i, chunk, odd.Look); err != nil {
			return err
		}
		if odd.Count > 0 {
			return nothingStarts(&odd)
		}
	}
	return w.drawMissing(ctx, names)
}

func nothingStarts(odd *checkpoint.NonFinite) error {
	return fmt.Errorf("tensor %q: %d of %d values are not finite, first element %d; nothing can start from them", odd.Tensor, odd.Count, odd.Of, odd.First)
}

// loadCheckpoint is loadTensors for a checkpoint: it reads ahead and compares checksums.
func (w *writer) loadCheckpoint(ctx context.Context, saved *checkpoint.Checkpoint, names []string) error {
	index := map[string]int{}
	odd := make([]checkpoint.NonFinite, len(names))
	var wants []checkpoint.Want
	for i, name := range names {
		if name == "" {
			continue
		}
		n := w.Plan.Program.Params[i].Elems()
		index[name] = i
		wants = append(wants, checkpoint.Want{State: checkpoint.ModelState, Tensor: name, N: n})
		odd[i] = checkpoint.NonFinite{Tensor: name, Of: n}
	}
	err := saved.Load(ctx, wants, checkpoint.Loading{Sink: func(_, tensor string, start int64, v []float32) error {
		i := index[tensor]
		odd[i].Look(start, v)
		return w.first(i, start, v)
	}})
	if err != nil {
		return err
	}
	for i := range odd {
		if odd[i].Count > 0 {
			return nothingStarts(&odd[i])
		}
	}
	return w.drawMissing(ctx, names)
}

// merging returns the remedy for training all parameters of a checkpoint with adapters.
func merging(folder string) string {
	return ", or merge the adapters first of " + planner.Shell([]string{folder})
}

// holdsAdapters says whether there are adapters among the tensors.
func holdsAdapters(r checkpoint.Tensors) bool {
	return slices.ContainsFunc(r.Tensors(), func(f safetensors.Tensor) bool { return lora.IsAdapter(f.Name) })
}

// tensorOf finds a parameter by its name, or by its name in other files.
func tensorOf(r checkpoint.Tensors, param string) (found safetensors.Tensor, ok bool) {
	for _, name := range []string{param, "transformer." + param, strings.TrimPrefix(param, "model.")} {
		if found, ok = r.Tensor(name); ok {
			break
		}
	}
	return found, ok
}

// match finds each parameter's name in the file and compares shapes. If the file has no adapters,
// the names of the run's adapters stay empty.
func (w *writer) match(r checkpoint.Tensors) ([]string, error) {
	names := make([]string, len(w.Plan.Program.Tensors()))
	given := holdsAdapters(r)
	for i := range names {
		prm := &w.Plan.Program.Params[i]
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

// loadTensor reads a complete parameter; each look is called with its values.
func (w *writer) loadTensor(r checkpoint.Tensors, name string, param int, chunk []float32, look ...func(start int64, v []float32)) error {
	n := w.Plan.Program.Params[param].Elems()
	for at := int64(0); at < n; {
		v := chunk[:min(int64(len(chunk)), n-at)]
		if err := r.ReadFloat32(name, at, v); err != nil {
			return err
		}
		for _, f := range look {
			f(at, v)
		}
		if err := w.first(param, at, v); err != nil {
			return err
		}
		at += int64(len(v))
	}
	return nil
}
