package spillway

import (
	"fmt"

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

func (t *Trainer) restore(folder string) error {
	p := t.plan.Program
	readers := map[string]*safetensors.Reader{}
	defer func() {
		for _, r := range readers {
			r.Close()
		}
	}()
	chunk := make([]float32, run.ChunkElems)
	for i := range p.Params {
		for _, st := range t.states.Names(i) {
			r := readers[st.Name]
			if r == nil {
				var err error
				if r, err = checkpoint.OpenState(folder, tensorFile(st.Name)); err != nil {
					return err
				}
				readers[st.Name] = r
			}
			want := p.Params[i].Shape
			if st.PerParam {
				want = []int64{1}
			}
			name := p.Params[i].Name
			tensor, ok := r.Tensor(name)
			if !ok {
				// Trainable here, frozen when it was saved: its states start from zero.
				if st.Name != "value" {
					continue
				}
				return fmt.Errorf("%w: %s has no tensor %q", checkpoint.ErrDamaged, r.Path(), name)
			}
			if !equalShape(tensor.Shape, want) {
				return fmt.Errorf("%s: tensor %q has shape %v; the model needs %v", r.Path(), name, tensor.Shape, want)
			}
			if st.PerParam {
				v := make([]float32, 1)
				if err := r.ReadFloat32(name, 0, v); err != nil {
					return err
				}
				if err := t.states.WriteScalar(i, st.Name, v[0]); err != nil {
					return err
				}
				continue
			}
			if err := t.loadTensor(r, name, i, st.Name, chunk); err != nil {
				return err
			}
		}
	}
	return nil
}
