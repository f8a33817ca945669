package receipt

import (
	"errors"
	"fmt"
	"strings"
)

// ErrDiffers is the kind of errors about a run that differs from its receipt, and about a
// receipt whose chain breaks.
var ErrDiffers = errors.New("the run is not as its receipt says")

// Is reports whether target is ErrDiffers.
func (e *Broken) Is(target error) bool { return target == ErrDiffers }

// Difference is the first place where repeated steps differ from the record.
type Difference struct {
	Step  int    // the first step with a difference; for states, the step after which they were recorded
	What  string // what differs in that step, or at the start; "": only the states
	State *Place // nil: the states are equal
	After int    // the step after which State differs
}

func (d *Difference) String() string {
	var parts []string
	if d.What != "" {
		parts = append(parts, fmt.Sprintf("step %d: %s", d.Step, d.What))
	}
	if d.State != nil {
		parts = append(parts, fmt.Sprintf("the states after step %d: %s", d.After, d.State))
	}
	return strings.Join(parts, "; ")
}

// Otherwise is a property of a run's start that differs from the record.
type Otherwise struct{ What, Here, Recorded string }

// SameStart returns a property of a run that differs from the record, nil if none does. Fields
// of Config are not compared: paths are covered by content hashes, and FieldsDiffer compares
// the others.
func (r *Run) SameStart(recorded *Run) *Otherwise {
	for _, c := range []struct {
		what      string
		got, want any
	}{
		{"data", r.Data, recorded.Data}, {"model", r.Model, recorded.Model}, {"tensors", r.Tensors, recorded.Tensors},
		{"arithmetic", r.Arithmetic, recorded.Arithmetic}, {"own values", r.Own, recorded.Own}, {"program", r.Program, recorded.Program},
		{"epochs' version", r.Epochs, recorded.Epochs}, {"format", r.Format, recorded.Format},
	} {
		if got, want := fmt.Sprint(c.got), fmt.Sprint(c.want); got != want {
			return &Otherwise{c.what, got, want}
		}
	}
	return nil
}

// FieldsDiffer returns the name of a field of Config, other than paths, that differs from the
// record, with both values; "" if none does.
func (r *Run) FieldsDiffer(recorded *Run) (field, got, want string) {
	for name, text := range recorded.Config {
		if !IsPath(name) && string(r.Config[name]) != string(text) && (field == "" || name < field) {
			field, got, want = name, string(r.Config[name]), string(text)
		}
	}
	for name, text := range r.Config {
		if _, known := recorded.Config[name]; !known && !IsPath(name) && (field == "" || name < field) {
			field, got, want = name, string(text), ""
		}
	}
	return field, got, want
}

// IsPath tells whether a field of Config is a path whose contents are recorded as a hash.
func IsPath(field string) bool {
	switch field {
	case "Model", "Data", "DataGlob", "Init", "Tokenizer", "Template", "TextField":
		return true
	}
	return false
}
