package receipt

import (
	"errors"
	"fmt"
	"strings"
)

// ErrDiffers is of what is not as a receipt says, and of receipts whose chain breaks.
var ErrDiffers = errors.New("the run is not as its receipt says")

// Is puts a broken chain among what differs.
func (e *Broken) Is(target error) bool { return target == ErrDiffers }

// Difference is where steps that are run again first are not as recorded.
type Difference struct {
	Step  int    // the first step with a difference; of states that after which they were recorded
	What  string // of that step, or of the start; "": the states alone
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

// Otherwise is what of a run's start is not as recorded.
type Otherwise struct{ What, Here, Recorded string }

// SameStart says what of a run is not as recorded, nil for nothing, but for the fields of
// Config: paths lead to what has hashes, and others have FieldsDiffer.
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

// FieldsDiffer names a field of Config that is not as recorded, but for paths; "": none.
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

// IsPath tells whether a field of Config says where something lies, whose content has a
// hash.
func IsPath(field string) bool {
	switch field {
	case "Model", "Data", "DataGlob", "Init", "Tokenizer", "Template", "TextField":
		return true
	}
	return false
}
