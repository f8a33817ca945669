package config

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/plan"
)

// ErrRefused is the kind of errors about a Config that no run could have.
var ErrRefused = plan.ErrRefused

// FieldError is the error for an invalid Config. Its kind is ErrConfig. Its text names each
// field as Config.NAME, with its value, the problem and a valid alternative.
type FieldError struct {
	Field string // "Precision"; the first one if several fields contradict each other
	// Instead lists settings that would make the configuration valid, as in "Reproducible" or
	// "Batch=2"; nil if none are known.
	Instead []string
	err     error
}

func (e *FieldError) Error() string { return e.err.Error() }

// Is reports that the error is of kind ErrRefused.
func (e *FieldError) Is(target error) bool { return target == ErrRefused }

// Unwrap returns the underlying error about the field's value, if there is one.
func (e *FieldError) Unwrap() error { return errors.Unwrap(e.err) }

// Refuse makes a *FieldError from a sentence that begins with the field, as in "Config.Zero 4:
// …".
func Refuse(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	first, _, _ := strings.Cut(err.Error(), " ")
	return &FieldError{Field: strings.TrimSuffix(strings.TrimPrefix(first, "Config."), ":"), err: err}
}

// ErrNoData is the error for a training run without data.
var ErrNoData = Refuse("Config.Data is missing: give a token file (*.bin), a text file, or a folder of text files")

// RefuseField is Refuse for a sentence that does not begin with the field.
func RefuseField(field, format string, args ...any) error {
	return &FieldError{Field: field, err: fmt.Errorf(format, args...)}
}

// OfKind adds a kind, for errors.Is, to an error. The text stays the same.
func OfKind(err, kind error) error { return &kindError{err, kind} }

// kindError is an error of a kind, with its own text.
type kindError struct {
	error
	kind error
}

// Is tells whether target is the kind.
func (e *kindError) Is(target error) bool { return target == e.kind }

func (e *kindError) Unwrap() error { return e.error }
