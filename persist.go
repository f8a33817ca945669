package spillway

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/run"
)

// runIdentity is what a resumed run must agree on with the run that saved:
// otherwise the states mean something else.
type runIdentity struct {
	Optimizer string `json:"optimizer"`
}

// tensorFile is a checkpoint's file of one flat state: parameters under "model".
func tensorFile(state string) string {
	if state == "value" {
		return "model"
	}
	return state
}

// Save writes a checkpoint of the current step and prunes old ones. It returns
// the checkpoint's folder.
func (t *Trainer) Save() (string, error) {
	if t.cfg.Checkpoint == "" {
		return "", errors.New("save: no --checkpoint folder is configured")
	}
	if err := t.flush(); err != nil {
		return "", err
	}
	run, err := json.Marshal(runIdentity{Optimizer: t.cfg.optimizer().Name})
	if err != nil {
		return "", err
	}
	m := checkpoint.Manifest{Step: t.step, PlanHash: t.plan.Hash(), Ranks: t.cfg.Ranks, Zero: t.cfg.Zero, Run: run}
	folder, err := checkpoint.Save(t.cfg.Checkpoint, m, t.checkpointStates(), func(folder string) error {
		return hfconfig.Write(folder, t.model, "float32")
	})
	if err != nil {
		return "", err
	}
	return folder, checkpoint.Prune(t.cfg.Checkpoint, t.cfg.Keep)
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

// resume loads the newest checkpoint, if there is one.
func (t *Trainer) resume() (bool, error) {
	list, err := checkpoint.List(t.cfg.Checkpoint)
	if err != nil || len(list) == 0 {
		return false, err
	}
	folder := list[len(list)-1]
	m, err := checkpoint.Verify(folder)
	if err != nil {
		return false, fmt.Errorf("resume: %w", err)
	}
	var run runIdentity
	if err := json.Unmarshal(m.Run, &run); err != nil {
		return false, fmt.Errorf("resume: %w: %s: %w", checkpoint.ErrDamaged, folder, err)
	}
	if want := t.cfg.optimizer().Name; run.Optimizer != want {
		return false, fmt.Errorf("resume: %s was written with --optimizer %s, this run has %s", folder, run.Optimizer, want)
	}
	c, err := hfconfig.Read(filepath.Join(folder, "config.json"))
	if err != nil {
		return false, fmt.Errorf("resume: %w", err)
	}
	if !c.SameModel(t.model) {
		return false, fmt.Errorf("resume: the checkpoint %s holds another model than --model %s", folder, t.cfg.Model)
	}
	if err := t.restore(folder); err != nil {
		return false, fmt.Errorf("resume from %s: %w", folder, err)
	}
	t.step = m.Step
	return true, nil
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
