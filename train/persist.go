package train

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/run"
)

// tensorFile is a checkpoint's file of one flat state: parameters under "model".
func tensorFile(state string) string {
	if state == "value" {
		return "model"
	}
	return state
}

// checkpointStates lists every state of every parameter, by file.
func (t *Trainer) checkpointStates() []checkpoint.State {
	p := t.plan.Program
	index := map[string]int{}
	var files []checkpoint.State
	chunk := make([]float32, run.ChunkElems)
	byName := map[string]int{}
	for i := range p.Params {
		byName[p.Params[i].Name] = i
		for _, st := range t.states.Names(i) {
			k, ok := index[st.Name]
			if !ok {
				k = len(files)
				index[st.Name] = k
				files = append(files, checkpoint.State{Name: tensorFile(st.Name), Stream: t.streamer(st, byName, chunk)})
			}
			shape := p.Params[i].Shape
			if st.PerParam {
				shape = []int64{1}
			}
			files[k].Tensors = append(files[k].Tensors, safetensors.Tensor{Name: p.Params[i].Name, DType: safetensors.F32, Shape: shape})
		}
	}
	return files
}

func (t *Trainer) streamer(st graph.State, byName map[string]int, chunk []float32) func(string, func(int64, []float32) error) error {
	return func(tensor string, sink func(int64, []float32) error) error {
		i := byName[tensor]
		if st.PerParam {
			v, err := t.states.ReadScalar(i, st.Name)
			if err != nil {
				return err
			}
			return sink(0, []float32{v})
		}
		return t.states.Stream(i, st.Name, chunk, sink)
	}
}

// expect sees that the checkpoint holds exactly the states that its optimizer has:
// without one of them training would go on from zeros and say nothing.
// What another optimizer wrote is not looked at.
func (t *Trainer) expect(c checkpoint.Entry) error {
	var was runRecord
	if err := json.Unmarshal(c.Manifest.Run, &was); err != nil {
		return fmt.Errorf("%w: %s: its run can't be read: %w", checkpoint.ErrDamaged, c.Folder, err)
	}
	if was.Optimizer != t.cfg.optimizer().Name {
		return nil
	}
	flat, perParam := t.cfg.optimizer().StateNames()
	known := append([]string{"model"}, append(flat, perParam...)...)
	for _, f := range c.Manifest.Files {
		name, isState := strings.CutSuffix(f.Name, ".safetensors")
		if isState && !slices.Contains(known, name) {
			return fmt.Errorf("%w: %s holds %s, which --optimizer %s does not have", checkpoint.ErrDamaged, c.Folder, f.Name, was.Optimizer)
		}
	}
	for _, name := range known {
		needed := name == "model" || was.Data == nil || was.Trained > 0
		if needed && !c.Manifest.Has(name) {
			return fmt.Errorf("%w: %s holds no %s.safetensors", checkpoint.ErrDamaged, c.Folder, name)
		}
	}
	return nil
}

// restore loads every state of every parameter. Parameters that were frozen when it
// was saved have none of the optimizer's there: theirs stay zero.
func (t *Trainer) restore(c checkpoint.Choice) error {
	p := t.plan.Program
	readers := map[string]*safetensors.Reader{}
	defer func() {
		for _, r := range readers {
			_ = r.Close()
		}
	}()
	chunk := make([]float32, run.ChunkElems)
	for i := range p.Params {
		var present, absent string // a state's name that is there, and one that is not
		for _, st := range t.states.Names(i) {
			file := tensorFile(st.Name)
			r := readers[file]
			if r == nil && c.Manifest.Has(file) {
				var err error
				if r, err = checkpoint.OpenState(c.Folder, file); err != nil {
					return err
				}
				readers[file] = r
			}
			found := false
			if r != nil {
				var err error
				if found, err = t.restoreState(r, i, st, chunk); err != nil {
					return err
				}
			}
			switch {
			case !found && st.Name == "value":
				return fmt.Errorf("%w: %s has no tensor %q", checkpoint.ErrDamaged, r.Path(), p.Params[i].Name)
			case st.Name == "value":
			case found:
				present = file
			default:
				absent = file
			}
		}
		if present != "" && absent != "" {
			return fmt.Errorf("%w: %s holds %s of %q and no %s", checkpoint.ErrDamaged, c.Folder, present, p.Params[i].Name, absent)
		}
	}
	return nil
}

// restoreState loads one state of a parameter, where the file has it.
func (t *Trainer) restoreState(r *safetensors.Reader, param int, st graph.State, chunk []float32) (found bool, err error) {
	want := t.plan.Program.Params[param].Shape
	if st.PerParam {
		want = []int64{1}
	}
	name := t.plan.Program.Params[param].Name
	tensor, ok := r.Tensor(name)
	if !ok {
		return false, nil
	}
	if !equalShape(tensor.Shape, want) {
		return false, fmt.Errorf("%s: tensor %q has shape %v; the model needs %v", r.Path(), name, tensor.Shape, want)
	}
	if !st.PerParam {
		return true, t.loadTensor(r, name, param, st.Name, chunk)
	}
	v := make([]float32, 1)
	if err := r.ReadFloat32(name, 0, v); err != nil {
		return true, err
	}
	return true, t.states.WriteScalar(param, st.Name, v[0])
}
