package train

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/train/saving"
)

// Parameters lists the names of the model's parameters, in the model's order.
func (t *Trainer) Parameters() (names []string) {
	for i := range t.plan.Program.Tensors() {
		names = append(names, t.plan.Program.Params[i].Name)
	}
	return names
}

// Parameter returns a copy of one parameter. Parameters of published models have their Hugging Face
// names.
func (t *Trainer) Parameter(name string) (shape []int64, values []float32, err error) {
	i, err := t.parameter(name)
	if err != nil {
		return nil, nil, err
	}
	prm := &t.plan.Program.Params[i]
	values = make([]float32, prm.Elems())
	return slices.Clone(prm.Shape), values, t.states.Read(i, "value", 0, values)
}

// SetParameter replaces a parameter's values: row-major, of the parameter's size, and all finite.
// Its optimizer states stay as they are. Frozen parameters can't be set with Config.FrozenCache,
// which holds outputs computed from them.
func (t *Trainer) SetParameter(name string, values []float32) error {
	i, err := t.parameter(name)
	if err != nil {
		return err
	}
	prm := &t.plan.Program.Params[i]
	if int64(len(values)) != prm.Elems() {
		return fmt.Errorf("set parameter %.80q: %d values, want the %d of shape %v", name, len(values), prm.Elems(), prm.Shape)
	}
	for k, v := range values {
		if !isFinite(float64(v)) {
			return fmt.Errorf("set parameter %.80q: element %d is %g, want finite values", name, k, v)
		}
	}
	t.decoder = nil // its cached keys and values are of the old weights
	if prm.Frozen && t.prefix != nil {
		return fmt.Errorf("set parameter %.80q: it is frozen, and Config.FrozenCache holds outputs computed from it; set it before the run, or run without the cache", name)
	}
	if prm.Frozen {
		t.at.Base = saving.Base{} // adapters then belong to another model
	}
	if err := t.states.Write(i, "value", 0, values); err != nil {
		return err
	}
	return t.refresh()
}

// parameter finds a parameter and brings its values up to date with all steps done.
func (t *Trainer) parameter(name string) (int, error) {
	i := slices.Index(t.Parameters(), name)
	if i < 0 {
		return i, fmt.Errorf("the model has no parameter %.80q", name)
	}
	return i, t.flush()
}
